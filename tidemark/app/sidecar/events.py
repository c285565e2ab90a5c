"""The operations that answer with server-sent events: `/v1/events` for programs, `/v1/watch` for people.

`/v1/events`: a snapshot of each stream, then everything that moves it, in order per writer, without a hole.
`/v1/watch`: what changed of all streams since the client's last text; a slow client gets fewer and newer texts.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tidemark.app.read_side import metrics
from tidemark.app.read_side.subscription import Listener, settle
from tidemark.app.sidecar import cursor
from tidemark.app.sidecar.events_client import FEW, EventsClient
from tidemark.app.sidecar.operation import Operation, OperationCall
from tidemark.app.sidecar.operations import existing
from tidemark.app.sidecar.problems import BadRequest, Busy, RecoveringProblem, Unauthorized, UnknownStream
from tidemark.app.sidecar.sse import EVENT_STREAM, EventStream
from tidemark.app.sidecar.watch import Watch, Watcher
from tidemark.app.sidecar.watched import PipelineAnswer, WatchedStreamAnswer
from tidemark.streaming.wire.records import is_name

NAMES = 200  # streams that one request may name
STALLED = 30.0  # seconds that one text for a watcher may take to be sent


class EventsQuery(msgspec.Struct, frozen=True):
    stream: Annotated[
        list[str], Meta(description="Streams to follow; up to 200 times for several. Without it: all.")
    ] = []


async def follow_events(call: OperationCall) -> Response:
    query: EventsQuery = call.query
    if len(query.stream) > NAMES:
        raise BadRequest(f"{len(query.stream)} streams are named, and {NAMES} may be: leave them out to follow all")
    for name in query.stream:
        if not is_name(name):
            raise UnknownStream(name)
    service, read_side = call.service, call.service.read_side
    last = call.request.headers.get("last-event-id")
    stands = cursor.decode_event_id(last) if last else {}
    address = call.address
    if pause := service.churn.pause(address):
        metrics.PAUSED.inc()
        await asyncio.sleep(pause)
        if await call.request.is_disconnected():
            return Response(media_type=EVENT_STREAM)
    with ExitStack() as stack:
        listener = Listener()
        stack.enter_context(service.limiter.one("events", address, partial(settle, listener.cut_off)))
        begun = await service.beginnings.turn(address)
        stack.callback(begun)
        names = set(query.stream) or await read_side.snapshots.names()
        if query.stream and (others := sorted(it for it in names if not read_side.snapshots.has(it))):
            for snapshot in await read_side.snapshots.get(others):
                existing(snapshot)
        listener.marks = len(names) > FEW
        if not query.stream:
            read_side.feeds.to_all(listener)
        joined = stack.enter_context(read_side.feeds.listening(listener, names, stands))
        stack.callback(service.churn.ended, address, time.monotonic())
        resources = stack.pop_all()
    client = EventsClient(read_side, service.snapshot_texts, listener, stands, joined, begun)
    return EventStream(client.texts(sorted(names)), listener.cut_off, resources)


async def watch_streams(call: OperationCall) -> Response:
    with ExitStack() as stack:
        cut_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stack.enter_context(call.service.limiter.one("watch", call.address, partial(settle, cut_off)))
        watcher = stack.enter_context(call.service.watch.watching())
        resources = stack.pop_all()
    return EventStream(_changes(call.service.watch, watcher, cut_off), cut_off, resources)


async def _changes(watch: Watch, watcher: Watcher, cut_off: asyncio.Future[None]) -> AsyncIterator[bytes]:
    while True:
        text = await watch.news(watcher)
        stalled = asyncio.get_running_loop().call_later(STALLED, settle, cut_off)
        yield text
        stalled.cancel()


OPERATIONS = [
    Operation(
        "/v1/events",
        "events",
        "Server-sent events: `snapshot` of each stream, then `advance`, `linear`, `late`, `late-lost` and `reread`.",
        follow_events,
        str,
        query=EventsQuery,
        media=EVENT_STREAM,
        problems=(BadRequest, Unauthorized, UnknownStream, Busy, RecoveringProblem),
        headers=("Last-Event-ID",),
    ),
    Operation(
        "/v1/watch",
        "watch",
        "Server-sent events for people: `stream` for each stream and then for each that changed, at most once a second,"
        " and `pipeline`.",
        watch_streams,
        WatchedStreamAnswer | PipelineAnswer,
        media=EVENT_STREAM,
        problems=(Unauthorized, Busy),
    ),
]
