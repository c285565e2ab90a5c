"""The folders that queries have on a disk, one after the other. Files as Spark or somebody else would leave them."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tidemark.common.errors import CheckpointNotWritable, Stopping
from tidemark.streaming.engine.checkpoint import directory_lock, query_folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_each_query_has_a_folder_of_its_own(place: Path) -> None:
    """It is there when Spark is told of it, under a path that no other query had, and goes with the query; so does what
    a killed one left."""
    with query_folder(place) as first:
        (Path(first) / "offsets").mkdir()
    assert not Path(first).exists()
    killed = Path(first) / "commits"
    killed.mkdir(parents=True)
    with query_folder(place) as second:
        assert second != first
        assert [str(path) for path in place.iterdir()] == [second]
    assert list(place.iterdir()) == []


def test_what_is_not_certainly_ours_stays(place: Path) -> None:
    """The place may have been mistyped: of what is there only folders go that are named as ours are. A checkpoint of an
    older version stays too."""
    others = ["seed", "offsets/7", f"{'0' * 32}/metadata", "query-plans/draft", "query-2026", f"my-query-{'0' * 32}/it"]
    for name in others:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("precious")
    with query_folder(place):
        pass
    assert {(place / name).read_text() for name in others} == {"precious"}


def test_two_processes_do_not_share_a_place(place: Path) -> None:
    """The lock is waited for until the process is told to stop, and free again when its holder leaves."""
    stopping = threading.Event()
    with directory_lock(place, stopping):
        threading.Timer(0.1, stopping.set).start()
        with pytest.raises(Stopping), directory_lock(place, stopping):
            pass
    with directory_lock(place, threading.Event()):
        pass


@pytest.mark.parametrize(
    "wanted", [lambda place: directory_lock(place, threading.Event()), query_folder], ids=["lock", "folder"]
)
def test_place_that_cannot_be_written_is_named(
    tmp_path: Path, wanted: Callable[[Path], AbstractContextManager[object]]
) -> None:
    """What is wrong with it is said in one line."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointNotWritable, match=r"file/checkpoint \(.*TIDEMARK_CHECKPOINT"),
        wanted(tmp_path / "file" / "checkpoint"),
    ):
        pass
