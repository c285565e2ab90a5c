// A chart of lag over the past hour: an area, as SVG without script or style of its own.

import { age } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const LEAST = 60; // seconds at the top of a chart at least: a lag of moments must not look like a mountain

// An empty chart, and the function that draws it.
export function chart(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", name);
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

// `lag` is in seconds, oldest first. A chart that was drawn of the same lag is not drawn again.
export function draw(svg, lag) {
  const most = Math.max(LEAST, ...lag);
  const points = lag.map((seconds, at) => `${((120 * at) / (lag.length - 1)).toFixed(1)},${(29 - (28 * seconds) / most).toFixed(1)}`);
  const path = `M${points.join("L")}`;
  const [area, line] = svg.children;
  if (line.getAttribute("d") === path) return;
  line.setAttribute("d", path);
  area.setAttribute("d", `${path}L120,30L0,30Z`);
  svg.setAttribute("aria-label", described(lag));
}

export function described(lag) {
  const largest = Math.max(...lag);
  if (!largest) return "No lag in the past hour";
  return `Lag in the past hour: at most ${age(largest)}, now ${age(lag.at(-1))}`;
}
