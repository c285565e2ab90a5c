// The motion of a linear position: its rate, and since when it has not moved. Times are in seconds.

import { distanceBeyond } from "./ids.js";

const RATE_WINDOW_SECONDS = 10;

export class Motion {
  #samples = []; // [seconds, linear]
  #linear = null;

  // `hasMoved`: whether this page has seen the position move. `stillSince`: when the position moved last; before the
  // first move, the time of the first sample.
  hasMoved = false;
  stillSince = null;

  addSample(linear, now) {
    const last = this.#samples.at(-1);
    if (linear === null || last?.[0] === now) return;
    this.stillSince ??= now;
    if (this.#linear !== null && this.#linear !== linear) {
      this.hasMoved = true;
      this.stillSince = now;
    }
    this.#linear = linear;
    this.#samples.push([now, linear]);
    while (this.#samples.length > 2 && now - this.#samples[1][0] >= RATE_WINDOW_SECONDS) this.#samples.shift();
  }

  // Forget the samples after a loss of the connection: the rate during the loss is not known.
  clearSamples() {
    this.#samples = [];
  }

  // IDs per second.
  get rate() {
    if (this.#samples.length < 2) return 0;
    const [began, from] = this.#samples[0];
    const [ended, to] = this.#samples.at(-1);
    return ended > began ? distanceBeyond(to, from) / (ended - began) : 0;
  }
}
