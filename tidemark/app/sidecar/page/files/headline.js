// The top of the page: one sentence, figures, and what needs attention besides streams.

import { element } from "./row.js";
import { sentence, seconds } from "./verdict.js";
import { age, clock, count, counted, rate } from "./words.js";

const FRESH = 600; // seconds in which rejected records are news

// {mood, headline, subline} of what the board summed up; `lost` is {reason, since} while there is no connection.
export function summary(sum, pipeline, lost, now) {
  if (lost) {
    return {
      mood: "lost",
      headline: "No connection to the sidecar",
      subline: sum.streams
        ? `${capital(lost.reason)}. What you see is from ${clock(lost.since * 1000)}, ${age(now - lost.since)} ago.`
        : `${capital(lost.reason)}. Trying again.`,
    };
  }
  const all = counted(sum.streams, "stream");
  if (pipeline.owner !== null && pipeline.lease_seconds === 0) {
    const subline = `No process holds the lease; ${pipeline.owner} had it last. No position moves.`;
    return { mood: "blocked", headline: "No pipeline runs", subline };
  }
  if (sum.blocked) {
    const verb = sum.blocked === 1 ? "is" : "are";
    const headline = sum.streams === 1 ? "The only stream is blocked" : `${sum.blocked} of ${all} ${verb} blocked`;
    const [first] = sum.oldest.verdict.troubles;
    const subline = first ? `${sum.oldest.name}: ${sentence(first, now)}.` : `${sum.oldest.name} is recovering: its positions are not known.`;
    return { mood: "blocked", headline, subline };
  }
  if (!sum.streams) return { mood: "calm", headline: "No stream yet", subline: "One appears with its first record." };
  if (sum.moving || sum.waiting) {
    const active = sum.moving + sum.waiting;
    if (active < sum.streams) {
      const subline = `${are(active)} moving, ${are(sum.streams - active)} complete and quiet.`;
      return { mood: "calm", headline: `All ${all} are fine`, subline };
    }
    const headline = sum.streams === 1 ? "The only stream is moving" : `All ${all} are moving`;
    return { mood: "calm", headline, subline: "Nothing is missing for longer than a transaction takes." };
  }
  return { mood: "calm", headline: sum.streams === 1 ? "The only stream is complete" : `All ${all} are complete`, subline: "No writer is writing, and nothing is missing." };
}

export function figures(sum, pipeline) {
  const letters = pipeline.dead_letters?.reduce((total, it) => total + it.records, 0);
  return {
    rate: rate(sum.rate),
    behind: count(sum.behind),
    late: count(sum.late),
    letters: letters === undefined ? "not known" : count(letters),
    batch: pipeline.quiet_seconds === null ? (pipeline.dead_letters ? "none yet" : "not known") : `${age(pipeline.quiet_seconds)} ago`,
  };
}

// What needs attention besides streams: {said, verb}, a sentence and the first command to run, if any.
export function notices(sum, pipeline, now) {
  const found = pipeline.problems.map((it) => ({ said: `${it}.` }));
  if (sum.memory) found.push({ said: "Neither Redis nor Postgres answers: these are the last positions that this sidecar read." });
  if (pipeline.owner !== null && pipeline.lease_seconds === 0) found.push({ said: "Why the pipeline waits or stopped:", verb: "tidemark status" });
  const [hidden] = pipeline.not_shown ?? [];
  if (hidden) {
    const others = pipeline.not_shown.length - 1;
    const said = `${hidden.stream}${others ? ` and ${counted(others, "stream")} more` : ""} cannot be published to ${hidden.sink}, for ${age(now - seconds(hidden.since))}: ${hidden.problem}.`;
    found.push({ said, verb: "tidemark status" });
  }
  for (const it of (pipeline.lagging ?? []).filter((lag) => lag.blocked_offset !== null)) {
    const said = `An open Kafka transaction blocks partition ${it.partition} of ${it.topic} at offset ${it.blocked_offset}, for ${age(now - seconds(it.blocked_since))}; ${counted(it.records, "record")} cannot be read. This prints the commands that find and abort it:`;
    found.push({ said, verb: "tidemark status" });
  }
  if (now - sum.newestLate < FRESH) {
    const said = `Facts came late, the last ${age(now - sum.newestLate)} ago: readers that have passed their IDs must read them.`;
    found.push({ said, verb: "tidemark late list" });
  }
  const fresh = (pipeline.dead_letters ?? []).filter((it) => now - seconds(it.newest) < FRESH);
  if (fresh.length) {
    const newest = Math.max(...fresh.map((it) => seconds(it.newest)));
    const reasons = fresh.map((it) => `${count(it.records)} ${it.reason}`).join(", ");
    found.push({ said: `Records were rejected, the last ${age(now - newest)} ago: ${reasons} in all.`, verb: "tidemark dead-letters list" });
  }
  return found;
}

// Operator overrides of the last day, the newest first.
export function overrides(pipeline, now) {
  return (pipeline.overrides ?? []).map((it) => {
    const whose = it.writer ? `${it.writer} of ${it.stream}` : it.stream || "all streams";
    const by = it.by === it.seen_as ? it.by : `${it.by} (as ${it.seen_as})`;
    return { said: `${it.kind} of ${whose}, ${age(now - seconds(it.time))} ago, by ${by}: ${it.why} (${it.outcome ?? "its outcome is not known"})` };
  });
}

// The banner: its first line always, further lines folded if there is little room. A line may begin with the name of a
// stream and a colon.
export async function note(place) {
  const answer = await fetch("page/note.txt").catch(() => null);
  const [first, ...others] = answer?.ok ? (await answer.text()).split("\n").filter((line) => line.trim()) : [];
  if (first === undefined) return;
  place.querySelector("summary").textContent = first;
  for (const line of others) {
    const [, name, said] = /^(\S+): (.*)$/.exec(line) ?? [null, "", line];
    const paragraph = element("p", "", ` ${said}`);
    if (name) paragraph.prepend(element("strong", "", `${name}:`));
    place.append(paragraph);
  }
  place.classList.toggle("single", !others.length);
  place.open = others.length > 0 && matchMedia("(min-width: 52rem)").matches;
  place.hidden = false;
}

// Change only what differs: a person may be copying the rest.
export function listed(list, found) {
  while (list.children.length > found.length) list.lastElementChild.remove();
  while (list.children.length < found.length) {
    const item = element("li");
    item.append(element("span"), element("code", "verb"));
    list.append(item);
  }
  found.forEach(({ said, verb }, at) => {
    const [sentence, code] = list.children[at].children;
    if (sentence.textContent !== said) sentence.textContent = said;
    if (code.textContent !== (verb ?? "")) code.textContent = verb ?? "";
  });
}

function are(number) {
  return `${count(number)} ${number === 1 ? "is" : "are"}`;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
