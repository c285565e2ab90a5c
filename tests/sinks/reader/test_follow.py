"""`follow` on real servers: lists that are lost, cut and begun anew, writers that come and go, late completions."""

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline, later, taken
from tidemark.app.stack.processes import RedisServer
from tidemark.sinks.reader import (
    Advance,
    AsyncPositions,
    Event,
    Late,
    LinearMove,
    MissingLateCompletions,
    Place,
    Positions,
    Reread,
    Token,
)
from tidemark.sinks.redis.client import key
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.streaming.core.effects import LateCompletion as LateEffect


def ranges(events: list[Event], writer: str = "w") -> list[tuple[int, int]]:
    return [(it.prev, it.id) for it in events if isinstance(it, Advance | Reread) and it.writer == writer]


@pytest.fixture
def informed(redis_url: str, dsn: str) -> Iterator[Positions]:
    """With Tidemark's Postgres to turn to."""
    with Positions(redis_url, dsn) as positions:
        yield positions


def test_advances_come_with_their_evidence(pipeline: Pipeline, informed: Positions) -> None:
    """From the beginning: every advance in order, with what Postgres counted of it."""
    pipeline.move("w", 0, 3)
    pipeline.move("w", 3, 7, empty=3, unseen=1)
    first, second = taken(informed.follow("s", since="m0"), 2)
    assert isinstance(first, Advance)
    assert isinstance(second, Advance)
    assert (first.prev, first.id, first.evidence.facts) == (0, 3, 3)
    assert (second.prev, second.id, second.linear, second.batch, second.epoch) == (3, 7, 7, 2, 1)
    assert (second.evidence.empty, second.evidence.unseen, second.proven_empty) == (3, 1, False)


def test_follower_begins_with_what_comes(pipeline: Pipeline, positions: Positions) -> None:
    """Without `since`, what was published before the first look is not handed over."""
    pipeline.move("w", 0, 3)
    follow = positions.follow("s")
    with later(0.5, lambda: pipeline.move("w", 3, 5)):
        assert ranges(taken(follow, 1)) == [(3, 5)]


def test_token_in_the_middle_of_an_advance_cuts_it(pipeline: Pipeline, informed: Positions) -> None:
    """What the reader has is not handed over again; the evidence says of which range it is."""
    pipeline.move("w", 0, 3)
    pipeline.move("w", 3, 9)
    (event,) = taken(informed.follow("s", since="m5"), 1)
    assert isinstance(event, Advance)
    assert (event.prev, event.id, event.evidence_prev, event.evidence.facts) == (5, 9, 3, 6)


def test_follower_goes_on_where_another_stood(pipeline: Pipeline, informed: Positions) -> None:
    """The place is a plain value; with it nothing is handed over twice and nothing is missed."""
    for id in range(1, 6):
        pipeline.move("w", id - 1, id)
    one = informed.follow("s", since="m0")
    assert ranges(taken(one, 2)) == [(0, 1), (1, 2)]
    assert one.place == Place(0, {"w": 2}, 0)
    assert ranges(taken(informed.follow("s", since=one.place), 3)) == [(2, 3), (3, 4), (4, 5)]


def test_follower_waits_while_redis_is_recovering(pipeline: Pipeline, positions: Positions) -> None:
    """A stream that is not known yet is waited for; what it begins with is handed over to who has nothing."""
    with later(0.3, lambda: pipeline.move("w", 0, 3)):
        assert ranges(taken(positions.follow("s", since="m0"), 1)) == [(0, 3)]


def test_flushed_redis_repeats_nothing(pipeline: Pipeline, informed: Positions, keys: Any) -> None:
    """A list that was lost and filled again gives each advance once, though its entries have new names."""
    follow = informed.follow("s", since="m0")
    pipeline.move("w", 0, 3)
    assert ranges(taken(follow, 1)) == [(0, 3)]
    keys.flushall()
    pipeline.mirror.refill()
    pipeline.move("w", 3, 5)
    keys.flushall()
    pipeline.move("w", 5, 9)
    assert ranges(taken(follow, 2)) == [(3, 5), (5, 9)]


def test_list_with_older_names_is_noticed(pipeline: Pipeline, informed: Positions, keys: Any) -> None:
    """A list whose entries are named as if the clock had been set back does not leave the follower waiting."""
    follow = informed.follow("s", since="m0")
    pipeline.move("w", 0, 3)
    taken(follow, 1)
    pipeline.move("w", 3, 5)
    entries = keys.xrange(key("s", "advances"))
    keys.delete(key("s", "advances"))
    for number, (_, fields) in enumerate(entries, 1):
        keys.xadd(key("s", "advances"), fields, id=f"{number}-1")
    assert ranges(taken(follow, 1)) == [(3, 5)]


