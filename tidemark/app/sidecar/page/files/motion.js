// How a linear position moves: its rate, and how long it has not moved, as far as this page knows.

import { ahead } from "./ids.js";

const WINDOW = 10; // seconds that a rate is taken over

export class Motion {
  #samples = []; // [seconds, linear]
  #linear = null;

  // `moved`: it was seen to move. `still`: it has not moved since then.
  moved = false;
  still = null;

  see(linear, now) {
    const last = this.#samples.at(-1);
    if (linear === null || last?.[0] === now) return;
    this.still ??= now;
    if (this.#linear !== null && this.#linear !== linear) {
      this.moved = true;
      this.still = now;
    }
    this.#linear = linear;
    this.#samples.push([now, linear]);
    while (this.#samples.length > 2 && now - this.#samples[1][0] >= WINDOW) this.#samples.shift();
  }

  // Nothing was heard for a while: what happened meanwhile has no rate.
  rest() {
    this.#samples = [];
  }

  // IDs a second.
  get rate() {
    if (this.#samples.length < 2) return 0;
    const [began, from] = this.#samples[0];
    const [ended, to] = this.#samples.at(-1);
    return ended > began ? ahead(to, from) / (ended - began) : 0;
  }
}
