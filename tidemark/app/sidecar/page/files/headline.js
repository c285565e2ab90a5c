// The top of the page: the headline, totals of all streams, the banner, and notices that concern no single stream.

import { createElement } from "./row.js";
import { describeProblem, toSeconds } from "./status.js";
import { formatCount, formatDuration, formatRate, formatTime, pluralize } from "./format.js";

const MAX_LAGGING = 3; // partitions with lag that have a notice of their own
const RECENT_SECONDS = 600; // how long rejected records and late facts cause a notice

// Returns {status, headline, subline}. `totals`: from `Board.draw`. `loss`: {reason, since} while there is no connection,
// else null.
export function summary(totals, pipeline, loss, now) {
  if (loss) {
    return {
      status: "disconnected",
      headline: "No connection to the sidecar",
      subline: totals.streams
        ? `${capitalize(loss.reason)}. This page shows data from ${formatTime(loss.since * 1000)}, ${formatDuration(now - loss.since)} ago.`
        : `${capitalize(loss.reason)}. Trying again.`,
    };
  }
  const all = pluralize(totals.streams, "stream");
  if (pipeline.owner !== null && pipeline.lease_seconds === 0) {
    const subline = `No process holds the lease; ${pipeline.owner} had it last. Positions do not advance.`;
    return { status: "blocked", headline: "No pipeline runs", subline };
  }
  if (totals.blocked) {
    const verb = totals.blocked === 1 ? "is" : "are";
    const headline = totals.streams === 1 ? "The only stream is blocked" : `${totals.blocked} of ${all} ${verb} blocked`;
    const [problem] = totals.longestBlocked.status.problems;
    const subline = problem ? `${totals.longestBlocked.name}: ${describeProblem(problem, now)}.` : `${totals.longestBlocked.name} is recovering: its positions are not known.`;
    return { status: "blocked", headline, subline };
  }
  if (!totals.streams) return { status: "ok", headline: "No stream yet", subline: "A stream appears with its first record." };
  if (totals.moving || totals.waiting) {
    const active = totals.moving + totals.waiting;
    if (active < totals.streams) {
      const subline = `${countWithVerb(active)} moving, ${countWithVerb(totals.streams - active)} complete and quiet.`;
      return { status: "ok", headline: `All ${all} are fine`, subline };
    }
    const headline = totals.streams === 1 ? "The only stream is moving" : `All ${all} are moving`;
    return { status: "ok", headline, subline: "No ID is missing for longer than a transaction takes." };
  }
  return { status: "ok", headline: totals.streams === 1 ? "The only stream is complete" : `All ${all} are complete`, subline: "No position moves, and no ID is missing." };
}

// The texts of the totals, by the ID of their HTML element.
export function figures(totals, pipeline) {
  const deadLetters = pipeline.dead_letters?.reduce((sum, entry) => sum + entry.records, 0);
  return {
    rate: formatRate(totals.rate),
    lag: formatCount(totals.linearLag),
    late: formatCount(totals.late),
    "dead-letters": deadLetters === undefined ? "not known" : formatCount(deadLetters),
    batch: pipeline.quiet_seconds === null ? (pipeline.dead_letters ? "none yet" : "not known") : `${formatDuration(pipeline.quiet_seconds)} ago`,
  };
}

