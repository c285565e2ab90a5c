"""The operations for people who watch: all streams with their writers as they change, and how the pipeline is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

from starlette.responses import Response

from tidemark.app.sidecar.operation import Operation, OperationCall, json
from tidemark.app.sidecar.problems import Busy, Unauthorized
from tidemark.app.sidecar.sse import MEDIA_TYPE, EventStream
from tidemark.app.sidecar.watch import Watch, Watcher
from tidemark.app.sidecar.watched import PipelineAnswer, Watched

STALLED = 30.0  # seconds that one text may take to be sent


async def watch(call: OperationCall) -> Response:
    with ExitStack() as stack:
        stack.enter_context(call.service.held.one("watch"))
        watcher = stack.enter_context(call.service.watch.watching())
        held = stack.pop_all()
    cut_off = asyncio.Event()
    return EventStream(_told(call.service.watch, watcher, cut_off), cut_off, held)


async def _told(watch: Watch, watcher: Watcher, cut_off: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        text = await watch.news(watcher)
        stalled = asyncio.get_running_loop().call_later(STALLED, cut_off.set)
        yield text
        stalled.cancel()


async def pipeline(call: OperationCall) -> Response:
    return json(await call.service.watch.pipeline())


OPERATIONS = [
    Operation(
        "/v1/watch",
        "watch",
        "Server-sent events for people: `stream` for each stream and then for each that changed, at most once a second,"
        " and `pipeline`.",
        watch,
        Watched | PipelineAnswer,
        media=MEDIA_TYPE,
        problems=(Unauthorized, Busy),
    ),
    Operation(
        "/v1/pipeline",
        "pipeline",
        "Who computes positions, how long ago it last did, and what it rejected.",
        pipeline,
        PipelineAnswer,
        problems=(Unauthorized,),
    ),
]
