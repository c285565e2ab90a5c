"""The memory of what was answered: only ever more."""

from tidemark.app.read_side.snapshots import AnsweredPositions, KnownPositions


def known(linear: int, allocated: int | None = None, late: int = 0, **vector: int) -> KnownPositions:
    return KnownPositions(linear, vector, late, allocated, "redis", 0.0)


def test_less_is_never_answered_after_more() -> None:
    """Rule 2: line, each writer's position and the allocated are the farthest that were ever said, also going down."""
    highest = AnsweredPositions()
    highest.update("s", known(7, 12, 2, first=9, second=7))
    assert highest.update("s", known(5, 10, 1, first=5, second=8)) == known(7, 12, 2, first=9, second=8)
    highest.update("down", known(-7, -9, first=-9))
    assert highest.update("down", known(-5, -5, first=-5)) == known(-7, -9, first=-9)


def test_writer_that_is_said_no_more_is_left_out_behind_the_line() -> None:
    """A retired writer leaves the answer once the line has passed it; before, the token would step back."""
    highest = AnsweredPositions()
    highest.update("s", known(7, first=9, second=7))
    assert highest.update("s", known(8, second=8)).vector == {"first": 9, "second": 8}
    assert highest.update("s", known(9, second=9)).vector == {"second": 9}


def test_unknown_head_does_not_hide_a_known_one() -> None:
    """A server that cannot tell the allocated takes nothing back."""
    highest = AnsweredPositions()
    highest.update("s", known(7, 12))
    assert highest.update("s", known(8, None)).allocated == 12


def test_nothing_is_recalled_of_what_was_never_answered() -> None:
    """No answer is not 0."""
    highest = AnsweredPositions()
    assert highest.from_memory("s") is None
    highest.update("s", known(0))
    assert highest.from_memory("s") == KnownPositions(0, {}, 0, None, "memory", 0.0)
