// Strips: IDs of a stream drawn to scale, from a little below its lowest position to its highest allocated ID.

import { distanceBeyond, farthest, moveTowardsZero, nearest } from "./ids.js";

// The range below the lowest position contains the IDs of the last `SECONDS_BELOW`, at least `MIN_IDS_BELOW` IDs, and at
// least the part `MIN_PART_BELOW` of the strip. So a writer that lags the others by a second looks almost even with them.
const SECONDS_BELOW = 10;
const MIN_IDS_BELOW = 20;
const MIN_PART_BELOW = 0.06;

// Converts IDs of a stream to per cent of its strips. `rate`: IDs per second. `first`: the strips begin after this ID.
export class Scale {
  #lowest;
  #idsBelow;
  #totalIds;

  constructor(stream, allocated, rate) {
    const active = stream.writers.filter((writer) => writer.retired !== true);
    this.#lowest = nearest([stream.linear, ...active.map((writer) => writer.position)]);
    const above = distanceBeyond(allocated, this.#lowest);
    const below = Math.ceil(Math.max(SECONDS_BELOW * rate, MIN_IDS_BELOW, above * (MIN_PART_BELOW / (1 - MIN_PART_BELOW))));
    this.first = moveTowardsZero(this.#lowest, below);
    this.#idsBelow = distanceBeyond(this.#lowest, this.first);
    this.#totalIds = Math.max(1, this.#idsBelow + above);
  }

  percent(id) {
    return 100 * Math.max(0, Math.min(1, (this.#idsBelow + distanceBeyond(id, this.#lowest)) / this.#totalIds));
  }
}

// The parts of a stream's strip: its linear position, completed IDs above it, every gap, and a tick for each writer.
export function streamParts(stream, scale) {
  const linear = scale.percent(stream.linear);
  return [
    { kind: "complete", from: 0, to: linear },
    { kind: "settled", from: linear, to: scale.percent(farthest([stream.linear, ...stream.writers.map((writer) => writer.reach)])) },
    ...stream.writers.flatMap((writer) => writer.gaps.map((gap) => rangePart("gap", gap.low, gap.top, scale))),
    ...stream.writers.filter((writer) => writer.retired !== true).map((writer) => tickPart(scale.percent(writer.position))),
  ];
}

export function writerParts(writer, scale) {
  return [
    { kind: "complete", from: 0, to: scale.percent(writer.position) },
    rangePart("settled", writer.position, writer.reach, scale),
    ...writer.gaps.map((gap) => rangePart("gap", gap.low, gap.top, scale)),
  ];
}

// The IDs that a reader has read.
export function readerParts(reader, scale) {
  return reader.linear === null ? [] : [{ kind: "read", from: 0, to: scale.percent(reader.linear) }];
}

function rangePart(kind, low, top, scale) {
  return { kind, from: scale.percent(low), to: scale.percent(top) };
}

function tickPart(percent) {
  return { kind: "tick", from: percent, to: percent };
}

// Show `parts` on the element `strip`. Elements are reused, so that the browser repaints only what changed.
export function paint(strip, parts) {
  while (strip.children.length > parts.length) strip.lastElementChild.remove();
  parts.forEach(({ kind, from, to }, index) => {
    const element = strip.children[index] ?? strip.appendChild(document.createElement("i"));
    const left = `${from.toFixed(2)}%`;
    const width = `${Math.max(0, to - from).toFixed(2)}%`;
    if (element.className !== kind) element.className = kind;
    if (element.style.left !== left) element.style.left = left;
    if (element.style.width !== width) element.style.width = width;
  });
}
