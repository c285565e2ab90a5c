// Server-sent events out of a response that streams: EventSource cannot send the header that carries a token.

// Yields {name, data} for each event of `body`, a ReadableStream of bytes; comments are left out. `heard` is called for
// every piece that arrives, also for comments.
export async function* events(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parsed(block);
      if (event.data) yield event;
    }
  }
}

function parsed(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}
