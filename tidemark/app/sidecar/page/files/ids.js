// Stream IDs: signed 64-bit integers, so some are no exact Numbers; and on backward streams they go down from -1.

import { grouped } from "./words.js";

// JSON with every integer exact: a Number where it is safe, else a BigInt (old browsers round it).
export function parse(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value) && context?.source
      ? BigInt(context.source)
      : value);
}

// How far `a` lies beyond `b`, away from 0: a Number, exact where it is small, which is where it matters.
export function ahead(a, b) {
  return Number(magnitude(a) - magnitude(b));
}

export function farthest(ids) {
  return ids.reduce((a, b) => (ahead(b, a) > 0 ? b : a));
}

export function nearest(ids) {
  return ids.reduce((a, b) => (ahead(b, a) < 0 ? b : a));
}

// The IDs in (low, top], as `tidemark status` writes them.
export function range(low, top) {
  const first = BigInt(low) + (BigInt(top) < 0n ? -1n : 1n);
  return first === BigInt(top) ? grouped(top) : `${grouped(first)}..${grouped(top)}`;
}

// The ID that lies `by` nearer to 0, if there is one: a BigInt.
export function before(id, by) {
  const left = magnitude(id) - BigInt(by);
  if (left <= 0n) return 0n;
  return BigInt(id) < 0n ? -left : left;
}

function magnitude(id) {
  const exact = BigInt(id);
  return exact < 0n ? -exact : exact;
}
