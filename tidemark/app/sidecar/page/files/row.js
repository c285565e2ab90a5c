// One stream on the page: a line that is always there, and its writers below it when it is open.

import { sentence } from "./verdict.js";
import { chart, described, draw } from "./chart.js";
import { gaps, moves } from "./past.js";
import { Scale, ofReader, ofWriter, paint, whole } from "./strip.js";
import { age, count, counted, grouped, rate } from "./words.js";

const STATES = { blocked: "blocked", waiting: "waiting", moving: "moving", complete: "complete", recovering: "recovering" };
let rows = 0;

export class Row {
  #parts;
  #shown = {}; // by part: its text
  #now = 0;
  #rate = 0;
  #past;

  // `past` is the `Past` of the page.
  constructor(name, toggled, past) {
    this.#past = past;
    this.inView = false;
    this.name = name;
    this.stream = null;
    this.verdict = null;
    this.element = element("li", "stream");
    const id = `row${rows++}`;
    const button = element("button", "name", name);
    button.type = "button";
    button.setAttribute("aria-controls", id);
    button.addEventListener("click", () => toggled(this));
    const heading = element("h2");
    heading.append(button);
    const strip = element("div", "strip");
    strip.setAttribute("role", "img");
    const figures = { linear: figure("linear"), behind: figure("behind"), rate: figure("IDs a second") };
    const list = element("dl", "numbers");
    list.append(...Object.values(figures).map((it) => it.pair));
    const lag = chart("lag");
    lag.setAttribute("aria-label", "Lag in the past hour: not known yet");
    const state = element("p", "state");
    const late = element("p", "late");
    const condition = element("div", "condition");
    condition.append(state, late);
    const details = element("div", "details");
    details.id = id;
    this.element.append(heading, strip, list, lag, condition, details);
    this.#parts = { button, strip, lag, state, late, details, ...map(figures, (it) => it.value) };
    this.open = false;
  }

  get open() {
    return this.#parts.button.getAttribute("aria-expanded") === "true";
  }

  set open(open) {
    this.#parts.button.setAttribute("aria-expanded", open);
    this.#parts.details.hidden = !open;
    this.#drawDetails();
  }

  get button() {
    return this.#parts.button;
  }

  get blocked() {
    return this.verdict?.state === "blocked" || this.verdict?.state === "recovering";
  }

  matches(text) {
    const names = [this.name, ...(this.stream?.writers ?? []).map((it) => it.writer)];
    return names.some((it) => it.toLowerCase().includes(text));
  }

