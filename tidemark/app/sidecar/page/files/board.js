// The list of streams: its order, its filter, and the keyboard. Rows never move under the reader's pointer or focus.

import { judge, seconds, sentence } from "./verdict.js";
import { Motion } from "./motion.js";
import { Past } from "./past.js";
import { Row } from "./row.js";
import { counted } from "./words.js";

const TOUCHED = 4000; // ms after a touch in which nothing moves
const OPENED = 3; // blocked streams that open by themselves

export class Board {
  #streams = new Map(); // name -> {row, motion, stream, chosen, named}; `chosen`: opened or closed by the reader
  #page;
  #pointed = false;
  #touched = 0;
  #resumed = false;
  #spoken = new Map(); // name -> state that was spoken last
  #past;
  #view = new IntersectionObserver((entries) => entries.forEach((it) => this.#seen(it)), { rootMargin: "200px" });

  // `page` has: list, filter, only, shown, sort, nothing, spoken. `token` returns the bearer token, or null.
  constructor(page, token) {
    this.#page = page;
    this.#past = new Past(token, (name) => this.#streams.get(name)?.row.drawPast());
    const { list } = page;
    list.addEventListener("pointerenter", (event) => (this.#pointed = event.pointerType === "mouse"));
    list.addEventListener("pointerleave", () => (this.#pointed = false));
    for (const kind of ["touchstart", "touchmove"]) {
      list.addEventListener(kind, () => (this.#touched = Date.now()), { passive: true });
    }
    page.filter.addEventListener("input", () => this.#select());
    page.only.addEventListener("change", () => this.#select());
    page.sort.addEventListener("click", () => this.#arrange());
    document.addEventListener("keydown", (event) => this.#pressed(event));
  }

  // What the sidecar sent about a stream. It is drawn with the next `draw`.
  take(stream) {
    const known = this.#streams.get(stream.stream);
    if (known) Object.assign(known, { stream, named: true });
    else {
      const row = new Row(stream.stream, (toggled) => this.#toggle(toggled), this.#past);
      this.#view.observe(row.element);
      this.#streams.set(stream.stream, { row, motion: new Motion(), stream, chosen: null, named: true });
    }
  }

  // A new connection begins by naming every stream; those that it does not name are gone.
  resume() {
    this.#resumed = true;
    for (const it of this.#streams.values()) {
      it.motion.rest();
      it.named = false;
    }
  }

  // Show everything as of `now`, and sum it up for the headline. While a connection is `lost` nothing is seen to move: what
  // came of the next one, before all of it did, moves when it is drawn.
  draw(now, lost) {
    if (this.#resumed) this.#forget();
    for (const it of this.#streams.values()) {
      if (!lost) it.motion.see(it.stream.linear, now);
      it.row.draw(it.stream, judge(it.stream, it.motion, now), it.motion, now);
    }
    if (this.#disturbs()) this.#offer();
    else this.#arrange();
    this.#select();
    this.#speak(now);
    return this.#sum();
  }

  #forget() {
    this.#resumed = false;
    for (const [name, { row, named }] of this.#streams) {
      if (named) continue;
      this.#view.unobserve(row.element);
      row.element.remove();
      this.#streams.delete(name);
    }
  }

  #seen({ target, isIntersecting }) {
    for (const { row } of this.#streams.values()) if (row.element === target) row.inView = isIntersecting;
  }

  #sum() {
    const all = [...this.#streams.values()];
    const blocked = all.filter(({ row }) => row.blocked);
    return {
      streams: all.length,
      blocked: blocked.length,
      waiting: all.filter(({ row }) => row.verdict.state === "waiting").length,
      moving: all.filter(({ row }) => row.verdict.state === "moving").length,
      behind: all.reduce((sum, { row }) => sum + (row.verdict.behind ?? 0), 0),
      rate: all.reduce((sum, { motion }) => sum + motion.rate, 0),
      late: all.reduce((sum, { stream }) => sum + (stream.late?.count ?? 0), 0),
      newestLate: Math.max(...all.map(({ stream }) => (stream.late ? seconds(stream.late.newest) : -Infinity))),
      memory: all.some(({ stream }) => stream.source === "memory"),
      oldest: blocked.map(({ row }) => row).sort(byTrouble)[0] ?? null,
    };
  }

  // Whether somebody points at the rows, or is among them with the keyboard or a finger.
  #disturbs() {
    const { list } = this.#page;
    return this.#pointed || list.contains(document.activeElement) || Date.now() - this.#touched < TOUCHED;
  }

  #ordered() {
    return [...this.#streams.values()].map(({ row }) => row).sort(byTrouble);
  }

  #arrange() {
    const { list, sort } = this.#page;
    sort.hidden = true;
    let open = 0;
    this.#ordered().forEach((row, at) => {
      const it = this.#streams.get(row.name);
      const wanted = it.chosen ?? (row.blocked && ++open <= OPENED);
      if (row.open !== wanted) row.open = wanted;
      if (list.children[at] !== row.element) list.insertBefore(row.element, list.children[at] ?? null);
    });
  }

  // The order is not what it should be, and we must not touch it: new rows go to the end, and a button offers the rest.
  #offer() {
    const { list, sort } = this.#page;
    const ordered = this.#ordered();
    for (const row of ordered) if (!row.element.isConnected) list.append(row.element);
    const standing = new Set([...list.children].slice(0, ordered.filter((row) => row.blocked).length));
    const below = ordered.filter((row) => row.blocked && !standing.has(row.element)).length;
    sort.hidden = below === 0;
    if (below) sort.textContent = `${counted(below, "blocked stream")} further down: move to the top`;
  }

  #select() {
    const { filter, only, shown, nothing } = this.#page;
    const text = filter.value.trim().toLowerCase();
    let visible = 0;
    for (const { row } of this.#streams.values()) {
      const hidden = !row.matches(text) || (only.checked && !row.blocked);
      if (row.element.hidden !== hidden) row.element.hidden = hidden;
      visible += !hidden;
    }
    shown.textContent = visible === this.#streams.size ? "" : `${visible} of ${this.#streams.size}`;
    nothing.hidden = visible > 0;
    nothing.textContent = this.#streams.size ? "No stream fits." : "No stream yet: one appears with its first record.";
  }

  #toggle(row) {
    row.open = !row.open;
    this.#streams.get(row.name).chosen = row.open;
  }

  // Say aloud what became blocked and what moves again; nothing else is worth an interruption.
  #speak(now) {
    const news = [];
    for (const { row } of this.#streams.values()) {
      const before = this.#spoken.get(row.name) ?? false;
      if (row.blocked && !before) {
        const first = row.verdict.troubles[0];
        news.push(`${row.name} is blocked${first ? `: ${sentence(first, now)}` : ""}.`);
      } else if (!row.blocked && before) news.push(`${row.name} is not blocked any more.`);
      this.#spoken.set(row.name, row.blocked);
    }
    if (news.length) this.#page.spoken.textContent = news.length > 3 ? `${news.length} streams changed.` : news.join(" ");
  }

  #pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { filter, list } = this.#page;
    const typing = event.target instanceof HTMLInputElement && event.target.type !== "checkbox";
    if (event.key === "Escape") {
      if (filter.value) {
        filter.value = "";
        this.#select();
      }
      document.activeElement?.blur();
      return;
    }
    if (typing && event.key !== "ArrowDown") return;
    const visible = [...list.children].filter((it) => !it.hidden).map((it) => it.querySelector("button"));
    const at = visible.indexOf(document.activeElement);
    const blocked = visible.filter((it) => it.closest("li").dataset.state === "blocked");
    const targets = {
      "/": filter,
      ArrowDown: visible[at + 1],
      ArrowUp: at > 0 ? visible[at - 1] : filter,
      n: blocked.find((it) => visible.indexOf(it) > at) ?? blocked[0],
    };
    if (event.key === "ArrowUp" && at < 0) return;
    if (event.key === "ArrowDown" && at < 0 && !typing && event.target !== document.body) return;
    const target = targets[event.key];
    if (!target) return;
    event.preventDefault();
    target.focus();
    target.scrollIntoView({ block: "nearest" });
  }
}

// Blocked ones first, the longest before the others; then by name.
function byTrouble(a, b) {
  if (a.blocked !== b.blocked) return a.blocked ? -1 : 1;
  if (a.blocked && a.verdict.since !== b.verdict.since) return (a.verdict.since ?? 0) - (b.verdict.since ?? 0);
  return a.name < b.name ? -1 : 1;
}