@pytest.mark.parametrize("known", [True, False])
def test_trimmed_list_is_made_good(
    pipeline: Pipeline, informed: Positions, positions: Positions, keys: Any, known: bool
) -> None:
    """What the list no longer holds comes from Postgres, or is told as a range to read again."""
    pipeline.move("w", 0, 1)
    follow = (informed if known else positions).follow("s", since="m0")
    taken(follow, 1 if known else 2)  # without Postgres, also that there may have been other writers
    for id in range(2, 7):
        pipeline.move("w", id - 1, id)
    keys.xtrim(key("s", "advances"), maxlen=2, approximate=False)
    events = taken(follow, 5 if known else 3)
    chain = ranges(events)
    assert chain[0][0] == 1
    assert chain[-1][1] == 6
    assert all(a[1] == b[0] for a, b in pairwise(chain))
    assert [it for it in events if isinstance(it, Reread)] == ([] if known else [Reread("w", 1, 4)])


def test_writer_that_came_and_went_unseen_is_told(
    pipeline: Pipeline, informed: Positions, positions: Positions, keys: Any
) -> None:
    """Postgres knows a writer that no list names any more; without Postgres the reader is told whom it may miss."""
    place = Place(0, {"w": 0})
    pipeline.publish(stream("s", advance("w", 0, 2), advance("gone", 0, 3), linear=3))
    pipeline.publish(stream("s", dropped_writers=["gone"], linear=3, linear_prev=3))
    keys.xtrim(key("s", "advances"), maxlen=0, approximate=False)
    pipeline.move("w", 2, 4)
    assert sorted(ranges(taken(informed.follow("s", since=place), 3), "gone")) == [(0, 3)]
    *_, last = taken(positions.follow("s", since=place), 3)
    assert last == Reread(None, 0, 4, frozenset({"w"}))


def test_writers_join_retire_and_come_back(pipeline: Pipeline, positions: Positions) -> None:
    """A writer that was dropped goes on where it was, also for the follower."""
    follow = positions.follow("s", since="m0")
    pipeline.publish(stream("s", advance("w", 0, 2), advance("v", 0, 3), linear=3))
    pipeline.publish(stream("s", dropped_writers=["v"], linear=3, linear_prev=3))
    pipeline.publish(stream("s", advance("v", 0, 8, empty=8, epoch=2), linear=8))
    events = taken(follow, 4)
    assert ranges(events, "v") == [(0, 3), (3, 8)]


def test_late_completions_are_handed_over_once(pipeline: Pipeline, informed: Positions, keys: Any) -> None:
    """A LATE entry comes once, whatever happens to the list, in both modes."""
    pipeline.move("w", 0, 5, skipped=5)
    followers = [informed.follow("s", mode, since=Place()) for mode in ("vector", "linear")]
    for follow in followers:
        taken(follow, 1)
    pipeline.publish(stream("s", linear=5, linear_prev=5, late=[LateEffect("w", 1, 1, 2, 1, "skipped")]))
    late = [taken(follow, 1)[0] for follow in followers]
    assert late[0] == late[1]
    assert isinstance(late[0], Late)
    assert (late[0].prev, late[0].id, late[0].facts, late[0].why) == (1, 2, 1, "skipped")
    keys.flushall()
    pipeline.mirror.refill()
    pipeline.move("w", 5, 6)
    assert [type(taken(follow, 1)[0]) for follow in followers] == [Advance, LinearMove]


def test_late_completions_of_an_absence_are_handed_over(
    pipeline: Pipeline, informed: Positions, positions: Positions, keys: Any
) -> None:
    """Who comes back with a place is told what was late meanwhile; of a trimmed list, that something was."""
    pipeline.move("w", 0, 5, skipped=5)
    place = Place(5, {"w": 5}, 0)
    pipeline.publish(stream("s", linear=5, linear_prev=5, late=[LateEffect("w", 1, 1, 2, 1, "skipped")]))
    assert [type(it) for it in taken(positions.follow("s", since=place), 1)] == [Late]
    keys.xtrim(key("s", "advances"), maxlen=0, approximate=False)
    assert [type(it) for it in taken(informed.follow("s", since=place), 1)] == [Late]
    assert [type(it) for it in taken(positions.follow("s", since=place), 1)] == [MissingLateCompletions]


def test_line_is_followed_without_a_hole(pipeline: Pipeline, positions: Positions) -> None:
    """Linear mode: moves of the line join, with what the writers' advances prove of them."""
    pipeline.publish(stream("s", advance("w", 0, 2), advance("v", 0, 3), linear=2))
    follow = positions.follow("s", "linear", since="m0")
    assert taken(follow, 1)[0].id == 2  # type: ignore[union-attr]
    pipeline.publish(stream("s", advance("w", 2, 3, empty=1), linear=3))
    (line,) = taken(follow, 1)
    assert isinstance(line, LinearMove)
    assert not line.known, "the fact 3 was published before we looked first"
    pipeline.publish(stream("s", advance("w", 3, 6, empty=3), advance("v", 3, 6, empty=3), linear=6))
    (line,) = taken(follow, 1)
    assert isinstance(line, LinearMove)
    assert (line.prev, line.id, line.known, line.proven_empty) == (3, 6, True, True)


