"""Server-sent events: one of them as bytes, and a response of them that never ends by itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemark.app.sidecar.problems import Stops

EVENT_STREAM = "text/event-stream"


def encode_event(body: msgspec.Struct, name: str | None = None) -> bytes:
    """One event, named after the struct's tag where it has no `name`."""
    return b"event: %s\ndata: %s\n\n" % ((name or str(body.__struct_config__.tag)).encode(), msgspec.json.encode(body))


class EventStream(Response):
    """Closes `resources` when the client is gone, and leaves a client for which `cut_off` is done: sending to one that
    does not read waits for ever. Where the process stops, it ends as a whole answer does, so that nothing on the way
    takes it for a failure."""

    media_type = EVENT_STREAM

    def __init__(self, texts: AsyncIterator[bytes], cut_off: "asyncio.Future[None]", resources: ExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._texts = texts
        self._cut_off = cut_off
        self._resources = resources
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stopped: asyncio.Future[Any] = scope["app"].state.service.stopped
        with self._resources:
            serving = asyncio.create_task(self._serve(send))
            gone = asyncio.create_task(_gone(receive))
            try:
                # Two tasks of its own, and futures of others: there are thousands of such streams.
                await asyncio.wait((serving, gone, self._cut_off, stopped), return_when=asyncio.FIRST_COMPLETED)
            finally:
                serving.cancel()
                gone.cancel()
                await asyncio.gather(serving, gone, return_exceptions=True)
            if not serving.cancelled():
                serving.result()
            elif stopped.done() and not self._cut_off.done():
                await self._end(scope, receive, send)

    async def _serve(self, send: Send) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._texts:
            await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begun:
            await send({"type": "http.response.body", "body": b": this sidecar stops\n\n", "more_body": False})
        else:
            await Stops().response()(scope, receive, send)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
