"""The state machine in every small world: two writers, and all that may happen to them, in every order.

Nothing here is drawn at random. The largest world is in tests/model_check (`make model-check`). Rules that are bent
show that the check works: each of them must fail, of the state machine and of what writers promise.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from tests.examples import MODEL_CHECK, QUICK
from tests.streaming.explored import Exploration
from tests.streaming.judged import Broken
from tests.streaming.small_world import Clause, Size
from tidemark.streaming.core import batch, store, stream, writers
from tidemark.streaming.core.chain import Chain
from tidemark.streaming.core.classify import BatchOutcome
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writers import LinearPosition, WriterState
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals
from tidemark.streaming.values.limits import Evidence
from tidemark.streaming.wire.runs import Marker, Run

pytestmark = pytest.mark.long

TINY = [
    Size(ids=1),
    Size(ids=1, retirements=1, restarts=0),
    Size(ids=2, beats=0, rollbacks=0, restarts=0, set_backs=0),
]
SMALL = [
    Size(ids=1, retirements=1),
    Size(ids=2, beats=0, rollbacks=0, restarts=0),
    Size(ids=2, set_backs=0, restarts=0),
]
WHOLE = [
    Size(ids=2, restarts=0),
    Size(ids=2, set_backs=0),
    Size(ids=1, retirements=2),
]


def go_through(size: Size) -> None:
    world = Exploration(size)
    world.run()
    assert size.acts or world.cuts(edges=False)  # operators' records have no order against the others of a batch


def unit() -> bool:
    """Whether this is `make test-unit`."""
    return settings.get_current_profile_name() == QUICK


def quick() -> bool:
    """Whether this is another run than `make model-check`."""
    return settings.get_current_profile_name() != MODEL_CHECK


@pytest.mark.parametrize("size", TINY if unit() else SMALL if quick() else [*SMALL, *WHOLE], ids=str)
def test_every_way_through_a_small_world(size: Size) -> None:
    """Rules 1, 2, 3, 5 and 10, at every step: nothing is passed that is open, nothing goes back, advances join and
    prove what they say, each record is counted; and where nothing is in flight, nothing is held.
    """
    Exploration(size).run()


def test_every_way_through_a_world_whose_image_is_put_back() -> None:
    """Rules 2, 3, 5 and 10 hold also where nothing tells that the database went back: what comes again is late."""
    Exploration(Size(ids=1 if quick() else 2, beats=0, rollbacks=0, told=False)).run()


@pytest.mark.parametrize("told", [True, False])
def test_every_way_through_a_world_whose_epochs_go_back_with_it(*, told: bool) -> None:
    """Rules 2, 3, 5 and 10: another JOIN of an epoch shows that the database went back; what comes again is late."""
    size = Size(ids=1, beats=0 if unit() else 1, rollbacks=0 if quick() else 1, told=told)
    Exploration(replace(size, broken="epochs rise over a restore")).run()


@pytest.mark.parametrize(
    "size",
    [
        Size(ids=1, acts=1 if quick() else 2, beats=0, rollbacks=0, set_backs=0),
        *([] if quick() else [Size(ids=1, acts=1, rollbacks=0), Size(ids=1, acts=1, retirements=2, set_backs=0)]),
    ],
    ids=str,
)
def test_every_way_through_a_world_with_an_operator(size: Size) -> None:
    """Rule 1: nothing that is open is passed but for what an operator settled, until that is taken back or the writer
    joins; and then nothing is held for it. No act of an operator begins a timeline.
    """
    Exploration(size).run()


@pytest.mark.parametrize(
    "size",
    [Size(ids=1, restarts=0 if unit() else 1), *([] if quick() else [Size(ids=2, beats=0, rollbacks=0, restarts=0)])],
    ids=str,
)
def test_every_cut_into_batches(size: Size) -> None:
    """State, evidence and outcomes are those of the records one by one, of any part of a log in one batch."""
    world = Exploration(size)
    world.run()
    assert world.cuts(edges=size.ids == 1 and not quick())


Patch = Callable[[pytest.MonkeyPatch], None]
BENT: dict[str, tuple[Patch, Size, str]] = {}
"""A rule that is bent, a world in which that must show, and how."""

PLAIN = Size(ids=2, beats=1, rollbacks=1, restarts=1, set_backs=0)
BACK = Size(ids=2, beats=1, rollbacks=0, restarts=1, set_backs=1)
SAME_EPOCH = Size(ids=1, beats=1, rollbacks=0, broken="epochs rise over a restore")
OPERATED = Size(ids=1, acts=2, beats=0, rollbacks=0, set_backs=0)


def bent(size: Size, shows: str) -> Callable[[Patch], Patch]:
    def remember(patch: Patch) -> Patch:
        BENT[(patch.__doc__ or "").strip()] = patch, size, shows
        return patch

    return remember


@bent(PLAIN, "the line passes")
def _(patch: pytest.MonkeyPatch) -> None:
    """The line counts announced IDs as completed."""
    patch.setattr(Run, "completes", property(lambda run: np.ones(len(run), np.bool_)))


@bent(PLAIN, "the line passes")
def _(patch: pytest.MonkeyPatch) -> None:
    """The line goes to the highest position, not to the lowest."""

    def settle(self: StreamState) -> None:
        self.linear.advance(max(writer.chain.position for writer in self.writers.values()))

    patch.setattr(StreamState, "advance_linear", settle)


@bent(PLAIN, "the line passes")
def _(patch: pytest.MonkeyPatch) -> None:
    """A position does not wait for what lies below an edge."""

    def settle(self: Chain, prev: int, id: int, evidence: Evidence, *_: Any) -> None:
        if id > self.position:
            self._advance(id, evidence)

    patch.setattr(Chain, "settle", settle)


@bent(PLAIN, "a timeline begins")
def _(patch: pytest.MonkeyPatch) -> None:
    """A JOIN below another writer's position begins a timeline."""
    rule = StreamState._begin_epoch

    def begin(self: StreamState, marker: Marker, changes: BatchOutcome) -> Any:
        if any(marker.id < writer.position for writer in self.writers.values()):
            self.database = "another"
        return rule(self, marker, changes)

    patch.setattr(StreamState, "_begin_epoch", begin)


