// Charts of the lag in the past hour: an area and a line in SVG. The style is in streams.css.

import { formatDuration } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const MIN_SCALE_SECONDS = 60; // the smallest lag at the top of a chart, so that a lag of seconds does not look large

// Create an empty chart with this CSS class.
export function createChart(cssClass) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", cssClass);
  svg.setAttribute("role", "img");
  svg.setAttribute("viewBox", "0 0 120 30");
  svg.setAttribute("preserveAspectRatio", "none");
  const area = svg.appendChild(document.createElementNS(SVG, "path"));
  area.setAttribute("class", "area");
  const line = svg.appendChild(document.createElementNS(SVG, "path"));
  line.setAttribute("class", "line");
  line.setAttribute("vector-effect", "non-scaling-stroke");
  return svg;
}

// Draw `lag` (seconds, oldest first). Does nothing if the chart shows the same lag already.
export function drawChart(svg, lag) {
  const highest = Math.max(MIN_SCALE_SECONDS, ...lag);
  const points = lag.map((seconds, index) => `${((120 * index) / (lag.length - 1)).toFixed(1)},${(29 - (28 * seconds) / highest).toFixed(1)}`);
  const path = `M${points.join("L")}`;
  const [area, line] = svg.children;
  if (line.getAttribute("d") === path) return;
  line.setAttribute("d", path);
  area.setAttribute("d", `${path}L120,30L0,30Z`);
  svg.setAttribute("aria-label", describeLag(lag));
}

export function describeLag(lag) {
  const largest = Math.max(...lag);
  if (!largest) return "No lag in the past hour";
  return `Lag in the past hour: at most ${formatDuration(largest)}, now ${formatDuration(lag.at(-1))}`;
}
