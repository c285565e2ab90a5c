// What is the matter with a stream, from what is known of it. No page in here.

import { ahead, farthest, range } from "./ids.js";
import { age, counted, grouped } from "./words.js";

export const HELD_AFTER = 10; // seconds that something may be missing: what a transaction takes is none of our business
const MOVING = 10; // seconds after a move in which a stream counts as moving

// {state, since, troubles, allocated, behind} of `stream` as /v1/watch has it. `motion` is its Motion; times are seconds since
// 1970 by the sidecar's clock.
export function judge(stream, motion, now) {
  if (stream.state === "recovering") return { state: "recovering", since: null, troubles: [], allocated: null, behind: null };
  const allocated = farthest([stream.allocated ?? stream.linear, stream.linear, ...stream.writers.map((it) => it.reach)]);
  const behind = ahead(allocated, stream.linear);
  const troubles = [...gaps(stream), ...unknownWriters(stream), ...silent(stream, motion, now), ...copies(stream, now)];
  troubles.sort((a, b) => a.since - b.since);
  const since = troubles[0]?.since ?? null;
  return { state: state(since, motion, now), since, troubles, allocated, behind };
}

function state(since, motion, now) {
  if (since !== null) return now - since >= HELD_AFTER ? "held" : "waiting";
  return motion.moved && now - motion.still < MOVING ? "moving" : "complete";
}

function gaps(stream) {
  return stream.writers.filter((it) => it.gaps.length).map((it) => ({
    writer: it.writer,
    since: Math.min(...it.gaps.map((gap) => seconds(gap.since))),
    what: `owes ${range(it.gaps[0].low, it.gaps[0].top)}`,
    more: further(it),
    ...remedy(stream, it.writer),
  }));
}

// What ends the waiting for a writer, as the sidecar says it: `tidemark gaps` prints the same.
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

// Of records that found no room on its chain.
function putOff(writer) {
  if (writer.gone) return [`up to ${counted(writer.gone, "record")} of it that were put off are gone from Kafka: what is open waits for its next JOIN`];
  return writer.deferred ? ["more of its records are put off and come again once there is room"] : [];
}

function unknownWriters(stream) {
  return stream.unknown_writers.map((it) => ({
    writer: it.writer,
    since: seconds(it.since),
    what: `has not joined with epoch ${it.epoch}`,
    more: "its records are held, and the linear position with them",
    ...remedy(stream, it.writer, it.epoch),
  }));
}

// Redis and Postgres tell different lines, for longer than a batch is under way from one to the other.
function copies(stream, now) {
  const { copies: told } = stream;
  if (!told || now - seconds(told.since) < HELD_AFTER) return [];
  const beyond = ahead(told.redis, told.postgres) > 0;
  return [{
    writer: "Redis",
    since: seconds(told.since),
    what: `says ${grouped(told.redis)} where Postgres says ${grouped(told.postgres)}`,
    more: beyond
      ? "Postgres went back to an older state, or they are of two databases; readers may have acted on what Redis says"
      : "readers of Redis wait; the pipeline compares once a minute and fills in what is missing",
    how: "This names every difference:",
    verb: "tidemark verify",
  }];
}

// Without a gap of theirs, and yet the linear position waits for them: they say nothing, not even that they are idle.
function silent(stream, motion, now) {
  const held = stream.behind?.held_by.filter((it) => it.reason === "silent" || it.reason === "transaction") ?? [];
  const known = new Map(stream.writers.map((it) => [it.writer, it]));
  return held.filter((it) => !known.get(it.writer)?.gaps.length).map((it) => ({
    writer: it.writer,
    since: it.since ? seconds(it.since) : motion.still,
    what: `has said nothing beyond ${grouped(it.position)}`,
    more: `the linear position waits for it, gap or no gap; ${it.last_seen ? `last seen ${age(now - seconds(it.last_seen))} ago` : "no record of it was noted"}`,
    ...remedy(stream, it.writer),
  })).filter((it) => now - it.since >= HELD_AFTER);
}

export function seconds(moment) {
  return Date.parse(moment) / 1000;
}

// One trouble in a sentence.
export function sentence(trouble, now) {
  return `${trouble.writer} ${trouble.what}, for ${age(now - trouble.since)}`;
}
