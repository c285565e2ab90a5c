"""One reading for those who stand at nearly the same place."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidemark.app.read_side.replay import (
    BYTES_PER_POSITION,
    CACHE_SECONDS,
    MAX_CACHE_BYTES,
    MAX_MOVES,
    ReplayReader,
    ResponseCache,
    lowest_place,
)
from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader.events import MissingLateCompletions, Place
from tidemark.sinks.reader.history import MissedChanges

NAMES = ("a", "b", "c")


@st.composite
def places(draw: st.DrawFn) -> list[Place]:
    sign = draw(st.sampled_from((1, -1)))
    ids = st.integers(0, 9).map(lambda id: sign * id)
    one = st.builds(Place, ids, st.dictionaries(st.sampled_from(NAMES), ids), st.integers(0, 3))
    return draw(st.lists(one, min_size=1, max_size=5))


@given(places())
def test_lowest_place_is_behind_all_of_them(given: list[Place]) -> None:
    """Whoever stands at one of them has nothing to read before it, of any writer, known or not; and no place is
    farther that is behind all."""
    found = lowest_place(given)
    for name in (*NAMES, "unknown"):
        stands = [abs(it.positions.get(name, it.linear)) for it in given]
        assert abs(found.positions.get(name, found.linear)) == min(stands)
    assert found.late == min(it.late for it in given)


def test_texts_that_are_asked_for_are_kept_longest() -> None:
    """Within a bound of bytes; and no longer than what they say may have been for want of Postgres."""
    clock = [0.0]
    texts = ResponseCache(lambda: clock[0])
    third = b"x" * (MAX_CACHE_BYTES // 3 - BYTES_PER_POSITION)
    for id in range(3):
        texts.store("s", Place(id), third, Place(id + 1))
    assert texts.get("s", Place(0)) == (third, Place(1))
    texts.store("s", Place(3), third, Place(4))
    assert texts.get("s", Place(1)) is None
    assert texts.get("s", Place(0, {"w": 1})) is None
    assert texts.get("t", Place(0)) is None
    assert all(texts.get("s", Place(id)) for id in (0, 2, 3))
    clock[0] = CACHE_SECONDS + 1
    texts.store("s", Place(0), third, Place(9))
    assert texts.get("s", Place(0)) == (third, Place(9))
    assert texts.get("s", Place(2)) is None
    for long in (Place(4, dict.fromkeys(map(str, range(MAX_CACHE_BYTES // BYTES_PER_POSITION + 1)), 5)), Place(5)):
        texts.store("s", long, b"x", Place(9))
        assert (texts.get("s", long) is None) == bool(long.positions)


def test_text_that_led_nowhere_is_not_kept() -> None:
    """Of a page that was read for others, who stand farther back: whoever goes on from memory would stay there."""
    texts = ResponseCache()
    texts.store("s", Place(5, {"w": 6}), b"", Place(5, {"w": 6}))
    assert texts.get("s", Place(5, {"w": 6})) is None


class AllThatMayBe:
    """Postgres, with as many moves as are told after any mark."""

    async def missed_changes(self, since: DurableMark, max_moves: int) -> MissedChanges:
        return MissedChanges({"s": [MissingLateCompletions(1, 2)] * max_moves}, {})  # type: ignore[list-item]


def test_what_is_held_for_slow_clients_is_bounded() -> None:
    """Where clients that have not read it hold so much already, the next one begins with snapshots; and when they
    have, it is told its moves."""

    async def tell() -> None:
        nobody: Any = None
        postgres_reader: Any = AllThatMayBe()
        replay_reader = ReplayReader(nobody, postgres_reader)
        held = [await replay_reader.read_missed_since(DurableMark(lease, 0)) for lease in range(4)]
        assert [missed and missed.move_count for missed in held] == [MAX_MOVES, MAX_MOVES, None, None]
        held.clear()
        assert await replay_reader.read_missed_since(DurableMark(9, 0))

    asyncio.run(tell())
