// The live page: joins the connection, the list of streams and the headline.

import { Board } from "./board.js";
import { Feed } from "./feed.js";
import { figures, listed, note, notices, overrides, summary } from "./headline.js";
import { seconds } from "./verdict.js";

const TOKEN = "tidemark.token";
const part = (id) => document.getElementById(id);

const board = new Board({
  list: part("streams"), filter: part("filter"), only: part("only"), shown: part("shown"), sort: part("sort"),
  nothing: part("nothing"), spoken: part("spoken"),
}, () => sessionStorage.getItem(TOKEN));
let pipeline = null;
let lost = null;
let skew = 0; // seconds that the sidecar's clock is ahead of ours
const now = () => Date.now() / 1000 + skew;

const feed = new Feed(
  {
    connected() {
      part("guard").hidden = true;
      board.resume();
    },
    stream: (stream) => board.take(stream),
    pipeline(said) {
      pipeline = said;
      skew = seconds(said.time) - Date.now() / 1000;
      lost = null;
      draw();
    },
    lost(reason) {
      lost = { reason, since: lost?.since ?? now() };
      draw();
    },
    refused() {
      const again = sessionStorage.getItem(TOKEN) !== null;
      sessionStorage.removeItem(TOKEN);
      show({ mood: "asking", headline: again ? "That token is not taken" : "A token is needed", subline: "\u00a0" });
      part("board").hidden = true;
      part("guard").hidden = false;
      part("token").focus();
    },
  },
  () => sessionStorage.getItem(TOKEN),
);

part("guard").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, part("token").value.trim());
  part("token").value = "";
  feed.open();
});

// With each word of the sidecar, which comes about once a second; without a connection only the age is counted on.
function draw() {
  if (pipeline === null) {
    if (lost) show(summary({ streams: 0 }, null, lost, now()));
    return;
  }
  const sum = board.draw(lost?.since ?? now(), lost !== null);
  part("board").hidden = false;
  show(summary(sum, pipeline, lost, now()));
  for (const [id, said] of Object.entries(figures(sum, pipeline))) write(part(id), said);
  listed(part("notices"), lost ? [] : notices(sum, pipeline, now()));
  const done = overrides(pipeline, lost?.since ?? now());
  part("audit").hidden = !done.length;
  listed(part("overrides"), done);
}

function show({ mood, headline, subline }) {
  document.querySelector(".top").dataset.mood = mood;
  write(part("headline"), headline);
  write(part("subline"), subline);
  const title = `${headline} · Tidemark`;
  if (document.title !== title) document.title = title;
}

function write(element, said) {
  if (element.textContent !== said) element.textContent = said;
}

setInterval(() => lost && draw(), 1000);
note(part("note"));
feed.open();
