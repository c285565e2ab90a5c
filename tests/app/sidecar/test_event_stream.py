"""What clients of events are told, made without a server."""

import asyncio

from tidemark.app.read_side.replay import PAGE_EVENTS, MissedMoves, SingleFlight
from tidemark.app.sidecar.event_stream import encode_missed_moves
from tidemark.sinks.postgres.history import StreamChange
from tidemark.sinks.reader.events import Advance, Place
from tidemark.streaming.values.limits import Evidence

MANY = 3 * PAGE_EVENTS + 1


def missed() -> MissedMoves:
    found = [Advance("w", 1, id - 1, id, Evidence(facts=1), id - 1, id, id, 0) for id in range(1, MANY + 1)]
    return MissedMoves({"s": found}, {"s": StreamChange(MANY, MANY, 0, {"w": MANY})})


def test_very_many_missed_moves_keep_nobody_waiting() -> None:
    """Others have their turn after each page, no text is longer than one, and the moves are let go when they are told;
    who is told half of them and goes takes nothing from those who come then."""

    async def tell() -> None:
        here, turns = missed(), 0
        half = SingleFlight(encode_missed_moves(here, "s", Place()))
        gone = asyncio.create_task(half.get())
        for _ in range(3):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        assert half.is_abandoned
        telling = asyncio.create_task(encode_missed_moves(here, "s", Place()))
        while not telling.done():
            turns += 1
            await asyncio.sleep(0)
        texts, place = telling.result()
        assert turns > 4
        assert [text.count(b"event: advance") for text in texts] == [PAGE_EVENTS, PAGE_EVENTS, PAGE_EVENTS, 1, 0]
        assert texts[-1].startswith(b"event: linear")
        assert place == Place(0, {"w": MANY})
        assert not here.events["s"]

    asyncio.run(tell())
