// The list of streams: its order, its filter, and its keyboard shortcuts. Rows do not move while the user points at the
// list or has the focus in it.

import { streamStatus, toSeconds, describeProblem } from "./status.js";
import { Motion } from "./motion.js";
import { HistoryLoader } from "./history.js";
import { Row } from "./row.js";
import { pluralize } from "./format.js";

const TOUCH_PAUSE_MS = 4000; // after a touch, no row moves for so long
const MAX_AUTO_OPENED = 3; // blocked streams that open by themselves

export class Board {
  // name -> {row, motion, stream, chosenOpen, isListed}. `chosenOpen`: true if the user opened the row, false if the user
  // closed it, else null. `isListed`: whether the current connection has sent the stream.
  #streams = new Map();
  #elements;
  #isPointedAt = false;
  #touchedAt = 0; // ms
  #isNewConnection = false;
  #announcedBlocked = new Map(); // name -> whether the stream was blocked at the last announcement
  #history;
  #viewObserver = new IntersectionObserver((entries) => entries.forEach((entry) => this.#setInView(entry)), { rootMargin: "200px" });

  // `elements`: the elements of the page, as page.js names them. `token` returns the bearer token, or null.
  constructor(elements, token) {
    this.#elements = elements;
    this.#history = new HistoryLoader(token, (name) => this.#streams.get(name)?.row.drawHistory());
    const { list } = elements;
    list.addEventListener("pointerenter", (event) => (this.#isPointedAt = event.pointerType === "mouse"));
    list.addEventListener("pointerleave", () => (this.#isPointedAt = false));
    for (const kind of ["touchstart", "touchmove"]) {
      list.addEventListener(kind, () => (this.#touchedAt = Date.now()), { passive: true });
    }
    elements.filter.addEventListener("input", () => this.#applyFilter());
    elements.blockedOnly.addEventListener("change", () => this.#applyFilter());
    elements.sortButton.addEventListener("click", () => this.#sort());
    document.addEventListener("keydown", (event) => this.#handleKey(event));
  }

  // Store an event of a stream. The next `draw` shows it.
  update(stream) {
    const known = this.#streams.get(stream.stream);
    if (known) Object.assign(known, { stream, isListed: true });
    else {
      const row = new Row(stream.stream, (toggled) => this.#toggle(toggled), this.#history);
      this.#viewObserver.observe(row.element);
      this.#streams.set(stream.stream, { row, motion: new Motion(), stream, chosenOpen: null, isListed: true });
    }
  }

  // Call this when a new connection begins. The sidecar sends every stream before the next `draw`. That `draw` removes all
  // other streams.
  startConnection() {
    this.#isNewConnection = true;
    for (const entry of this.#streams.values()) {
      entry.motion.clearSamples();
      entry.isListed = false;
    }
  }

  // Draw all streams as of `now` (seconds since 1970). Returns the totals for the headline. Without a connection,
  // positions are not sampled: the first streams of the next connection may arrive before the connection is complete.
  draw(now, isDisconnected) {
    if (this.#isNewConnection) this.#removeUnlisted();
    for (const entry of this.#streams.values()) {
      if (!isDisconnected) entry.motion.addSample(entry.stream.linear, now);
      entry.row.draw(entry.stream, streamStatus(entry.stream, entry.motion, now), entry.motion, now);
    }
    if (this.#isInUse()) this.#offerSort();
    else this.#sort();
    this.#applyFilter();
    this.#announceChanges(now);
    return this.#totals();
  }

  #removeUnlisted() {
    this.#isNewConnection = false;
    for (const [name, { row, isListed }] of this.#streams) {
      if (isListed) continue;
      this.#viewObserver.unobserve(row.element);
      row.element.remove();
      this.#streams.delete(name);
    }
  }

  #setInView({ target, isIntersecting }) {
    for (const { row } of this.#streams.values()) if (row.element === target) row.inView = isIntersecting;
  }

  #totals() {
    const all = [...this.#streams.values()];
    const blocked = all.filter(({ row }) => row.isBlocked);
    return {
      streams: all.length,
      blocked: blocked.length,
      waiting: all.filter(({ row }) => row.status.state === "waiting").length,
      moving: all.filter(({ row }) => row.status.state === "moving").length,
      linearLag: all.reduce((sum, { row }) => sum + (row.status.linearLag ?? 0), 0),
      rate: all.reduce((sum, { motion }) => sum + motion.rate, 0),
      late: all.reduce((sum, { stream }) => sum + (stream.late?.count ?? 0), 0),
      newestLate: Math.max(...all.map(({ stream }) => (stream.late ? toSeconds(stream.late.newest) : -Infinity))),
      fromMemory: all.some(({ stream }) => stream.source === "memory"),
      longestBlocked: blocked.map(({ row }) => row).sort(compareRows)[0] ?? null,
    };
  }

  // Whether the user points at the list, has the focus in it, or has just touched it.
  #isInUse() {
    const { list } = this.#elements;
    return this.#isPointedAt || list.contains(document.activeElement) || Date.now() - this.#touchedAt < TOUCH_PAUSE_MS;
  }

  #sortedRows() {
    return [...this.#streams.values()].map(({ row }) => row).sort(compareRows);
  }

  #sort() {
    const { list, sortButton } = this.#elements;
    sortButton.hidden = true;
    let autoOpened = 0;
    this.#sortedRows().forEach((row, index) => {
      const entry = this.#streams.get(row.name);
      const shouldOpen = entry.chosenOpen ?? (row.isBlocked && ++autoOpened <= MAX_AUTO_OPENED);
      if (row.open !== shouldOpen) row.open = shouldOpen;
      if (list.children[index] !== row.element) list.insertBefore(row.element, list.children[index] ?? null);
    });
  }

  // Append new rows without moving other rows. If blocked streams are further down, show a button that sorts the list.
  #offerSort() {
    const { list, sortButton } = this.#elements;
    const sorted = this.#sortedRows();
    for (const row of sorted) if (!row.element.isConnected) list.append(row.element);
    const top = new Set([...list.children].slice(0, sorted.filter((row) => row.isBlocked).length));
    const below = sorted.filter((row) => row.isBlocked && !top.has(row.element)).length;
    sortButton.hidden = below === 0;
    if (below) sortButton.textContent = `${pluralize(below, "blocked stream")} further down: move to the top`;
  }

  #applyFilter() {
    const { filter, blockedOnly, matchCount, emptyMessage } = this.#elements;
    const text = filter.value.trim().toLowerCase();
    let visible = 0;
    for (const { row } of this.#streams.values()) {
      const hidden = !row.matches(text) || (blockedOnly.checked && !row.isBlocked);
      if (row.element.hidden !== hidden) row.element.hidden = hidden;
      visible += !hidden;
    }
    matchCount.textContent = visible === this.#streams.size ? "" : `${visible} of ${this.#streams.size}`;
    emptyMessage.hidden = visible > 0;
    emptyMessage.textContent = this.#streams.size ? "No stream matches." : "No stream yet: a stream appears with its first record.";
  }

  #toggle(row) {
    row.open = !row.open;
    this.#streams.get(row.name).chosenOpen = row.open;
  }

  // Announce to screen readers the streams that became blocked, and the streams that are not blocked any more.
  #announceChanges(now) {
    const changes = [];
    for (const { row } of this.#streams.values()) {
      const wasBlocked = this.#announcedBlocked.get(row.name) ?? false;
      if (row.isBlocked && !wasBlocked) {
        const problem = row.status.problems[0];
        changes.push(`${row.name} is blocked${problem ? `: ${describeProblem(problem, now)}` : ""}.`);
      } else if (!row.isBlocked && wasBlocked) changes.push(`${row.name} is not blocked any more.`);
      this.#announcedBlocked.set(row.name, row.isBlocked);
    }
    if (changes.length) this.#elements.liveRegion.textContent = changes.length > 3 ? `${changes.length} streams changed.` : changes.join(" ");
  }

  #handleKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { filter, list } = this.#elements;
    const isTyping = event.target instanceof HTMLInputElement && event.target.type !== "checkbox";
    if (event.key === "Escape") {
      if (filter.value) {
        filter.value = "";
        this.#applyFilter();
      }
      document.activeElement?.blur();
      return;
    }
    if (isTyping && event.key !== "ArrowDown") return;
    const buttons = [...list.children].filter((item) => !item.hidden).map((item) => item.querySelector("button"));
    const focused = buttons.indexOf(document.activeElement);
    const blocked = buttons.filter((button) => button.closest("li").dataset.state === "blocked");
    const targets = {
      "/": filter,
      ArrowDown: buttons[focused + 1],
      ArrowUp: focused > 0 ? buttons[focused - 1] : filter,
      n: blocked.find((button) => buttons.indexOf(button) > focused) ?? blocked[0],
    };
    if (event.key === "ArrowUp" && focused < 0) return;
    if (event.key === "ArrowDown" && focused < 0 && !isTyping && event.target !== document.body) return;
    const target = targets[event.key];
    if (!target) return;
    event.preventDefault();
    target.focus();
    target.scrollIntoView({ block: "nearest" });
  }
}

// Blocked streams first, the longest blocked before the others; then by name.
function compareRows(a, b) {
  if (a.isBlocked !== b.isBlocked) return a.isBlocked ? -1 : 1;
  if (a.isBlocked && a.status.since !== b.status.since) return (a.status.since ?? 0) - (b.status.since ?? 0);
  return a.name < b.name ? -1 : 1;
}
