// Parses server-sent events of a fetch response. EventSource cannot send the header with the token.

// Yields {name, data} for each event of `body`, a ReadableStream of bytes. Comments are skipped. `onData` is called for
// every chunk that arrives, also for comments.
export async function* readEvents(body, onData) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    onData();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parseEvent(block);
      if (event.data) yield event;
    }
  }
}

function parseEvent(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}
