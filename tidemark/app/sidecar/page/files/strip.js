// Strips: IDs drawn to scale, from a little below the oldest position of a stream to its highest allocated ID.

import { ahead, before, farthest, nearest } from "./ids.js";

const RECENT = 10; // seconds whose IDs are shown below the oldest position: who is a moment behind looks so
const FEWEST = 20; // IDs that are shown there
const PART = 0.06; // of a strip that they fill at least

// Where IDs of a stream lie on its strips, in per cent. `rate` is in IDs a second; the strips begin behind the ID `first`.
export class Scale {
  #low;
  #below;
  #whole;

  constructor(stream, allocated, rate) {
    const active = stream.writers.filter((it) => it.retired !== true);
    this.#low = nearest([stream.linear, ...active.map((it) => it.position)]);
    const above = ahead(allocated, this.#low);
    const below = Math.ceil(Math.max(RECENT * rate, FEWEST, above * (PART / (1 - PART))));
    this.first = before(this.#low, below);
    this.#below = ahead(this.#low, this.first);
    this.#whole = Math.max(1, this.#below + above);
  }

  at(id) {
    return 100 * Math.max(0, Math.min(1, (this.#below + ahead(id, this.#low)) / this.#whole));
  }
}

// The parts of a stream's own strip: its linear position, what is above it, every gap, and a tick for each writer.
export function whole(stream, scale) {
  const linear = scale.at(stream.linear);
  return [
    { kind: "complete", from: 0, to: linear },
    { kind: "settled", from: linear, to: scale.at(farthest([stream.linear, ...stream.writers.map((it) => it.reach)])) },
    ...stream.writers.flatMap((it) => it.gaps.map((gap) => part("gap", gap.low, gap.top, scale))),
    ...stream.writers.filter((it) => it.retired !== true).map((it) => tick(scale.at(it.position))),
  ];
}

// The parts of one writer's strip.
export function ofWriter(writer, scale) {
  return [
    { kind: "complete", from: 0, to: scale.at(writer.position) },
    part("settled", writer.position, writer.reach, scale),
    ...writer.gaps.map((gap) => part("gap", gap.low, gap.top, scale)),
  ];
}

// The parts of a reader's strip: what it has read.
export function ofReader(reader, scale) {
  return reader.linear === null ? [] : [{ kind: "read", from: 0, to: scale.at(reader.linear) }];
}

function part(kind, low, top, scale) {
  return { kind, from: scale.at(low), to: scale.at(top) };
}

function tick(at) {
  return { kind: "tick", from: at, to: at };
}

// Make `strip` show `parts`; elements are kept, so that only what changed is painted again.
export function paint(strip, parts) {
  while (strip.children.length > parts.length) strip.lastElementChild.remove();
  parts.forEach(({ kind, from, to }, at) => {
    const element = strip.children[at] ?? strip.appendChild(document.createElement("i"));
    const left = `${from.toFixed(2)}%`;
    const width = `${Math.max(0, to - from).toFixed(2)}%`;
    if (element.className !== kind) element.className = kind;
    if (element.style.left !== left) element.style.left = left;
    if (element.style.width !== width) element.style.width = width;
  });
}
