"""When the linear position's range is known to hold nothing, and when that may only seem so."""

from collections.abc import Iterator

from tidemark.sinks.reader.events import Advance, LinearMove, Reread
from tidemark.sinks.reader.follow import LinearEvidence
from tidemark.streaming.values.limits import Evidence


def moved(writer: str, prev: int, id: int, facts: int = 0) -> Advance:
    return Advance(writer, 1, prev, id, Evidence(facts=facts, empty=id - prev - facts), prev, 0, 1, 1)


def watching(linear: int = 5) -> LinearEvidence:
    """From the beginning of two writers' lives."""
    lines = LinearEvidence(linear)
    assert [*lines.move(linear, {"a": linear, "b": linear})] == []
    return lines


def only(moves: Iterator[LinearMove]) -> LinearMove:
    (line,) = moves
    return line


def test_range_that_all_writers_proved_empty_is_known() -> None:
    """Two announcements over the same IDs are all that there is."""
    lines = watching()
    first, second, third = moved("a", 5, 8), moved("b", 5, 9), moved("a", 8, 9)
    lines.add_event(first)
    lines.add_event(second)
    assert [*lines.move(8, {"a": 8, "b": 9})] == [LinearMove(5, 8, (first, second), known=True)]
    lines.add_event(third)
    line = only(lines.move(9, {"a": 9, "b": 9}))
    assert line == LinearMove(8, 9, (second, third), known=True)
    assert line.proven_empty


def test_line_ahead_of_a_writer_proves_nothing() -> None:
    """The line may pass a fact that still waits above its own writer's gap."""
    lines = watching()
    fact = moved("b", 5, 6, facts=1)
    lines.add_event(fact)
    assert [*lines.move(6, {"a": 5, "b": 6})] == [LinearMove(5, 6, (fact,), known=False)]
    assert [*lines.move(7, {"a": 5, "b": 6})] == [LinearMove(6, 7, (), known=False)]


def test_what_stood_before_we_watched_proves_nothing() -> None:
    """A writer that was at 8 when we began to watch came there by advances that we were not told."""
    lines = LinearEvidence(5)
    assert [*lines.move(5, {"a": 5, "b": 8})] == []
    lines.add_event(moved("a", 5, 9))
    lines.add_event(moved("b", 8, 9))
    assert not only(lines.move(7, {"a": 9, "b": 9})).known
    assert not only(lines.move(8, {"a": 9, "b": 9})).known
    assert only(lines.move(9, {"a": 9, "b": 9})).known


def test_doubt_lasts_until_the_line_has_passed_it() -> None:
    """After a list was lost, nothing is known up to where the writers stood when it was there again."""
    lines = watching()
    lines.mark_uncertain()
    lines.add_event(moved("a", 5, 8))
    lines.add_event(moved("b", 5, 8))
    assert not only(lines.move(7, {"a": 8, "b": 8})).known
    assert not only(lines.move(8, {"a": 8, "b": 8})).known
    lines.add_event(moved("a", 8, 9))
    lines.add_event(moved("b", 8, 9))
    assert only(lines.move(9, {"a": 9, "b": 9})).known


def test_lost_evidence_proves_nothing() -> None:
    """One writer's range that is to be read again makes the line's range one that is to be read."""
    lines = watching()
    lines.add_event(moved("a", 5, 8))
    lines.add_event(Reread("b", 5, 8))
    assert not only(lines.move(8, {"a": 8, "b": 8})).known
