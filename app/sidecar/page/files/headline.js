// What the top of the page says: one sentence to be read at night, figures, and what needs attention besides streams.

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
    const subline = `Nobody holds the lease; ${pipeline.owner} had it last. Every position stands where it is.`;
    return { mood: "held", headline: "No pipeline runs", subline };
  }
  if (sum.held) {
    const verb = sum.held === 1 ? "is" : "are";
    const headline = sum.streams === 1 ? "The only stream is held" : `${sum.held} of ${all} ${verb} held`;
    const [first] = sum.oldest.verdict.troubles;
    const subline = first ? `${sum.oldest.name}: ${sentence(first, now)}.` : `${sum.oldest.name} is recovering: nobody can say where it stands.`;
    return { mood: "held", headline, subline };
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
  return { mood: "calm", headline: sum.streams === 1 ? "The only stream is complete" : `All ${all} are complete`, subline: "Nobody is writing, and nothing is missing." };
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

// What needs attention besides streams, in sentences.
export function notices(sum, pipeline, now) {
  const said = pipeline.problems.map((it) => `${it}.`);
  if (sum.memory) said.push("Neither Redis nor Postgres answers: positions are the last that this sidecar knew.");
  const fresh = (pipeline.dead_letters ?? []).filter((it) => now - seconds(it.newest) < FRESH);
  if (fresh.length) {
    const newest = Math.max(...fresh.map((it) => seconds(it.newest)));
    said.push(
      `Records were rejected, the last ${age(now - newest)} ago: ${fresh.map((it) => `${count(it.records)} ${it.reason}`).join(", ")}` +
        " in all. The topic of the dead letters has them; headers tell partition and offset.",
    );
  }
  return said;
}

export function listed(list, said) {
  if ([...list.children].map((it) => it.textContent).join("\n") === said.join("\n")) return;
  list.replaceChildren(...said.map((it) => element("li", "", it)));
}

function are(number) {
  return `${count(number)} ${number === 1 ? "is" : "are"}`;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
