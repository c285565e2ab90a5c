// The live page: connects the feed with the list of streams and the headline.

import { Board } from "./board.js";
import { Feed } from "./feed.js";
import { figures, loadBanner, notices, overrides, summary, updateList } from "./headline.js";
import { toSeconds } from "./status.js";

const TOKEN_KEY = "tidemark.token"; // in the session storage
const byId = (id) => document.getElementById(id);

const board = new Board({
  list: byId("streams"), filter: byId("filter"), blockedOnly: byId("only"), matchCount: byId("shown"), sortButton: byId("sort"),
  emptyMessage: byId("nothing"), liveRegion: byId("spoken"),
}, () => sessionStorage.getItem(TOKEN_KEY));
let pipeline = null;
let loss = null; // {reason, since} while there is no connection
let clockOffset = 0; // seconds by which the clock of the sidecar is ahead of the clock of this browser
const now = () => Date.now() / 1000 + clockOffset;

const feed = new Feed(
  {
    onConnected() {
      byId("token-form").hidden = true;
      board.startConnection();
    },
    onStream: (stream) => board.update(stream),
    onPipeline(answer) {
      pipeline = answer;
      clockOffset = toSeconds(answer.time) - Date.now() / 1000;
      loss = null;
      draw();
    },
    onDisconnected(reason) {
      loss = { reason, since: loss?.since ?? now() };
      draw();
    },
    onTokenRefused() {
      const hadToken = sessionStorage.getItem(TOKEN_KEY) !== null;
      sessionStorage.removeItem(TOKEN_KEY);
      show({ status: "loading", headline: hadToken ? "The token is not valid" : "A token is needed", subline: "\u00a0" });
      byId("board").hidden = true;
      byId("token-form").hidden = false;
      byId("token").focus();
    },
  },
  () => sessionStorage.getItem(TOKEN_KEY),
);

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, byId("token").value.trim());
  byId("token").value = "";
  feed.open();
});

// Called with each `pipeline` event, about once a second. Without a connection, only the age of the data changes.
function draw() {
  if (pipeline === null) {
    if (loss) show(summary({ streams: 0 }, null, loss, now()));
    return;
  }
  const totals = board.draw(loss?.since ?? now(), loss !== null);
  byId("board").hidden = false;
  show(summary(totals, pipeline, loss, now()));
  for (const [id, text] of Object.entries(figures(totals, pipeline))) setText(byId(id), text);
  updateList(byId("notices"), loss ? [] : notices(totals, pipeline, now()));
  const entries = overrides(pipeline, loss?.since ?? now());
  byId("audit").hidden = !entries.length;
  updateList(byId("overrides"), entries);
}

function show({ status, headline, subline }) {
  document.querySelector(".top").dataset.status = status;
  setText(byId("headline"), headline);
  setText(byId("subline"), subline);
  const title = `${headline} · Tidemark`;
  if (document.title !== title) document.title = title;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

setInterval(() => loss && draw(), 1000);
loadBanner(byId("note"));
feed.open();
