"""Feeding the edges and rows of one segment to a stream, and what was turned away in it. Pure.

A segment lies between two neighbouring JOIN or RETIRE records of the stream, which `core.stream` takes. Inside it
the order of arrival does not matter but for two things, which the offsets decide: who was first on a new stream, and
what came before a writer that never joined.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from tidemark.streaming.core.chain import Chain
from tidemark.streaming.core.classify import Classifier, Completed
from tidemark.streaming.core.outcome import Changes, Refusal
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writers import HeldRows, WriterState, place
from tidemark.streaming.values.limits import Bounds, Reason
from tidemark.streaming.wire.records import EVERYBODY
from tidemark.streaming.wire.runs import Mask, Run, TurnedAway

Strange = Run | HeldRows | TurnedAway


def complete(
    stream: StreamState,
    runs: Sequence[Run],
    others: Sequence[HeldRows | TurnedAway],
    bounds: Bounds,
    changes: Changes,
) -> None:
    """Feed the edges and rows of one segment, and what was turned away in it."""
    known, strange = _sort_out(stream, runs, others, changes)
    if strange and not stream.held:
        # What came before the first record of an unknown writer may still move the line; what came after may not.
        first = min(item.first_offset for item in strange)
        before = [part for run in known for part in run.parts(run.offsets < first)]
        _complete(stream, [*_apply(stream, before, bounds, changes)], changes)
        stream.settle_line()
        known = [part for run in known for part in run.parts(run.offsets >= first)]
    held = [_hold(stream, item, bounds, changes) for item in strange]
    completed = [found for item in held if item is not None for found in item]
    _complete(stream, [*completed, *_apply(stream, known, bounds, changes)], changes)
    if None in held:
        stream.crowd(changes)
    if any(item.writer is None for item in others):
        stream.doubt()
    stream.settle_line()


def _sort_out(
    stream: StreamState, runs: Sequence[Run], others: Sequence[HeldRows | TurnedAway], changes: Changes
) -> tuple[list[Run], list[Strange]]:
    """Runs of writers that have joined, and what came from those that have not; the rest is counted or rejected.

    A retired writer that completes anything beyond its RETIRE, or may, is unknown again. What was turned away of an
    active writer holds it by its own broken chain.
    """
    known: list[Run] = []
    strange: list[Strange] = []
    items: list[Run | HeldRows | TurnedAway] = [*runs, *others]
    for item in sorted(items, key=attrgetter("first_offset")):
        if item.writer is None:
            continue
        if isinstance(item, Run) and stream.direction.opposes(item.direction):
            changes.rejected.append(Refusal.whole(Reason.MIXED_SIGN, item.offsets))
            continue
        writer = stream.writers.get(item.writer)
        if writer is None and item.epoch == 0 and _is_new(stream) and not strange:
            if isinstance(item, TurnedAway):
                stream.refused = max(stream.refused, item.reach)  # it may still be another that comes first
                continue
            writer = WriterState(0, Chain(refused=stream.refused), timeline=stream.timeline)
            stream.writers[item.writer] = writer
            stream.here += 1
        if writer is not None and item.epoch < writer.epoch:
            if not isinstance(item, TurnedAway):
                changes.rejected.append(Refusal.whole(Reason.ZOMBIE, item.offsets))
            continue
        if isinstance(item, Run):
            stream.face(item.direction)
            changes.touch(item.writer, item.oldest)
        if writer is None or item.epoch > writer.epoch:
            strange.append(item)
        elif writer.retired is not None:
            known_too, strange_too = _after_retirement(writer, item)
            known.extend(known_too)
            strange.extend(strange_too)
        elif isinstance(item, TurnedAway):
            writer.chain.refuse(item.reach)
        elif isinstance(item, HeldRows):
            changes.counts["batch"] += len(item.offsets)
        else:
            known.append(item)
    return known, strange


def _after_retirement(writer: WriterState, item: Strange) -> tuple[list[Run], list[Strange]]:
    if not isinstance(item, Run):
        return [], [item] if item.reach > writer.position else []
    beyond = item.ids > writer.position
    return [*item.parts(~beyond)], [*item.parts(beyond)]


def _is_new(stream: StreamState) -> bool:
    """Whether nobody was ever seen here, so that a writer of epoch 0 needs no JOIN."""
    return not stream.writers and not stream.held and stream.line.position == 0


def _apply(stream: StreamState, runs: Sequence[Run], bounds: Bounds, changes: Changes) -> Iterator[Completed]:
    for run in runs:
        writer = stream.writers[run.writer]
        began = stream.began if writer.timeline == stream.timeline else 0
        feed = Classifier(writer.chain, bounds.pending, changes, "applied", writer.late, writer.published, began)
        yield from feed.run(run)
        writer.late = feed.late


def _complete(stream: StreamState, found: Sequence[Completed], changes: Changes) -> None:
    """Tell the line what was completed. What it has already is final (docs/design.md, rule 10): a completion of it
    comes late, also where another writer completed the ID, and the first one counts.
    """
    if not found:
        return
    ids = np.concatenate([run.ids for run, _ in found])
    completes = np.concatenate([run.completes for run, _ in found])
    counts = completes & np.concatenate([_of_this_timeline(stream, run) for run, _ in found])
    late = completes & stream.line.complete(ids, np.concatenate([run.offsets for run, _ in found]), counts)
    if late.any():
        ends = np.cumsum([len(run) for run, _ in found])[:-1]
        for (run, outcome), mask in zip(found, np.split(late, ends), strict=True):
            if outcome != "late":
                changes.counts[outcome] -= int(np.count_nonzero(mask))
                for part in run.parts(mask):
                    changes.be_late(part, "final")


def _of_this_timeline(stream: StreamState, run: Run) -> Mask:
    """Which IDs of `run` are told of the stream's timeline.

    Until its writer joins again, what it tells beyond the JOIN that began it is of the timeline before: it was under
    way to Kafka when the database went back. Other writers had these IDs since, or will have them.
    """
    writer = stream.writers.get(run.writer)
    if writer is None or writer.epoch != run.epoch or writer.timeline == stream.timeline:
        return np.ones(len(run), np.bool_)
    return run.ids <= stream.began


def _hold(stream: StreamState, item: Strange, bounds: Bounds, changes: Changes) -> list[Completed] | None:
    """What it completed; None where the bound leaves no place for it."""
    held = place(stream.held, (item.writer or EVERYBODY, item.epoch), bounds, changes)
    if held is None:
        if not isinstance(item, TurnedAway):
            changes.rejected.append(Refusal.whole(Reason.HELD_OVERFLOW, item.offsets))
        return None
    if isinstance(item, Run):
        return [*Classifier(held.chain, bounds.pending, changes, "held").run(item)]
    held.chain.refuse(item.reach)
    if isinstance(item, HeldRows):
        changes.counts["batch"] += len(item.offsets)
    return []
