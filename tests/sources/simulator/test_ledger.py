"""What outlives a play, on a real disk."""

from pathlib import Path

import pytest

from sources.simulator.cast import StreamMark, WriterMark
from sources.simulator.ledger import AHEAD, LedgerInUse, LedgerUnreadable, opened


def marks(last: int, epoch: int = 1) -> dict[str, StreamMark]:
    return {"events": StreamMark(last, {"writer-1": WriterMark(epoch, retired=False)})}


def test_a_killed_play_gives_no_id_twice(tmp_path: Path) -> None:
    """What was covered before the kill lies at or below where the next play begins."""
    path = tmp_path / "new" / "ledger.json"
    with opened(path) as ledger:
        assert ledger.past() == {}
        ledger.cover(marks(17))
        ledger.cover(marks(17 + AHEAD))
    with opened(path) as ledger:
        assert ledger.past() == marks(17 + AHEAD)


def test_it_is_written_only_where_it_does_not_cover_yet(tmp_path: Path) -> None:
    """IDs kept in advance cost no write; one beyond them, or a new epoch, does."""
    path = tmp_path / "ledger.json"
    with opened(path) as ledger:
        ledger.cover(marks(1))
        written = path.stat().st_mtime_ns
        ledger.cover(marks(AHEAD))
        assert path.stat().st_mtime_ns == written
        ledger.cover(marks(2, epoch=2))
    with opened(path) as ledger:
        assert ledger.past() == marks(2 + AHEAD, epoch=2)


def test_a_play_that_ended_in_peace_leaves_no_ids_out(tmp_path: Path) -> None:
    """The next one begins just behind it."""
    path = tmp_path / "ledger.json"
    with opened(path) as ledger:
        ledger.cover(marks(17))
        ledger.close(marks(21))
    with opened(path) as ledger:
        assert ledger.past() == marks(21)


def test_two_plays_never_share_a_ledger(tmp_path: Path) -> None:
    """The second is told what to do; when the first has ended it may begin."""
    path = tmp_path / "ledger.json"
    with opened(path), pytest.raises(LedgerInUse, match="--prefix"), opened(path):
        pass
    with opened(path):
        pass


def test_a_damaged_ledger_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """Beginning anew would give IDs twice."""
    path = tmp_path / "ledger.json"
    path.write_text("{")
    with pytest.raises(LedgerUnreadable, match=str(path)), opened(path):
        pass