@bent(PLAIN, "has completed all up to")
def _(patch: pytest.MonkeyPatch) -> None:
    """A JOIN settles nothing of what was left open."""
    patch.setattr(writers, "settle_by_marker", lambda *_: NO_INTERVALS)


@bent(PLAIN, "was Evidence")
def _(patch: pytest.MonkeyPatch) -> None:
    """What is announced counts as one empty ID, however wide it is."""
    patch.setattr(Run, "evidence", lambda run: Evidence(run.fact_count, len(run) - run.fact_count))


@bent(PLAIN, "was Evidence")
def _(patch: pytest.MonkeyPatch) -> None:
    """A void counts as a fact."""
    patch.setattr(Run, "evidence", lambda run: Evidence(int(run.completes.sum()), int((~run.completes).sum())))


@bent(OPERATED, "a timeline begins")
def _(patch: pytest.MonkeyPatch) -> None:
    """A JOIN below what an operator alone settled begins a timeline."""
    patch.setattr(WriterState, "highest_settled_by_writer", property(lambda writer: writer.chain.highest_settled))


@bent(OPERATED, "has completed all up to")
def _(patch: pytest.MonkeyPatch) -> None:
    """What an operator settled is never taken back."""
    patch.setattr(WriterState, "reopen", lambda *_: False)


@bent(OPERATED, "has completed all up to")
def _(patch: pytest.MonkeyPatch) -> None:
    """What comes late into a skip is forgotten, and open again where the skip is taken back."""
    patch.setattr(Intervals, "without", lambda late, *_: late)


@bent(BACK, "no timeline begins")
def _(patch: pytest.MonkeyPatch) -> None:
    """A database that goes back is seen from the joiner's own position alone."""
    rule = writers.detect_rollback

    def without_database(known: Any, held: Any, marker: Marker, timeline: int, _: Any) -> Any:
        return rule(known, held, marker, timeline, None)

    for module in (stream, writers):
        patch.setattr(module, "detect_rollback", without_database)


@bent(SAME_EPOCH, "a JOIN is not applied")
def _(patch: pytest.MonkeyPatch) -> None:
    """Every further JOIN of an epoch counts as a repetition."""
    patch.setattr(stream, "is_repeated_join", lambda writer, marker, *_: marker.epoch == writer.epoch)


@bent(BACK, "the line passes")
def _(patch: pytest.MonkeyPatch) -> None:
    """A new timeline forgets none of the completed IDs that may come again."""
    patch.setattr(LinearPosition, "forget_above", lambda *_: 0)