def test_line_that_moves_alone_is_followed(pipeline: Pipeline, positions: Positions) -> None:
    """After a retirement no writer advances and no entry is written: the line is handed over all the same."""
    pipeline.move("w", 0, 5, linear=3)
    follow = positions.follow("s", "linear", since="m3")
    with later(0.5, lambda: pipeline.publish(stream("s", linear=5, linear_prev=3))):
        (line,) = taken(follow, 1)
    assert isinstance(line, LinearMove)
    assert (line.prev, line.id) == (3, 5)


def test_backward_streams_are_followed(pipeline: Pipeline, positions: Positions) -> None:
    """Negative IDs go down, in both modes."""
    for prev, id in pairwise((0, -2, -7, -9)):
        pipeline.move("w", prev, id)
    assert ranges(taken(positions.follow("s", since="m-1"), 3)) == [(-1, -2), (-2, -7), (-7, -9)]
    assert taken(positions.follow("s", "linear", since="m-7"), 1)[0].id == -9  # type: ignore[union-attr]


def test_lists_longer_than_a_page_are_followed(
    pipeline: Pipeline, positions: Positions, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list is read page by page, also where advances come meanwhile."""
    monkeypatch.setattr("tidemark.sinks.reader.redis.LIST_PAGE_ENTRIES", 3)
    for id in range(1, 11):
        pipeline.move("w", id - 1, id)
    follow = positions.follow("s", since="m0")
    assert ranges(taken(follow, 5)) == [(id - 1, id) for id in range(1, 6)]
    pipeline.move("w", 10, 11)
    assert ranges(taken(follow, 6)) == [(id - 1, id) for id in range(6, 12)]


def test_stopping_ends_the_follower(pipeline: Pipeline, positions: Positions) -> None:
    """A follower that waits ends within about a second of being told to."""
    pipeline.move("w", 0, 3)
    stopping = threading.Event()
    with later(0.3, stopping.set):
        began = time.monotonic()
        assert list(positions.follow("s", stopping=stopping)) == []
    assert time.monotonic() - began < 5


def test_cancelled_task_loses_nothing(pipeline: Pipeline, redis_url: str, dsn: str) -> None:
    """asyncio: a time-out around `anext` leaves the follower as it was."""

    async def run() -> list[Event]:
        async with AsyncPositions(redis_url, dsn) as positions:
            follow = positions.follow("s", since="m0")
            events = [await anext(follow)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(follow), 0.3)
            await asyncio.to_thread(pipeline.move, "w", 3, 5)
            return [*events, await anext(follow)]

    pipeline.move("w", 0, 3)
    assert ranges(asyncio.run(run())) == [(0, 3), (3, 5)]


@pytest.mark.parametrize("keeps", [True, False])
def test_outages_lose_nothing(
    pipeline: Pipeline, redis_url: str, dsn: str, redis_server: RedisServer, keys: Any, keeps: bool
) -> None:
    """Redis is killed again and again, with and without its data, while both forms follow both modes: no hole."""
    last = 40
    chains: dict[str, list[tuple[int, int]]] = {}

    def note(name: str, event: Event) -> bool:
        assert isinstance(event, Advance | LinearMove)
        chains.setdefault(name, []).append((event.prev, event.id))
        return event.id == last

    def in_a_thread(mode: Any) -> None:
        with Positions(redis_url, dsn) as positions:
            for event in positions.follow("s", mode, since=Token(0)):
                if note(f"thread {mode}", event):
                    return

    async def in_a_task(positions: AsyncPositions, mode: Any) -> None:
        async for event in positions.follow("s", mode, since=Token(0)):
            if note(f"task {mode}", event):
                return

    async def in_tasks() -> None:
        async with AsyncPositions(redis_url, dsn) as positions:
            await asyncio.gather(*(in_a_task(positions, mode) for mode in ("vector", "linear")))

    threads = [threading.Thread(target=in_a_thread, args=(mode,)) for mode in ("vector", "linear")]
    threads.append(threading.Thread(target=lambda: asyncio.run(in_tasks())))
    for thread in threads:
        thread.start()
    for id in range(1, last + 1):
        pipeline.move("w", id - 1, id)
        if id % 10 == 0:
            redis_server.kill()
            time.sleep(0.3)
            redis_server.start()
            if not keeps:
                keys.flushall()
                pipeline.mirror.refill()
    for thread in threads:
        thread.join(60)
    assert len(chains) == 4
    for chain in chains.values():
        assert chain[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(chain))
        assert chain[-1][1] == last


def test_list_is_bounded_while_it_is_followed(pipeline: Pipeline, redis_url: str, dsn: str, keys: Any) -> None:
    """A follower that is slower than a short list still hands over every advance, out of Postgres."""
    with Redis(RedisConfig(redis_url, redis_advances_max=1)) as short:
        pipeline.mirror = type(pipeline.mirror)(pipeline.store, short, pipeline.lease)
        pipeline.publish(stream("s", advance("w", 0, 1), linear=1))
        with Positions(redis_url, dsn) as positions:
            follow = positions.follow("s", since="m0")
            taken(follow, 1)
            for id in range(2, 301):
                pipeline.move("w", id - 1, id)
            assert keys.xlen(key("s", "advances")) < 299
            assert ranges(taken(follow, 299)) == [(id - 1, id) for id in range(2, 301)]