// Problems that concern no single stream, as a list of {text, command}. `command`: the first command to run, if any.
export function notices(totals, pipeline, now) {
  const entries = pipeline.problems.map((problem) => ({ text: `${problem}.` }));
  if (totals.fromMemory) entries.push({ text: "Neither Redis nor Postgres answers: these are the last positions that this sidecar read." });
  if (pipeline.owner !== null && pipeline.lease_seconds === 0) entries.push({ text: "Why the pipeline waits or stopped:", command: "tidemark status" });
  const [hidden] = pipeline.not_shown ?? [];
  if (hidden) {
    const others = pipeline.not_shown.length - 1;
    const text = `${hidden.stream}${others ? ` and ${pluralize(others, "stream")} more` : ""} cannot be published to ${hidden.sink}, for ${formatDuration(now - toSeconds(hidden.since))}: ${hidden.problem}.`;
    entries.push({ text, command: "tidemark status" });
  }
  for (const partition of (pipeline.lagging ?? []).filter((lag) => lag.blocked_offset !== null)) {
    const text = `An open Kafka transaction blocks partition ${partition.partition} of ${partition.topic} at offset ${partition.blocked_offset}, for ${formatDuration(now - toSeconds(partition.blocked_since))}; ${pluralize(partition.records, "record")} cannot be read. This prints the commands that find and abort it:`;
    entries.push({ text, command: "tidemark status" });
  }
  const lagging = (pipeline.lagging ?? []).filter((lag) => lag.blocked_offset === null);
  lagging.sort((a, b) => toSeconds(a.since) - toSeconds(b.since) || b.records - a.records);
  for (const partition of lagging.slice(0, MAX_LAGGING)) {
    const age = formatDuration(now - toSeconds(partition.since));
    const lag = partition.records ? `has a lag of ${pluralize(partition.records, "record")}, the oldest has been unread for ${age}` : `has an unknown lag: Kafka has not answered for ${age}`;
    entries.push({ text: `Partition ${partition.partition} of ${partition.topic} ${lag}.` });
  }
  if (lagging.length > MAX_LAGGING) entries.push({ text: `${pluralize(lagging.length - MAX_LAGGING, "more partition")} ${lagging.length - MAX_LAGGING === 1 ? "has" : "have"} lag.`, command: "tidemark status" });
  if (now - totals.newestLate < RECENT_SECONDS) {
    const text = `Facts came late, the last ${formatDuration(now - totals.newestLate)} ago: readers that have passed their IDs must read them.`;
    entries.push({ text, command: "tidemark late list" });
  }
  const recent = (pipeline.dead_letters ?? []).filter((entry) => now - toSeconds(entry.newest) < RECENT_SECONDS);
  if (recent.length) {
    const newest = Math.max(...recent.map((entry) => toSeconds(entry.newest)));
    const reasons = recent.map((entry) => `${formatCount(entry.records)} ${entry.reason}`).join(", ");
    entries.push({ text: `Records were rejected, the last ${formatDuration(now - newest)} ago: ${reasons} in all.`, command: "tidemark dead-letters list" });
  }
  return entries;
}

// The operator overrides of the last day, newest first, as a list of {text}.
export function overrides(pipeline, now) {
  return (pipeline.overrides ?? []).map((override) => {
    const target = override.writer ? `${override.writer} of ${override.stream}` : override.stream || "all streams";
    const by = override.by === override.seen_as ? override.by : `${override.by} (as ${override.seen_as})`;
    return { text: `${override.kind} of ${target}, ${formatDuration(now - toSeconds(override.time))} ago, by ${by}: ${override.why} (${override.outcome ?? "its outcome is not known"})` };
  });
}

// Load the banner text into `details`, an element of that kind. The first line is the summary. Further lines are folded
// on a narrow screen. A further line may begin with the name of a stream and a colon.
export async function loadBanner(details) {
  const answer = await fetch("page/note.txt").catch(() => null);
  const [first, ...others] = answer?.ok ? (await answer.text()).split("\n").filter((line) => line.trim()) : [];
  if (first === undefined) return;
  details.querySelector("summary").textContent = first;
  for (const line of others) {
    const [, name, text] = /^(\S+): (.*)$/.exec(line) ?? [null, "", line];
    const paragraph = createElement("p", "", ` ${text}`);
    if (name) paragraph.prepend(createElement("strong", "", `${name}:`));
    details.append(paragraph);
  }
  details.classList.toggle("single", !others.length);
  details.open = others.length > 0 && matchMedia("(min-width: 52rem)").matches;
  details.hidden = false;
}

// Show `entries`, which have {text, command}, as the items of `list`. Unchanged text is not written again, because a
// person may have selected it.
export function updateList(list, entries) {
  while (list.children.length > entries.length) list.lastElementChild.remove();
  while (list.children.length < entries.length) {
    const item = createElement("li");
    item.append(createElement("span"), createElement("code", "command"));
    list.append(item);
  }
  entries.forEach(({ text, command }, index) => {
    const [span, code] = list.children[index].children;
    if (span.textContent !== text) span.textContent = text;
    if (code.textContent !== (command ?? "")) code.textContent = command ?? "";
  });
}

function countWithVerb(number) {
  return `${formatCount(number)} ${number === 1 ? "is" : "are"}`;
}

function capitalize(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
