"""When a checkpoint can be gone on with, and what becomes of it when not. Files as Spark would leave them."""

import threading
from pathlib import Path

import msgspec
import pytest

from tidemark.streaming.checkpoint import KEPT_ASIDE, AppliedBatch, Checkpoint, Seed, locked
from tidemark.streaming.errors import CheckpointNotWritable, Stopping
from tidemark.streaming.model import Bounds

STATES = {3: b"state"}
BOUNDS = Bounds(pending=5, own={"a*": Bounds(completed=2)})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint")


def begun(checkpoint: Checkpoint, after: AppliedBatch | None = None) -> Seed:
    return checkpoint.begin(after, 16, STATES, BOUNDS)


def leave(checkpoint: Checkpoint, planned: int, done: int | None) -> None:
    """What Spark writes: batch `planned` was begun, batch `done` was finished."""
    for kind, number in (("offsets", planned), ("commits", done)):
        folder = checkpoint.path / kind
        folder.mkdir(exist_ok=True)
        if number is not None:
            (folder / str(number)).touch()


def test_a_new_checkpoint_holds_nothing_to_go_on_with(checkpoint: Checkpoint) -> None:
    """Neither where there is no folder, nor where no batch was ever planned: both begin anew, unsaid."""
    assert checkpoint.resume(None, BOUNDS) is None
    begun(checkpoint)
    assert checkpoint.resume(None, BOUNDS) is None
    assert checkpoint.path.exists()


@pytest.mark.parametrize("applied", [6, 7])
def test_it_is_gone_on_with_where_postgres_stands_at_its_last_or_next_batch(
    checkpoint: Checkpoint, applied: int
) -> None:
    """Spark finished 6 and planned 7; Postgres has 6, or 7 too: the seed is that of the beginning, states and all."""
    seed = begun(checkpoint)
    leave(checkpoint, planned=7, done=6)
    assert checkpoint.resume(AppliedBatch(seed.lineage, applied), BOUNDS) == seed
    assert seed.states == STATES


@pytest.mark.parametrize("kind", ["spark", "python"])
def test_it_is_not_gone_on_with_where_an_older_version_began_it(checkpoint: Checkpoint, kind: str) -> None:
    """Offsets were those of Spark's own source, or Spark kept all states: Postgres has what counts."""
    seed = begun(checkpoint)
    leave(checkpoint, planned=7, done=6)
    older = msgspec.structs.replace(seed, kind=kind)
    (checkpoint.path / "seed").write_bytes(msgspec.msgpack.encode(older))
    assert checkpoint.resume(AppliedBatch(seed.lineage, 6), BOUNDS) is None
    assert not checkpoint.path.exists()


def test_its_first_batch_may_be_replayed_before_postgres_has_any(checkpoint: Checkpoint) -> None:
    """Killed in batch 0: Postgres still stands where the line of batches began."""
    before = AppliedBatch("earlier", 41)
    seed = begun(checkpoint, before)
    leave(checkpoint, planned=0, done=None)
    assert checkpoint.resume(before, BOUNDS) == seed
    assert checkpoint.resume(AppliedBatch(seed.lineage, 0), BOUNDS) == seed


@pytest.mark.parametrize("applied", [None, AppliedBatch("another", 6), 5, 8])
def test_it_is_set_aside_where_postgres_stands_elsewhere(
    checkpoint: Checkpoint, applied: AppliedBatch | int | None
) -> None:
    """A restored database (behind), an older checkpoint (ahead), a foreign one: kept beside, and not gone on with."""
    seed = begun(checkpoint)
    leave(checkpoint, planned=7, done=6)
    stands = AppliedBatch(seed.lineage, applied) if isinstance(applied, int) else applied
    assert checkpoint.resume(stands, BOUNDS) is None
    assert not checkpoint.path.exists()
    (aside,) = checkpoint.path.parent.glob("checkpoint.aside-*")
    assert (aside / "seed").exists()


@pytest.mark.parametrize("bounds", [Bounds(pending=5), Bounds(pending=5, own={"a*": Bounds(completed=3)})])
def test_it_is_set_aside_where_bounds_are_others(checkpoint: Checkpoint, bounds: Bounds) -> None:
    """A batch that is replayed with them would do something else than it did."""
    seed = begun(checkpoint)
    leave(checkpoint, planned=7, done=6)
    assert checkpoint.resume(AppliedBatch(seed.lineage, 6), bounds) is None
    assert not checkpoint.path.exists()


def test_it_is_set_aside_without_a_seed(checkpoint: Checkpoint) -> None:
    """What its states began with is not known, so no replay of its batch could be the same."""
    begun(checkpoint)
    leave(checkpoint, planned=7, done=6)
    (checkpoint.path / "seed").write_bytes(b"torn")
    assert checkpoint.resume(None, BOUNDS) is None
    assert not checkpoint.path.exists()


def test_few_are_kept_aside(checkpoint: Checkpoint) -> None:
    """The oldest goes when there are too many: a loop of restarts does not fill the disk."""
    for _ in range(KEPT_ASIDE + 2):
        begun(checkpoint)
        checkpoint.discard("a test")
    assert len(list(checkpoint.path.parent.glob("checkpoint.aside-*"))) == KEPT_ASIDE


def test_its_shards_are_known_once_a_batch_was_planned(checkpoint: Checkpoint) -> None:
    """Before that it may be begun again with any number."""
    begun(checkpoint)
    assert checkpoint.shards() is None
    leave(checkpoint, planned=0, done=None)
    assert checkpoint.shards() == 16


def test_two_processes_do_not_share_it(checkpoint: Checkpoint) -> None:
    """The lock is waited for until the process is told to stop, and free again when its holder leaves."""
    stopping = threading.Event()
    with locked(checkpoint.path, stopping):
        threading.Timer(0.1, stopping.set).start()
        with pytest.raises(Stopping), locked(checkpoint.path, stopping):
            pass
    with locked(checkpoint.path, threading.Event()):
        pass


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """What is wrong with it is said in one line."""
    (tmp_path / "file").touch()
    stopping = threading.Event()
    with (
        pytest.raises(CheckpointNotWritable, match=r"file/checkpoint \(.*TIDEMARK_CHECKPOINT"),
        locked(tmp_path / "file" / "checkpoint", stopping),
    ):
        pass


def test_one_for_executors_elsewhere_never_meets_the_states_of_another(checkpoint: Checkpoint) -> None:
    """Each has a path of its own and begins anew; the driver's part goes with it, also what a killed one left."""
    with checkpoint.apart() as first:
        begun(first)
    assert not first.path.exists()
    begun(first)
    with checkpoint.apart() as second:
        assert second.path != first.path
        assert second.resume(None, BOUNDS) is None
        assert not first.path.exists()
