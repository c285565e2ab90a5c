// The past hour and the readers of streams. They are asked for while a row is in view, and now and then again.

import { parse } from "./ids.js";

const AGE = 60_000; // ms after which a row in view is asked for again
const OPEN_AGE = 10_000; // the same for an open row
const RETRY_AGE = 5_000; // the same if the sidecar could not tell
const AT_ONCE = 2; // requests

// `token` returns the bearer token, or null. `changed` is called with the name of a stream of which something came.
export class Past {
  #token;
  #changed;
  #known = new Map(); // name -> {asked, history, readers}
  #queue = [];
  #running = 0;

  constructor(token, changed) {
    this.#token = token;
    this.#changed = changed;
  }

  // {history, readers} of a stream as the sidecar answered last; each is null until then.
  of(name) {
    return this.#known.get(name) ?? { history: null, readers: null };
  }

  want(name, open) {
    const known = this.#known.get(name) ?? { asked: -Infinity, open: false, history: null, readers: null };
    const age = performance.now() - known.asked;
    if (age < (open ? OPEN_AGE : AGE) && (known.open || !open)) return;
    Object.assign(known, { asked: performance.now(), open });
    this.#known.set(name, known);
    this.#queue.push([name, "history"]);
    if (open) this.#queue.unshift([name, "readers"]);
    this.#next();
  }

  async #next() {
    if (this.#running >= AT_ONCE || !this.#queue.length) return;
    this.#running++;
    const [name, what] = this.#queue.shift();
    const answer = await this.#ask(`v1/streams/${encodeURIComponent(name)}/${what}`);
    this.#running--;
    const known = this.#known.get(name);
    if (answer === null) known.asked = performance.now() - (known.open ? OPEN_AGE : AGE) + RETRY_AGE;
    else {
      known[what] = what === "readers" ? answer.readers : answer;
      this.#changed(name);
    }
    this.#next();
  }

  // Null if the sidecar cannot tell now: the page says so at its top, and asks again.
  async #ask(path) {
    const token = this.#token();
    try {
      const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
      return answer.ok ? parse(await answer.text()) : null;
    } catch {
      return null;
    }
  }
}

// The steps in which a writer moved, as parts of a track: neighbouring steps are one part. In per cent.
export function moves(moved) {
  const parts = [];
  moved.forEach((ids, at) => {
    if (!ids) return;
    const from = (100 * at) / moved.length;
    const to = (100 * (at + 1)) / moved.length;
    if (parts.at(-1)?.to === from) parts.at(-1).to = to;
    else parts.push({ kind: "was-moving", from, to });
  });
  return parts;
}

// The gaps of a writer as parts of a track. `since` and `seconds` are those of the whole track.
export function gaps(writer, since, seconds) {
  const at = (moment) => Math.max(0, Math.min(100, (100 * (Date.parse(moment) / 1000 - since)) / seconds));
  return writer.gaps.map((gap) => ({ kind: "was-gap", from: at(gap.opened), to: gap.closed === null ? 100 : at(gap.closed) }));
}