@bent(BACK, "late is not")
def _(patch: pytest.MonkeyPatch) -> None:
    """Only the writer that joins goes back with its database."""
    rule = WriterState.roll_back
    joins: list[str] = []
    begin = writers.begin_epoch

    def go_back(self: WriterState, limit: int, name: str, changes: BatchOutcome) -> None:
        if joins:
            rule(self, limit, name, changes)

    def joining(known: Any, held: Any, marker: Marker, *rest: Any) -> Any:
        joins.append(marker.writer)
        try:
            return begin(known, held, marker, *rest)
        finally:
            joins.clear()

    patch.setattr(WriterState, "roll_back", go_back)
    patch.setattr(stream, "begin_epoch", joining)


@bent(BACK, "the line passes")
def _(patch: pytest.MonkeyPatch) -> None:
    """What was under way in the lost history counts as completed in the new one."""
    patch.setattr(StreamState, "_current_timeline_mask", lambda _, run: np.ones(len(run), np.bool_))


@bent(BACK, "is not late")
def _(patch: pytest.MonkeyPatch) -> None:
    """Late completions are counted as duplicates."""

    def record_late(self: BatchOutcome, run: Run, _: str) -> None:
        self.counts["duplicate"] += len(run)

    patch.setattr(BatchOutcome, "record_late", record_late)


@bent(BACK, "is not late")
def _(patch: pytest.MonkeyPatch) -> None:
    """What the line has passed, and comes again of another writer, counts as any completion."""
    rule = LinearPosition.add_completed
    patch.setattr(LinearPosition, "add_completed", lambda *given: np.zeros_like(rule(*given)))


@bent(BACK, "late is not")
def _(patch: pytest.MonkeyPatch) -> None:
    """What was taken back is told to nobody."""
    patch.setattr(writers, "record_rolled_back", lambda *_: None)


@bent(BACK, "a RDATA is")
def _(patch: pytest.MonkeyPatch) -> None:
    """Where IDs are given out again, the ones that were published are forgotten."""
    rule = writers.begin_epoch

    def begin(*args: Any) -> Any:
        writer, retire = rule(*args)
        writer.late_ranges = NO_INTERVALS
        return writer, retire

    patch.setattr(stream, "begin_epoch", begin)


@bent(BACK, "goes back")
def _(patch: pytest.MonkeyPatch) -> None:
    """A position goes back with its database."""
    patch.setattr(WriterState, "position", property(lambda writer: writer.chain.position))


@bent(Size(ids=1, beats=1, retirements=2), "the line passes")
def _(patch: pytest.MonkeyPatch) -> None:
    """When all have retired the line goes to what was published, also of a history that is lost."""

    patch.setattr(StreamState, "position_in_timeline", lambda _, writer: writer.position)


@bent(Size(ids=1), "one batch gives")
def _(patch: pytest.MonkeyPatch) -> None:
    """In a batch the JOINs come last."""

    def in_order(items: list[store.AcceptedRecord]) -> Iterator[tuple[list[store.AcceptedRecord], Marker | None]]:
        yield [item for item in items if not isinstance(item, Marker)], None
        for item in items:
            if isinstance(item, Marker):
                yield [], item

    patch.setattr(batch, "split_segments", in_order)


@pytest.mark.parametrize("rule", BENT)
def test_a_rule_that_is_bent_breaks_a_world(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is worth what it finds: each variant of a rule fails, and for the reason that it should."""
    patch, size, shows = BENT[rule]
    patch(monkeypatch)
    with pytest.raises(Broken, match=shows):
        go_through(size)


@pytest.mark.parametrize(
    ("clause", "shows"),
    [
        ("a JOIN stands before what its writer reserves", "a RDATA is not applied"),
        ("what was committed is acknowledged before the JOIN", "the line passes"),
        ("an announcement is read while no reservation is out", "the line passes"),
        ("who lost its database joins again", "has completed all up to"),
        ("a void is named only where nothing was committed", "the line passes"),
        ("an edge leaves out no ID of its own writer", "the line passes"),
    ],
)
def test_a_promise_that_writers_break_breaks_a_world(clause: Clause, shows: str) -> None:
    """docs/design.md 4 is no hope: without any one of its clauses something is passed, or lost. Epochs that do not rise
    are told apart by what a JOIN says (the test above of epochs that go back).
    """
    with pytest.raises(Broken, match=shows):
        Exploration(Size(ids=2, broken=clause)).run()
