// One stream on the page: a row, and while it is open, details below: problems, writers, readers and the past hour.

import { describeProblem } from "./status.js";
import { createChart, describeLag, drawChart } from "./chart.js";
import { gapParts, moveParts } from "./history.js";
import { Scale, readerParts, writerParts, paint, streamParts } from "./strip.js";
import { formatDuration, formatCount, pluralize, formatId, formatRate } from "./format.js";

const STATES = { blocked: "blocked", waiting: "waiting", moving: "moving", complete: "complete", recovering: "recovering" };
let rowCount = 0; // for unique element IDs

export class Row {
  #parts;
  #texts = {}; // by part: the text that is shown
  #now = 0;
  #rate = 0;
  #history;

  // `onToggle` is called with this row when the user clicks its name. `history`: the `HistoryLoader` of the page.
  constructor(name, onToggle, history) {
    this.#history = history;
    this.inView = false;
    this.name = name;
    this.stream = null;
    this.status = null; // from `streamStatus`
    this.element = createElement("li", "stream");
    const id = `row${rowCount++}`;
    const button = createElement("button", "name", name);
    button.type = "button";
    button.setAttribute("aria-controls", id);
    button.addEventListener("click", () => onToggle(this));
    const heading = createElement("h2");
    heading.append(button);
    const strip = createElement("div", "strip");
    strip.setAttribute("role", "img");
    const figures = { linear: createFigure("linear"), linearLag: createFigure("lag (IDs)"), rate: createFigure("IDs a second") };
    const list = createElement("dl", "numbers");
    list.append(...Object.values(figures).map((figure) => figure.pair));
    const lag = createChart("lag");
    lag.setAttribute("aria-label", "Lag in the past hour: not known yet");
    const state = createElement("p", "state");
    const late = createElement("p", "late");
    const condition = createElement("div", "condition");
    condition.append(state, late);
    const details = createElement("div", "details");
    details.id = id;
    this.element.append(heading, strip, list, lag, condition, details);
    this.#parts = { button, strip, lag, state, late, details, ...mapValues(figures, (figure) => figure.value) };
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

  get isBlocked() {
    return this.status?.state === "blocked" || this.status?.state === "recovering";
  }

  // Whether the name of the stream or of one of its writers contains `text`, which is in lower case.
  matches(text) {
    const names = [this.name, ...(this.stream?.writers ?? []).map((writer) => writer.writer)];
    return names.some((name) => name.toLowerCase().includes(text));
  }

  draw(stream, status, motion, now) {
    this.stream = stream;
    this.status = status;
    this.#now = now;
    this.#rate = motion.rate;
    this.element.dataset.state = status.state;
    this.#setText("state", STATES[status.state] + (status.since === null ? "" : ` ${formatDuration(now - status.since)}`));
    this.#setText("linear", stream.linear === null ? "not known" : formatId(stream.linear));
    this.#setText("linearLag", status.linearLag === null ? "–" : formatCount(status.linearLag));
    this.#setText("rate", stream.linear === null ? "–" : formatRate(motion.rate));
    this.#setText("late", stream.late ? `${stream.late.count}${stream.late.count < 100 ? "" : "+"} late` : "");
    this.#parts.strip.ariaLabel = this.#describe(status, now);
    paint(this.#parts.strip, stream.linear === null ? [] : streamParts(stream, new Scale(stream, status.allocated, motion.rate)));
    if (this.inView && stream.linear !== null) this.#history.request(this.name, this.open);
    this.drawHistory();
    this.#drawDetails();
  }

  // Draw the last known history of the past hour.
  drawHistory() {
    const { history } = this.#history.get(this.name);
    if (history !== null) drawChart(this.#parts.lag, history.lag_seconds);
    if (this.open) this.#drawDetails();
  }

  // The description of the strip, for screen readers.
  #describe(status, now) {
    if (this.stream.linear === null) return `${this.name} is recovering`;
    if (!status.problems.length) return `${this.name} is complete up to ${formatId(this.stream.linear)}`;
    return status.problems.map((problem) => describeProblem(problem, now)).join("; ");
  }

  #drawDetails() {
    const { details } = this.#parts;
    if (!this.open || this.stream === null) return;
    if (this.stream.linear === null) {
      details.replaceChildren(createElement("p", "problem", "Neither Redis nor Postgres knows its positions."));
      return;
    }
    details.querySelector(":scope > .problem")?.remove();
    const scale = new Scale(this.stream, this.status.allocated, this.#rate);
    const problems = getOrCreateChild(details, "ul", "problems");
    resizeList(problems, this.status.problems.length, createProblem);
    this.status.problems.forEach((problem, index) => updateProblem(problems.children[index], problem, this.#now));
    const lanes = getOrCreateChild(details, "ul", "lanes");
    lanes.ariaLabel = `Writers of ${this.name}`;
    resizeList(lanes, this.stream.writers.length, createLane);
    this.stream.writers.forEach((writer, index) => updateLane(lanes.children[index], writer, scale));
    const ends = getOrCreateChild(details, "p", "ends");
    setText(getOrCreateChild(ends, "span", "first"), `from ${formatId(scale.first)}`);
    setText(getOrCreateChild(ends, "span", "allocated"), `allocated to ${formatId(this.status.allocated)}`);
    const { history, readers } = this.#history.get(this.name);
    if (readers?.length) this.#drawReaders(details, readers, scale);
    else details.querySelector(":scope > .readers-section")?.remove();
    if (history !== null) this.#drawHistorySection(details, history);
  }

  #drawReaders(details, readers, scale) {
    const section = getOrCreateChild(details, "section", "readers-section");
    const historySection = details.querySelector(":scope > .history-section");
    if (historySection?.nextElementSibling === section) details.insertBefore(section, historySection); // the readers come first
    setText(getOrCreateChild(section, "h3", "title"), "Readers");
    const lanes = getOrCreateChild(section, "ul", "readers");
    lanes.ariaLabel = `Readers of ${this.name}`;
    resizeList(lanes, readers.length, createTrack);
    readers.forEach((reader, index) => updateReaderTrack(lanes.children[index], reader, scale));
  }

  #drawHistorySection(details, history) {
    const section = getOrCreateChild(details, "section", "history-section");
    setText(getOrCreateChild(section, "h3", "title"), "The past hour");
    const hour = getOrCreateChild(section, "div", "hour");
    setText(getOrCreateChild(hour, "span", "writer"), "lag");
    drawChart(hour.querySelector("svg") ?? hour.appendChild(createChart("lag")), history.lag_seconds);
    setText(getOrCreateChild(hour, "span", "largest"), describeLag(history.lag_seconds).replace("Lag in the past hour: a", "a"));
    const seconds = history.step_seconds * history.lag_seconds.length;
    const since = Date.parse(history.since) / 1000;
    const lanes = getOrCreateChild(section, "ul", "tracks");
    lanes.ariaLabel = `Writers of ${this.name} in the past hour`;
    resizeList(lanes, history.writers.length, createTrack);
    history.writers.forEach((writer, index) => updateWriterTrack(lanes.children[index], writer, since, seconds));
    const ends = getOrCreateChild(section, "p", "ends");
    setText(getOrCreateChild(ends, "span", "first"), "an hour ago");
    setText(getOrCreateChild(ends, "span", "allocated"), "now");
  }

  #setText(part, text) {
    if (this.#texts[part] === text) return;
    this.#texts[part] = text;
    this.#parts[part].textContent = text;
  }
}

function createProblem() {
  const item = createElement("li", "problem");
  item.append(createElement("strong"), createElement("span", "explanation"), createElement("span", "advice"), createElement("code", "command"));
  return item;
}

function updateProblem(item, problem, now) {
  const [description, explanation, advice, command] = item.children;
  setText(description, describeProblem(problem, now));
  setText(explanation, problem.explanation);
  setText(advice, problem.advice);
  setText(command, problem.command ?? "");
}

function createLane() {
  const item = createElement("li", "lane");
  const strip = createElement("div", "strip");
  strip.setAttribute("role", "img");
  item.append(createElement("span", "writer"), strip, createElement("span", "position"));
  return item;
}

function updateLane(item, writer, scale) {
  const [name, strip, position] = item.children;
  setText(name, writer.writer);
  name.title = writer.epoch === null ? writer.writer : `${writer.writer}, epoch ${writer.epoch}`;
  setText(position, formatId(writer.position));
  item.classList.toggle("retired", writer.retired === true);
  strip.ariaLabel = `${writer.writer} at ${formatId(writer.position)}${writer.retired ? ", retired" : ""}`;
  paint(strip, writerParts(writer, scale));
}

function createTrack() {
  const item = createElement("li", "track");
  const strip = createElement("div", "strip");
  strip.setAttribute("role", "img");
  item.append(createElement("span", "writer"), strip, createElement("span", "position"), createElement("span", "remark"));
  return item;
}

function updateReaderTrack(item, reader, scale) {
  const [name, strip, position, remark] = item.children;
  setText(name, reader.reader);
  name.title = reader.token === null ? reader.reader : `${reader.reader} at ${reader.token}`;
  setText(position, reader.linear === null ? "–" : formatId(reader.linear));
  setText(remark, readerRemark(reader));
  item.dataset.state = reader.state;
  strip.ariaLabel = `${reader.reader} ${reader.linear === null ? "has not begun" : `has read up to ${formatId(reader.linear)}`}`;
  paint(strip, readerParts(reader, scale));
}

// The state and lag of a reader, and its counts that are not 0.
function readerRemark(reader) {
  const copies = reader.copies ? pluralize(reader.copies, "copy", "copies") : "";
  const lag = reader.lag_ids && reader.lag_seconds !== null ? `for ${formatDuration(reader.lag_seconds)}` : "";
  const parked = reader.parked ? `${formatCount(reader.parked)} parked` : "";
  const late = reader.late ? `${formatCount(reader.late)} late` : "";
  return [[reader.state, lag].filter(Boolean).join(" "), copies, parked, late].filter(Boolean).join(", ");
}

// The track of a writer in the past hour.
function updateWriterTrack(item, writer, since, seconds) {
  const [name, strip, position, remark] = item.children;
  const ids = writer.moved.reduce((sum, step) => sum + Number(step), 0);
  setText(name, writer.writer);
  name.title = writer.writer;
  setText(position, `+${formatCount(ids)}`);
  setText(remark, writer.gaps.length ? pluralize(writer.gaps.length, "gap") : "");
  strip.ariaLabel = `${writer.writer} moved by ${formatCount(ids)} IDs in the past hour, ${pluralize(writer.gaps.length, "gap")}`;
  paint(strip, [...moveParts(writer.moved), ...gapParts(writer, since, seconds)]);
}

// A number with its label, as a pair in a description list.
function createFigure(label) {
  const pair = createElement("div");
  const value = createElement("dd");
  pair.append(createElement("dt", "", label), value);
  return { pair, value };
}

// The child of `parent` with this CSS class. Creates the child if it does not exist.
function getOrCreateChild(parent, tag, cssClass) {
  return parent.querySelector(`:scope > .${cssClass}`) ?? parent.appendChild(createElement(tag, cssClass));
}

function resizeList(list, length, createItem) {
  while (list.children.length > length) list.lastElementChild.remove();
  while (list.children.length < length) list.append(createItem());
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function mapValues(object, change) {
  return Object.fromEntries(Object.entries(object).map(([name, value]) => [name, change(value)]));
}

export function createElement(tag, cssClass = "", text = "") {
  const element = document.createElement(tag);
  if (cssClass) element.className = cssClass;
  if (text) element.textContent = text;
  return element;
}
