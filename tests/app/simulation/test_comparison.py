"""What a reader was handed held against the facts, where the database has gone back and where it has not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tidemark.app.simulation.streams import Comparison, DeliveredRow, FactRow, ReaderPosition


def facts(*ids: int, of: str = "") -> list[FactRow]:
    """`of` tells the histories of the database apart."""
    return [FactRow(id, "w", f"{of}{id}") for id in ids]


def delivered(*ids: int, of: str = "", late: bool = False) -> list[DeliveredRow]:
    return [DeliveredRow(id, "w", f"{of}{id}", late) for id in ids]


def compared(
    rows: Sequence[FactRow],
    read: Sequence[DeliveredRow],
    snapshot: int,
    back: int | None = None,
    *,
    final: bool = False,
) -> Comparison:
    return Comparison("linear", rows, read, ReaderPosition(snapshot, {}), back, final)


def test_an_id_that_was_given_out_again_is_another_fact() -> None:
    """3 and 4 were read and lost; what has their IDs now came late, and is counted for itself."""
    now = facts(1, 2) + facts(3, 4, of="new")
    read = delivered(1, 2, 3, 4) + delivered(3, 4, of="new", late=True)
    count = compared(now, read, 4, back=2).count()
    assert count.is_complete
    assert (count.written, count.read, count.late, count.lost, count.received_again) == (4, 4, 2, 2, 0)


def test_what_may_still_come_late_is_missed_in_the_end_only() -> None:
    """Where the database went back, and nowhere else: a fact at or below that ID was there all the time."""
    now = facts(1, 2) + facts(3, of="new")
    meanwhile = compared(now, delivered(1, 2, 3), 3, back=2)
    assert meanwhile.count().missed == 0
    assert replace(meanwhile, is_final=True).count().missed == 1
    assert compared(facts(1, 2), delivered(1), 2, back=2).count().missed == 1
    assert compared(facts(1, 2), delivered(1), 2).count().missed == 1


def test_late_news_of_what_was_read_meanwhile_comes_again() -> None:
    """docs/how-to/read-facts.md allows repeats after a database went back, beyond that ID, once; others are
    duplicated."""
    twice = delivered(3, of="new") + delivered(3, of="new", late=True)
    now = facts(3, of="new")
    assert compared(now, twice, 3, back=2).count().received_again == 1
    assert compared(now, twice, 3, back=2).count().is_correct
    assert compared(now, twice, 3).count().duplicated == 1
    assert compared(now, twice, 3, back=3).count().duplicated == 1
    assert compared(now, [*twice, *delivered(3, of="new", late=True)], 3, back=2).count().duplicated == 1
    assert compared(now, [*twice, *delivered(3, of="new")], 3, back=2).count().duplicated == 1


def test_what_is_told_again_comes_late_each_time() -> None:
    """A database that went back twice tells what it had not settled twice, and no more often."""
    read = delivered(3) + delivered(3, 3, late=True)
    assert compared(facts(3), read, 3, back=2).count().duplicated == 1
    assert replace(compared(facts(3), read, 3, back=2), restore_count=2).count().received_again == 1
    assert (
        replace(compared(facts(3), [*read, *delivered(3, late=True)], 3, back=2), restore_count=2).count().duplicated
        == 1
    )


@pytest.mark.parametrize(("back", "duplicated", "lost"), [(None, 1, 0), (2, 0, 1)])
def test_a_row_that_nobody_wrote_is_lost_only_where_something_was(back: int | None, duplicated: int, lost: int) -> None:
    """A reader that makes rows up is told from a database that lost them."""
    count = compared(facts(1), delivered(1, 3), 3, back).count()
    assert (count.duplicated, count.lost) == (duplicated, lost)


def test_late_rows_have_no_order() -> None:
    """They come below what was read; the others still go by their IDs."""
    now = facts(1, 2, 3)
    assert compared(now, delivered(3) + delivered(1, late=True), 3).count().disordered == 0
    assert compared(now, delivered(3, 2), 3).count().disordered == 1
