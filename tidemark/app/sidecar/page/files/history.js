// Loads the past hour and the readers of streams while their rows are in view, and again at intervals.

import { parseJson } from "./ids.js";

const REFRESH_MS = 60_000; // between two requests for a row in view
const OPEN_REFRESH_MS = 10_000; // the same for an open row
const RETRY_MS = 5_000; // the same after a failed request
const MAX_CONCURRENT_REQUESTS = 2;

// `token` returns the bearer token, or null. `onChange` is called with the name of a stream when an answer for it arrives.
export class HistoryLoader {
  #token;
  #onChange;
  #streams = new Map(); // name -> {requestedAt, open, history, readers}
  #queue = [];
  #running = 0;

  constructor(token, onChange) {
    this.#token = token;
    this.#onChange = onChange;
  }

  // {history, readers} of a stream from the last answers of the sidecar; each is null before the first answer.
  get(name) {
    return this.#streams.get(name) ?? { history: null, readers: null };
  }

  // Request the history of a stream if the last answer is too old; for an `open` row also its readers.
  request(name, open) {
    const stream = this.#streams.get(name) ?? { requestedAt: -Infinity, open: false, history: null, readers: null };
    const age = performance.now() - stream.requestedAt;
    if (age < (open ? OPEN_REFRESH_MS : REFRESH_MS) && (stream.open || !open)) return;
    Object.assign(stream, { requestedAt: performance.now(), open });
    this.#streams.set(name, stream);
    this.#queue.push([name, "history"]);
    if (open) this.#queue.unshift([name, "readers"]);
    this.#runNext();
  }

  async #runNext() {
    if (this.#running >= MAX_CONCURRENT_REQUESTS || !this.#queue.length) return;
    this.#running++;
    const [name, resource] = this.#queue.shift();
    const answer = await this.#fetch(`v1/streams/${encodeURIComponent(name)}/${resource}`);
    this.#running--;
    const stream = this.#streams.get(name);
    if (answer === null) stream.requestedAt = performance.now() - (stream.open ? OPEN_REFRESH_MS : REFRESH_MS) + RETRY_MS;
    else {
      stream[resource] = resource === "readers" ? answer.readers : answer;
      this.#onChange(name);
    }
    this.#runNext();
  }

  // The answer; null if the sidecar cannot answer now.
  async #fetch(path) {
    const token = this.#token();
    try {
      const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
      return answer.ok ? parseJson(await answer.text()) : null;
    } catch {
      return null;
    }
  }
}

// The parts of a track in which a writer moved, in per cent of the track. `moved`: for each step, by how many IDs.
// Neighbouring steps are joined to one part.
export function moveParts(moved) {
  const parts = [];
  moved.forEach((ids, step) => {
    if (!ids) return;
    const from = (100 * step) / moved.length;
    const to = (100 * (step + 1)) / moved.length;
    if (parts.at(-1)?.to === from) parts.at(-1).to = to;
    else parts.push({ kind: "was-moving", from, to });
  });
  return parts;
}

// The gaps of a writer as parts of a track. The track begins at `since` (seconds since 1970) and shows `seconds`.
export function gapParts(writer, since, seconds) {
  const percent = (moment) => Math.max(0, Math.min(100, (100 * (Date.parse(moment) / 1000 - since)) / seconds));
  return writer.gaps.map((gap) => ({ kind: "was-gap", from: percent(gap.opened), to: gap.closed === null ? 100 : percent(gap.closed) }));
}
