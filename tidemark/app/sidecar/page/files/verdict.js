// The problems of a stream, from what is known of it. Without the page.

import { ahead, farthest, range } from "./ids.js";
import { age, counted, grouped } from "./words.js";

export const BLOCKED_AFTER = 10; // seconds that an ID may be missing: transactions take some time
const SOURCES = { "no heartbeat": "has sent no heartbeat", blocked: "has sent nothing new" };
const MOVING = 10; // seconds after a move in which a stream counts as moving

// {state, since, troubles, allocated, behind} of `stream` as /v1/watch has it. `motion` is its Motion; times are seconds since
// 1970 by the sidecar's clock.
export function judge(stream, motion, now) {
  if (stream.state === "recovering") return { state: "recovering", since: null, troubles: [], allocated: null, behind: null };
  const allocated = farthest([stream.allocated ?? stream.linear, stream.linear, ...stream.writers.map((it) => it.reach)]);
  const behind = ahead(allocated, stream.linear);
  const troubles = [...gaps(stream), ...unknownWriters(stream), ...silent(stream, motion, now), ...sources(stream), ...divergence(stream, now)];
  troubles.sort((a, b) => a.since - b.since);
  const since = troubles[0]?.since ?? null;
  return { state: state(since, motion, now), since, troubles, allocated, behind };
}

function state(since, motion, now) {
  if (since !== null) return now - since >= BLOCKED_AFTER ? "blocked" : "waiting";
  return motion.moved && now - motion.still < MOVING ? "moving" : "complete";
}

function gaps(stream) {
  return stream.writers.filter((it) => it.gaps.length).map((it) => ({
    writer: it.writer,
    since: Math.min(...it.gaps.map((gap) => seconds(gap.since))),
    what: `has not completed ${range(it.gaps[0].low, it.gaps[0].top)}`,
    more: further(it),
    ...remedy(stream, it.writer),
  }));
}

// What unblocks a writer, as the sidecar says: `tidemark gaps` prints the same.
function remedy(stream, writer, epoch = null) {
  const open = stream.writers.find((it) => it.writer === writer)?.transactions ?? [];
  const found = stream.remedies.find((it) => it.writer === writer && (epoch === null || it.epoch === epoch));
  const who = open.length ? `Open: ${open.join("; ")}. ` : "";
  return { how: who + (found?.advice ?? ""), verb: found?.command ?? "" };
}

function further(writer) {
  const others = writer.gaps.length - 1 + writer.hidden;
  const waits = `${counted(writer.waiting, "completed ID")} ${writer.waiting === 1 ? "waits" : "wait"} behind it`;
  return [...(others ? [`and ${counted(others, "gap")} more`] : []), waits, ...putOff(writer)].join("; ");
}

// Records that found no room in its chain.
function putOff(writer) {
  if (writer.gone) return [`up to ${counted(writer.gone, "deferred record")} of it are gone from Kafka: the open IDs wait for its next JOIN`];
  return writer.deferred ? ["more of its records are deferred, and are read again once there is room"] : [];
}

function unknownWriters(stream) {
  return stream.unknown_writers.map((it) => ({
    writer: it.writer,
    since: seconds(it.since),
    what: `has not joined with epoch ${it.epoch}`,
    more: "its records are held back, and so is the linear position",
    ...remedy(stream, it.writer, it.epoch),
  }));
}

// Redis and Postgres have different linear positions, for longer than a batch takes from one to the other.
function divergence(stream, now) {
  const { copies } = stream;
  if (!copies || now - seconds(copies.since) < BLOCKED_AFTER) return [];
  const beyond = ahead(copies.redis, copies.postgres) > 0;
  return [{
    writer: "Redis",
    since: seconds(copies.since),
    what: `is at ${grouped(copies.redis)} and Postgres at ${grouped(copies.postgres)}`,
    more: beyond
      ? "Postgres was restored to an older state, or the two are of different databases; readers may have used the positions of Redis"
      : "readers of Redis wait; the pipeline compares once a minute and adds what is missing",
    how: "This lists every difference:",
    verb: "tidemark verify",
  }];
}

// Writers without a gap that block the linear position: they announce nothing, not even that they are idle.
function silent(stream, motion, now) {
  const blocked = stream.linear_lag?.blockers.filter((it) => it.reason === "silent" || it.reason === "transaction") ?? [];
  const known = new Map(stream.writers.map((it) => [it.writer, it]));
  return blocked.filter((it) => !known.get(it.writer)?.gaps.length).map((it) => ({
    writer: it.writer,
    since: it.since ? seconds(it.since) : motion.still,
    what: `has announced nothing beyond ${grouped(it.position)}`,
    more: `the linear position waits for it; ${it.last_seen ? `last seen ${age(now - seconds(it.last_seen))} ago` : "no record of it is known"}`,
    ...remedy(stream, it.writer),
  })).filter((it) => now - it.since >= BLOCKED_AFTER);
}

// Relays and bridges that send nothing new: what they hold back is in no record, so nobody is seen to wait.
function sources(stream) {
  const waiting = new Set(stream.linear_lag?.blockers.map((it) => it.writer));
  const known = new Map(stream.writers.map((it) => [it.writer, it]));
  return stream.remedies.filter((it) => SOURCES[it.verdict] && !waiting.has(it.writer) && !known.get(it.writer)?.gaps.length).map((it) => ({
    writer: it.writer,
    since: seconds(it.since),
    what: SOURCES[it.verdict],
    more: "whether the stream is complete is not known",
    ...remedy(stream, it.writer, it.epoch),
  }));
}

export function seconds(moment) {
  return Date.parse(moment) / 1000;
}

// One problem in a sentence.
export function sentence(trouble, now) {
  return `${trouble.writer} ${trouble.what}, for ${age(now - trouble.since)}`;
}
