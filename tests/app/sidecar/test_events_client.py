"""One client of events beside a follower, without sockets."""

import asyncio
from typing import Any

from tidemark.app.read_side.subscription import EventBatch, FollowerStarted, Listener
from tidemark.app.sidecar.events import MAX_CACHED_PLACES, EventsClient
from tidemark.sinks.reader.events import Advance, Place
from tidemark.streaming.values.limits import Evidence

NOBODY: Any = None  # to read from


def place(id: int) -> Place:
    return Place(id, {"w": id, "idle": 3})


async def told(stands: Place, *items: FollowerStarted | EventBatch) -> str:
    """What a client that stands there is told of what a follower gave."""
    listener = Listener()
    for item in items:
        listener.put("s", item)
    texts = EventsClient(NOBODY, NOBODY, listener, {"s": stands}, {"s": stands}, lambda: None, NOBODY).texts(["s"])
    await anext(texts)  # after how long to come back
    return (await anext(texts)).decode()


def moved(prev: int, id: int) -> EventBatch:
    return EventBatch("s", place(prev), place(id), [Advance("w", 1, prev, id, Evidence(facts=1), prev, id, 1, 0)])


def test_those_who_stand_at_one_place_leave_nothing_behind() -> None:
    """Thousands come to a stream that rests, each with a place of its own that says the same; and what moves then is
    encoded once for all of them."""
    begun, move = FollowerStarted(place(5)), moved(5, 7)

    async def crowd() -> None:
        for _ in range(10):
            text = await told(place(5), begun, move)
            assert text.count("event: advance") == text.count("event: linear") == 1

    asyncio.run(crowd())
    assert not begun.by_place
    assert not move.by_place


def test_what_is_remembered_of_places_is_bounded() -> None:
    """Each of very many clients stands where nobody else does: the follower's item does not grow with them."""
    begun = FollowerStarted(place(5))

    async def crowd() -> None:
        for _ in range(MAX_CACHED_PLACES + 2):
            assert '"prev":4,"id":5' in await told(place(4), begun)

    asyncio.run(crowd())
    assert len(begun.by_place) == 2
