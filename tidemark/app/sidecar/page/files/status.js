// The status of a stream and its problems, from the data of `/v1/watch`. Does not use the page.

import { distanceBeyond, farthest, formatRange } from "./ids.js";
import { formatDuration, formatId, pluralize } from "./format.js";

export const BLOCKED_AFTER_SECONDS = 10; // an ID may be missing for so long, because transactions take time
const SOURCE_SYMPTOMS = { "no heartbeat": "has sent no heartbeat", blocked: "has sent nothing new" }; // by verdict
const MOVING_SECONDS = 10; // how long a stream counts as moving after a move

// Returns {state, since, problems, allocated, linearLag} of `stream`, an event of `/v1/watch`. `motion`: its `Motion`.
// Times are seconds since 1970 by the clock of the sidecar. A problem is {writer, since, symptom, explanation, advice,
// command}.
export function streamStatus(stream, motion, now) {
  if (stream.state === "recovering") return { state: "recovering", since: null, problems: [], allocated: null, linearLag: null };
  const allocated = farthest([stream.allocated ?? stream.linear, stream.linear, ...stream.writers.map((writer) => writer.reach)]);
  const linearLag = distanceBeyond(allocated, stream.linear);
  const problems = [...gapProblems(stream), ...unknownWriterProblems(stream), ...silentWriterProblems(stream, motion, now), ...sourceProblems(stream), ...divergenceProblems(stream, now)];
  problems.sort((a, b) => a.since - b.since);
  const since = problems[0]?.since ?? null;
  return { state: state(since, motion, now), since, problems, allocated, linearLag };
}

function state(since, motion, now) {
  if (since !== null) return now - since >= BLOCKED_AFTER_SECONDS ? "blocked" : "waiting";
  return motion.hasMoved && now - motion.stillSince < MOVING_SECONDS ? "moving" : "complete";
}

function gapProblems(stream) {
  return stream.writers.filter((writer) => writer.gaps.length).map((writer) => ({
    writer: writer.writer,
    since: Math.min(...writer.gaps.map((gap) => toSeconds(gap.since))),
    symptom: `has not completed ${formatRange(writer.gaps[0].low, writer.gaps[0].top)}`,
    explanation: gapExplanation(writer),
    ...remedy(stream, writer.writer),
  }));
}

// The remedy for a writer, as `tidemark gaps` prints it.
function remedy(stream, name, epoch = null) {
  const transactions = stream.writers.find((writer) => writer.writer === name)?.transactions ?? [];
  const answer = stream.remedies.find((entry) => entry.writer === name && (epoch === null || entry.epoch === epoch));
  const open = transactions.length ? `Open: ${transactions.join("; ")}. ` : "";
  return { advice: open + (answer?.advice ?? ""), command: answer?.command ?? "" };
}

function gapExplanation(writer) {
  const otherGaps = writer.gaps.length - 1 + writer.hidden;
  const pending = `${pluralize(writer.waiting, "completed ID")} ${writer.waiting === 1 ? "waits" : "wait"} above the gap`;
  return [...(otherGaps ? [`and ${pluralize(otherGaps, "gap")} more`] : []), pending, ...deferredExplanations(writer)].join("; ");
}

function deferredExplanations(writer) {
  if (writer.gone) return [`up to ${pluralize(writer.gone, "deferred record")} of it are gone from Kafka: the open IDs wait for its next JOIN`];
  return writer.deferred ? ["more of its records are deferred, and are read again once there is room"] : [];
}

function unknownWriterProblems(stream) {
  return stream.unknown_writers.map((writer) => ({
    writer: writer.writer,
    since: toSeconds(writer.since),
    symptom: `has not joined with epoch ${writer.epoch}`,
    explanation: "its records are buffered, and the linear position waits for it",
    ...remedy(stream, writer.writer, writer.epoch),
  }));
}

// A problem if the linear positions in Redis and Postgres have differed for longer than a batch takes.
function divergenceProblems(stream, now) {
  const { copies } = stream;
  if (!copies || now - toSeconds(copies.since) < BLOCKED_AFTER_SECONDS) return [];
  const isRedisAhead = distanceBeyond(copies.redis, copies.postgres) > 0;
  return [{
    writer: "Redis",
    since: toSeconds(copies.since),
    symptom: `is at ${formatId(copies.redis)} and Postgres at ${formatId(copies.postgres)}`,
    explanation: isRedisAhead
      ? "Postgres was restored to an older state, or the two are of different databases; readers may have used the positions of Redis"
      : "readers of Redis wait; the pipeline compares once a minute and adds what is missing",
    advice: "This lists every difference:",
    command: "tidemark verify",
  }];
}

// Writers without a gap that block the linear position because they announce nothing, not even that they are idle.
function silentWriterProblems(stream, motion, now) {
  const blockers = stream.linear_lag?.blockers.filter((blocker) => blocker.reason === "silent" || blocker.reason === "transaction") ?? [];
  const writers = new Map(stream.writers.map((writer) => [writer.writer, writer]));
  return blockers.filter((blocker) => !writers.get(blocker.writer)?.gaps.length).map((blocker) => ({
    writer: blocker.writer,
    since: blocker.since ? toSeconds(blocker.since) : motion.stillSince,
    symptom: `has announced nothing beyond ${formatId(blocker.position)}`,
    explanation: `the linear position waits for it; ${blocker.last_seen ? `last seen ${formatDuration(now - toSeconds(blocker.last_seen))} ago` : "no record of it is known"}`,
    ...remedy(stream, blocker.writer),
  })).filter((problem) => now - problem.since >= BLOCKED_AFTER_SECONDS);
}

// Relays and bridges that send nothing new. No record names the IDs that they have not sent, so these IDs block nothing.
function sourceProblems(stream) {
  const blockers = new Set(stream.linear_lag?.blockers.map((blocker) => blocker.writer));
  const writers = new Map(stream.writers.map((writer) => [writer.writer, writer]));
  return stream.remedies.filter((source) => SOURCE_SYMPTOMS[source.verdict] && !blockers.has(source.writer) && !writers.get(source.writer)?.gaps.length).map((source) => ({
    writer: source.writer,
    since: toSeconds(source.since),
    symptom: SOURCE_SYMPTOMS[source.verdict],
    explanation: "whether the stream is complete is not known",
    ...remedy(stream, source.writer, source.epoch),
  }));
}

// Convert an ISO 8601 text to seconds since 1970.
export function toSeconds(moment) {
  return Date.parse(moment) / 1000;
}

// A problem as one sentence without a full stop.
export function describeProblem(problem, now) {
  return `${problem.writer} ${problem.symptom}, for ${formatDuration(now - problem.since)}`;
}