  draw(stream, verdict, motion, now) {
    this.stream = stream;
    this.verdict = verdict;
    this.#now = now;
    this.#rate = motion.rate;
    this.element.dataset.state = verdict.state;
    this.#say("state", STATES[verdict.state] + (verdict.since === null ? "" : ` ${age(now - verdict.since)}`));
    this.#say("linear", stream.linear === null ? "not known" : grouped(stream.linear));
    this.#say("behind", verdict.behind === null ? "–" : count(verdict.behind));
    this.#say("rate", stream.linear === null ? "–" : rate(motion.rate));
    this.#say("late", stream.late ? `${stream.late.count}${stream.late.count < 100 ? "" : "+"} late` : "");
    this.#parts.strip.ariaLabel = this.#description(verdict, now);
    paint(this.#parts.strip, stream.linear === null ? [] : whole(stream, new Scale(stream, verdict.allocated, motion.rate)));
    if (this.inView && stream.linear !== null) this.#past.want(this.name, this.open);
    this.drawPast();
    this.#drawDetails();
  }

  // The past hour, as the sidecar answered last.
  drawPast() {
    const { history } = this.#past.of(this.name);
    if (history !== null) draw(this.#parts.lag, history.lag_seconds);
    if (this.open) this.#drawDetails();
  }

  #description(verdict, now) {
    if (this.stream.linear === null) return `${this.name} is recovering`;
    if (!verdict.troubles.length) return `${this.name} is complete up to ${grouped(this.stream.linear)}`;
    return verdict.troubles.map((it) => sentence(it, now)).join("; ");
  }

  #drawDetails() {
    const { details } = this.#parts;
    if (!this.open || this.stream === null) return;
    if (this.stream.linear === null) {
      details.replaceChildren(element("p", "trouble", "Neither Redis nor Postgres knows its positions."));
      return;
    }
    details.querySelector(":scope > .trouble")?.remove();
    const scale = new Scale(this.stream, this.verdict.allocated, this.#rate);
    const troubles = child(details, "ul", "troubles");
    resized(troubles, this.verdict.troubles.length, trouble);
    this.verdict.troubles.forEach((it, at) => tell(troubles.children[at], it, this.#now));
    const lanes = child(details, "ul", "lanes");
    lanes.ariaLabel = `Writers of ${this.name}`;
    resized(lanes, this.stream.writers.length, lane);
    this.stream.writers.forEach((it, at) => place(lanes.children[at], it, scale));
    const ends = child(details, "p", "ends");
    text(child(ends, "span", "first"), `from ${grouped(scale.first)}`);
    text(child(ends, "span", "allocated"), `allocated to ${grouped(this.verdict.allocated)}`);
    const { history, readers } = this.#past.of(this.name);
    if (readers?.length) this.#drawReaders(details, readers, scale);
    else details.querySelector(":scope > .reading")?.remove();
    if (history !== null) this.#drawPast(details, history);
  }

  #drawReaders(details, readers, scale) {
    const part = child(details, "section", "reading");
    const past = details.querySelector(":scope > .past");
    if (past?.nextElementSibling === part) details.insertBefore(part, past); // the readers come first
    text(child(part, "h3", "title"), "Readers");
    const lanes = child(part, "ul", "readers");
    lanes.ariaLabel = `Readers of ${this.name}`;
    resized(lanes, readers.length, track);
    readers.forEach((it, at) => placeReader(lanes.children[at], it, scale));
  }

  #drawPast(details, history) {
    const part = child(details, "section", "past");
    text(child(part, "h3", "title"), "The past hour");
    const hour = child(part, "div", "hour");
    text(child(hour, "span", "writer"), "lag");
    draw(hour.querySelector("svg") ?? hour.appendChild(chart("lag")), history.lag_seconds);
    text(child(hour, "span", "largest"), described(history.lag_seconds).replace("Lag in the past hour: a", "a"));
    const seconds = history.step_seconds * history.lag_seconds.length;
    const since = Date.parse(history.since) / 1000;
    const lanes = child(part, "ul", "tracks");
    lanes.ariaLabel = `Writers of ${this.name} in the past hour`;
    resized(lanes, history.writers.length, track);
    history.writers.forEach((it, at) => placePast(lanes.children[at], it, since, seconds));
    const ends = child(part, "p", "ends");
    text(child(ends, "span", "first"), "an hour ago");
    text(child(ends, "span", "allocated"), "now");
  }

  #say(part, said) {
    if (this.#shown[part] === said) return;
    this.#shown[part] = said;
    this.#parts[part].textContent = said;
  }
}

function trouble() {
  const item = element("li", "trouble");
  item.append(element("strong"), element("span", "more"), element("span", "how"), element("code", "verb"));
  return item;
}

function tell(item, it, now) {
  const [what, more, how, verb] = item.children;
  text(what, sentence(it, now));
  text(more, it.more);
  text(how, it.how);
  text(verb, it.verb ?? "");
}

function lane() {
  const item = element("li", "lane");
  const strip = element("div", "strip");
  strip.setAttribute("role", "img");
  item.append(element("span", "writer"), strip, element("span", "position"));
  return item;
}

function place(item, writer, scale) {
  const [name, strip, position] = item.children;
  text(name, writer.writer);
  name.title = writer.epoch === null ? writer.writer : `${writer.writer}, epoch ${writer.epoch}`;
  text(position, grouped(writer.position));
  item.classList.toggle("retired", writer.retired === true);
  strip.ariaLabel = `${writer.writer} at ${grouped(writer.position)}${writer.retired ? ", retired" : ""}`;
  paint(strip, ofWriter(writer, scale));
}

function track() {
  const item = element("li", "track");
  const strip = element("div", "strip");
  strip.setAttribute("role", "img");
  item.append(element("span", "writer"), strip, element("span", "position"), element("span", "remark"));
  return item;
}

function placeReader(item, reader, scale) {
  const [name, strip, position, note] = item.children;
  text(name, reader.reader);
  name.title = reader.token === null ? reader.reader : `${reader.reader} at ${reader.token}`;
  text(position, reader.linear === null ? "–" : grouped(reader.linear));
  text(note, readerNote(reader));
  item.dataset.state = reader.state;
  strip.ariaLabel = `${reader.reader} ${reader.linear === null ? "has not begun" : `has read up to ${grouped(reader.linear)}`}`;
  paint(strip, ofReader(reader, scale));
}

// State, lag and what else is worth a look.
function readerNote(reader) {
  const copies = reader.copies ? counted(reader.copies, "copy", "copies") : "";
  const lag = reader.lag_ids && reader.lag_seconds !== null ? `for ${age(reader.lag_seconds)}` : "";
  const parked = reader.parked ? `${count(reader.parked)} parked` : "";
  const late = reader.late ? `${count(reader.late)} late` : "";
  return [[reader.state, lag].filter(Boolean).join(" "), copies, parked, late].filter(Boolean).join(", ");
}

function placePast(item, writer, since, seconds) {
  const [name, strip, position, note] = item.children;
  const ids = writer.moved.reduce((sum, it) => sum + Number(it), 0);
  text(name, writer.writer);
  name.title = writer.writer;
  text(position, `+${count(ids)}`);
  text(note, writer.gaps.length ? counted(writer.gaps.length, "gap") : "");
  strip.ariaLabel = `${writer.writer} moved by ${count(ids)} IDs in the past hour, ${counted(writer.gaps.length, "gap")}`;
  paint(strip, [...moves(writer.moved), ...gaps(writer, since, seconds)]);
}

function figure(name) {
  const pair = element("div");
  const value = element("dd");
  pair.append(element("dt", "", name), value);
  return { pair, value };
}

function child(parent, tag, name) {
  return parent.querySelector(`:scope > .${name}`) ?? parent.appendChild(element(tag, name));
}

function resized(list, length, made) {
  while (list.children.length > length) list.lastElementChild.remove();
  while (list.children.length < length) list.append(made());
}

function text(element, said) {
  if (element.textContent !== said) element.textContent = said;
}

function map(object, change) {
  return Object.fromEntries(Object.entries(object).map(([name, value]) => [name, change(value)]));
}

export function element(tag, name = "", said = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (said) made.textContent = said;
  return made;
}
