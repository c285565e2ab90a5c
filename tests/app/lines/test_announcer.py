"""What a speaker says to those who heard another one before it."""

from hypothesis import given
from hypothesis import strategies as st

from tidemark.app.lines.rows import AnnouncedPositions, Announcement
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand

W = ("s", "w")


def moved(prev: int, id: int) -> Announcement:
    return Announcement("s", "w", prev, id, "rows", [RdataCommand("s", "w", id, "{}")])


def test_what_joins_is_said_as_it_is() -> None:
    """Who was told up to `prev` is told the rows."""
    announced = AnnouncedPositions({W: 3})
    assert announced.announce(moved(3, 5)) == [RdataCommand("s", "w", 5, "{}")]
    assert announced.announce(moved(5, 6)) == [RdataCommand("s", "w", 6, "{}")]


def test_successor_that_stands_before_the_dead_one_says_nothing_twice() -> None:
    """It repeats where writers were told to stand, skips what was said, and makes clients fetch across the seam."""
    announced = AnnouncedPositions({W: 5})
    assert announced.reannounce([PositionCommand("s", "w", 3, 3)]) == [PositionCommand("s", "w", 5, 5)]
    assert announced.announce(moved(3, 4)) == ()
    assert announced.announce(moved(4, 6)) == (PositionCommand("s", "w", 6, 6),)


def test_successor_that_stands_beyond_the_dead_one_makes_clients_fetch() -> None:
    """Whoever heard the dead one is below the first POSITION."""
    announced = AnnouncedPositions({W: 5})
    assert announced.reannounce([PositionCommand("s", "w", 9, 9), PositionCommand("s", "v", 1, 1)]) == [
        PositionCommand("s", "w", 9, 9),
        PositionCommand("s", "v", 1, 1),
    ]


@given(st.integers(0, 20), st.integers(0, 20), st.lists(st.integers(1, 5)))
def test_nobody_misses_anything_and_positions_never_go_back(dead: int, position: int, steps: list[int]) -> None:
    """Wherever both sidecars stood: a client that follows the rules has fetched or heard every ID, in order."""
    announced = AnnouncedPositions({W: dead})
    client, has = dead, set(range(1, dead + 1))
    said: list[PositionCommand | RdataCommand] = [
        *announced.reannounce([PositionCommand("s", "w", position, position)])
    ]
    for step in steps:
        said.extend(announced.announce(moved(position, position + step)))
        position += step
    for command in said:
        assert command.id is not None
        assert command.id >= client
        if isinstance(command, RdataCommand):
            has |= set(range(client + 1, command.id + 1))  # the rows of one announcement
        elif client < command.prev:
            has |= set(range(client + 1, command.id + 1))  # fetched
        client = command.id
    assert has == set(range(1, max(dead, position) + 1))
