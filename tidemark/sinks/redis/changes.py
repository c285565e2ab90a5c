"""What is written to Redis of a stream: a `Change`, made from a batch or from what Postgres holds.

All numbers are text: an ID may have 63 bits, and a number in Redis's Lua has 53.
"""

from collections.abc import Iterable, Sequence

import msgspec

from tidemark.sinks.port import Batch, Committed
from tidemark.sinks.postgres.history import PastAdvance, PastLate
from tidemark.sinks.postgres.store import StreamPositions
from tidemark.streaming.core.effects import LateCompletion, StreamEffects, WriterAdvance


class AdvanceEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `POSITION` entry among the advances; moves its writer's position."""

    writer: str
    epoch: str
    prev: str
    id: str
    facts: str
    empty: str
    unseen: str
    skipped: str
    linear: str
    batch: str
    time: str


class LateEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `LATE` entry among the advances. `number` is Postgres's, and tells which ones Redis has already."""

    number: str
    writer: str
    epoch: str
    prev: str
    id: str
    facts: str
    why: str
    batch: str
    time: str


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the script does to a stream. Entries of a writer are in chain order; `positions` names writers that stand
    where none of their entries leads."""

    stream: str
    linear: str
    entries: list[AdvanceEntry] = []
    positions: list[tuple[str, str]] = []
    late: list[LateEntry] = []
    dropped: list[str] = []
    allocated: str = "0"


def of_batch(batch: Batch, committed: Committed) -> list[Change]:
    """The changes of `batch`, as Postgres settled them; streams that only held or counted something are left out."""
    changes = []
    for shard in batch.effects:
        told = str(batch.number), str(shard.now)
        changes += [_of_stream(told, stream, committed) for stream in shard.streams if _shows(stream)]
    return changes


def _shows(effects: StreamEffects) -> bool:
    moved = effects.linear != effects.linear_prev or effects.allocated != effects.allocated_prev
    return moved or bool(effects.writers or effects.late or effects.dropped)


def _of_stream(told: tuple[str, str], effects: StreamEffects, committed: Committed) -> Change:
    """`told` are the number of the batch and its time."""
    name, linear = effects.stream, str(effects.linear)
    advances: Iterable[WriterAdvance | None] = effects.advances
    if committed.settled:
        advances = [committed.settled.get((name, advance.writer), advance) for advance in effects.advances]
    entries, reached = [], {}
    for advance in advances:
        if advance is not None:
            entries.append(_entry(advance, linear, *told))
            reached[advance.writer] = advance.id
    rows = [(row.writer, row.position) for row in effects.writers]
    if committed.positions:
        rows = [(writer, committed.positions.get((name, writer), position)) for writer, position in rows]
    positions = [(writer, str(position)) for writer, position in rows if reached.get(writer) != position]
    numbers = committed.late.get(name, [])
    late = [_late(number, late, *told) for number, late in zip(numbers, effects.late, strict=True)]
    return Change(name, linear, entries, positions, late, effects.dropped, str(effects.allocated))


def of_history(
    stream: str, held: StreamPositions, advances: Iterable[Sequence[PastAdvance]], late: Iterable[PastLate]
) -> Change:
    """A stream as Postgres holds it; `advances` has one chain per writer."""
    past: list[tuple[int, PastAdvance]] = []
    for chain in advances:
        newest = 0
        for advance in chain:
            # A clock that was set back must not put a writer's advances out of their order.
            newest = max(newest, advance.time)
            past.append((newest, advance))
    past.sort(key=lambda item: item[0])
    return Change(
        stream,
        str(held.linear),
        entries=[_entry(item.advance, str(item.linear), str(item.batch), str(item.time)) for _, item in past],
        positions=[(writer, str(position)) for writer, position in held.positions.items()],
        late=[_late(item.number, item.late, str(item.batch), str(item.time)) for item in late],
        dropped=sorted(held.forgotten),
        allocated=str(held.allocated),
    )


def _entry(advance: WriterAdvance, linear: str, batch: str, time: str) -> AdvanceEntry:
    a = advance
    counts = str(a.facts), str(a.empty), str(a.unseen), str(a.skipped)
    return AdvanceEntry(a.writer, str(a.epoch), str(a.prev), str(a.id), *counts, linear, batch, time)


def _late(number: int, late: LateCompletion, batch: str, time: str) -> LateEntry:
    return LateEntry(
        str(number),
        late.writer,
        str(late.epoch),
        str(late.prev),
        str(late.id),
        str(late.facts),
        late.why,
        batch,
        time,
    )
