"""Server-sent events: one of them as bytes, and a response of them that never ends by itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"


def block(body: msgspec.Struct, name: str | None = None) -> bytes:
    """One event, named after the struct's tag where it has no `name`."""
    return b"event: %s\ndata: %s\n\n" % ((name or str(body.__struct_config__.tag)).encode(), msgspec.json.encode(body))


class EventStream(StreamingResponse):
    """Closes `resources` when the client is gone, and leaves a client for which `cut_off` is set: sending to one that
    does not read waits for ever."""

    def __init__(self, texts: AsyncIterator[str | bytes], cut_off: asyncio.Event, resources: ExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(texts, media_type=MEDIA_TYPE, headers=headers)
        self._cut_off = cut_off
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources:
            serving = asyncio.create_task(super().__call__(scope, receive, send))
            cut = asyncio.create_task(self._cut_off.wait())
            try:
                await asyncio.wait({serving, cut}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (serving, cut):
                    task.cancel()
                await asyncio.gather(serving, cut, return_exceptions=True)
