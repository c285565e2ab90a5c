// Arithmetic with stream IDs. IDs are signed 64-bit integers, so a Number cannot represent some of them exactly. The IDs
// of backward streams descend from -1. "Beyond" means away from 0.

import { formatId } from "./format.js";

// Parse JSON without rounding: an integer becomes a Number if a Number is exact, else a BigInt. Old browsers round.
export function parseJson(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value) && context?.source
      ? BigInt(context.source)
      : value);
}

// How far `a` is beyond `b`, as a Number: exact if it is small, and negative if `b` is beyond `a`.
export function distanceBeyond(a, b) {
  return Number(magnitude(a) - magnitude(b));
}

// The ID that is farthest from 0.
export function farthest(ids) {
  return ids.reduce((a, b) => (distanceBeyond(b, a) > 0 ? b : a));
}

// The ID that is nearest to 0.
export function nearest(ids) {
  return ids.reduce((a, b) => (distanceBeyond(b, a) < 0 ? b : a));
}

// The IDs in (low, top] in the format of `tidemark status`, such as "8..11".
export function formatRange(low, top) {
  const first = BigInt(low) + (BigInt(top) < 0n ? -1n : 1n);
  return first === BigInt(top) ? formatId(top) : `${formatId(first)}..${formatId(top)}`;
}

// The ID that is `distance` IDs nearer to 0, but not past 0: a BigInt.
export function moveTowardsZero(id, distance) {
  const left = magnitude(id) - BigInt(distance);
  if (left <= 0n) return 0n;
  return BigInt(id) < 0n ? -left : left;
}

function magnitude(id) {
  const exact = BigInt(id);
  return exact < 0n ? -exact : exact;
}
