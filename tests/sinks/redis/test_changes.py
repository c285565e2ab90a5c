"""What a batch asks to be written to Redis."""

from tests.sinks.given import NOW, advance, batch, stream
from tidemark.sinks.port import CommitResult
from tidemark.sinks.redis.publish import AdvanceEntry, changes_of_batch
from tidemark.streaming.core.effects import WriterRow


def test_a_position_to_which_an_entry_leads_is_told_once() -> None:
    """Beside the entries stand the positions of other writers, and those that are not where their entry leads."""
    rows = [WriterRow(name, 1, id, is_retired=False) for name, id in (("a", 5), ("b", 9), ("c", 7))]
    (change,) = changes_of_batch(
        batch(3, stream("s", advance("a", 0, 5), advance("b", 0, 7), writers=rows)), CommitResult()
    )
    assert [(it.writer, it.id) for it in change.entries] == [("a", "5"), ("b", "7")]
    assert change.positions == [("b", "9"), ("c", "7")]


def test_entry_tells_its_advance_as_postgres_settled_it() -> None:
    """An advance that was cut is told so; where nothing of it was open, only the position that stands."""
    cut = advance("a", 3, 5, facts=1, empty=1)
    settled = {("s", "a"): cut, ("s", "b"): None}
    moved = stream("s", advance("a", 0, 5), advance("b", 0, 7), linear=4)
    (change,) = changes_of_batch(
        batch(3, moved), CommitResult(corrected_advances=settled, higher_positions={("s", "b"): 8})
    )
    assert change.entries == [AdvanceEntry("a", "1", "3", "5", "1", "1", "0", "0", "4", "3", str(NOW))]
    assert change.positions == [("b", "8")]


def test_stream_that_shows_nothing_new_is_left_out() -> None:
    """One that only held or counted something."""
    assert changes_of_batch(batch(3, stream("s", linear_prev=0, linear=0, counts={"held": 3})), CommitResult()) == []
