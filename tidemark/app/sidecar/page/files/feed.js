// The connection to `/v1/watch`. The sidecar sends every stream first, then the streams that change. Reconnects after
// each loss.

import { parseJson } from "./ids.js";
import { readEvents } from "./sse.js";

const SILENCE_TIMEOUT_MS = 30_000; // the connection is closed after so long without a byte
const RECONNECT_PAUSES_MS = [500, 1000, 2000, 5000];

// `listener` has the methods onConnected(), onStream(stream), onPipeline(pipeline), onDisconnected(reason), and
// onTokenRefused(), which is called if the token is missing or invalid. `token` returns the bearer token, or null.
export class Feed {
  #listener;
  #token = () => null;
  #failures = 0; // since the last event
  #retryTimer;

  constructor(listener, token) {
    this.#listener = listener;
    this.#token = token;
  }

  async open() {
    clearTimeout(this.#retryTimer);
    let reason;
    try {
      reason = await this.#readUntilEnd();
    } catch (error) {
      reason = error.name === "AbortError" ? "no data arrives from the sidecar" : "the sidecar cannot be reached";
    }
    if (reason === null) return;
    this.#listener.onDisconnected(reason);
    const pause = RECONNECT_PAUSES_MS[Math.min(this.#failures++, RECONNECT_PAUSES_MS.length - 1)];
    // A random pause, so that pages do not reconnect together.
    this.#retryTimer = setTimeout(() => this.open(), pause * (0.5 + Math.random()));
  }

  // Read until the connection ends. Returns the reason of its end; null if a token is needed before another attempt.
  async #readUntilEnd() {
    const controller = new AbortController();
    let silenceTimer = setTimeout(() => controller.abort(), SILENCE_TIMEOUT_MS);
    const restartTimer = () => {
      clearTimeout(silenceTimer);
      silenceTimer = setTimeout(() => controller.abort(), SILENCE_TIMEOUT_MS);
    };
    try {
      const token = this.#token();
      const headers = token ? { Authorization: `Bearer ${token}` } : {};
      const answer = await fetch("v1/watch", { headers, cache: "no-store", signal: controller.signal });
      if (answer.status === 401) {
        this.#listener.onTokenRefused();
        return null;
      }
      if (!answer.ok) return `the sidecar answers ${answer.status} ${answer.statusText}`.trim();
      this.#listener.onConnected();
      for await (const { name, data } of readEvents(answer.body, restartTimer)) {
        this.#failures = 0;
        if (name === "stream") this.#listener.onStream(parseJson(data));
        else if (name === "pipeline") this.#listener.onPipeline(parseJson(data));
      }
      return "the sidecar closed the connection";
    } finally {
      clearTimeout(silenceTimer);
    }
  }
}
