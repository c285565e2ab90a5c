// The connection to the sidecar: everything at first, then what changes. It reconnects by itself.

import { parse } from "./ids.js";
import { events } from "./sse.js";

const SILENT = 30_000; // ms without a byte: the connection counts as dead
const PAUSES = [500, 1000, 2000, 5000]; // ms before the next try

// `listener` has: connected(), stream(data), pipeline(data), lost(reason), refused() for a token that is missing or wrong.
export class Feed {
  #listener;
  #token = () => null;
  #tries = 0;
  #retry;

  constructor(listener, token) {
    this.#listener = listener;
    this.#token = token;
  }

  async open() {
    clearTimeout(this.#retry);
    let reason;
    try {
      reason = await this.#read();
    } catch (error) {
      reason = error.name === "AbortError" ? "the sidecar sends nothing any more" : "the sidecar cannot be reached";
    }
    if (reason === null) return;
    this.#listener.lost(reason);
    const pause = PAUSES[Math.min(this.#tries++, PAUSES.length - 1)];
    this.#retry = setTimeout(() => this.open(), pause * (0.5 + Math.random())); // not all pages at once
  }

  // Returns why the connection ended; null: not to be tried again before there is a token.
  async #read() {
    const gone = new AbortController();
    let silence = setTimeout(() => gone.abort(), SILENT);
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => gone.abort(), SILENT);
    };
    try {
      const token = this.#token();
      const headers = token ? { Authorization: `Bearer ${token}` } : {};
      const answer = await fetch("v1/watch", { headers, cache: "no-store", signal: gone.signal });
      if (answer.status === 401) {
        this.#listener.refused();
        return null;
      }
      if (!answer.ok) return `the sidecar answers ${answer.status} ${answer.statusText}`.trim();
      this.#listener.connected();
      for await (const { name, data } of events(answer.body, heard)) {
        this.#tries = 0;
        if (name === "stream") this.#listener.stream(parse(data));
        else if (name === "pipeline") this.#listener.pipeline(parse(data));
      }
      return "the sidecar closed the connection";
    } finally {
      clearTimeout(silence);
    }
  }
}
