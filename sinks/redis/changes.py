"""What is written to Redis of a stream: a `Change`, made from a batch or from what Postgres holds.

All numbers are text: an ID may have 63 bits, and a number in Redis's Lua has 53.
"""

from collections.abc import Iterable, Sequence

import msgspec

from tidemark.sinks.port import Batch, Committed
from tidemark.sinks.postgres.history import PastAdvance, PastLate
from tidemark.sinks.postgres.store import StreamPositions
from tidemark.streaming.effects import LateCompletion, StreamEffects, WriterAdvance


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
    """What the script does to a stream. Entries of a writer are in chain order; `positions` may name writers without
    entries."""

    stream: str
    linear: str
    entries: list[AdvanceEntry] = []
    positions: list[tuple[str, str]] = []
    late: list[LateEntry] = []
    dropped: list[str] = []
    allocated: str = "0"


def of_batch(batch: Batch, committed: Committed) -> list[Change]:
    """The changes of `batch`, as Postgres settled them; streams that only held or counted something are left out."""
    changes = (_of_stream(batch.number, shard.now, stream, committed) for shard, stream in batch.streams())
    return [change for change in changes if change is not None]


def _of_stream(batch: int, now: int, effects: StreamEffects, committed: Committed) -> Change | None:
    moved = (effects.linear, effects.allocated) != (effects.linear_prev, effects.allocated_prev)
    if not (moved or effects.writers or effects.late or effects.dropped):
        return None
    name = effects.stream
    advances = (committed.settled.get((name, advance.writer), advance) for advance in effects.advances)
    numbers = committed.late.get(name, [])
    return Change(
        name,
        str(effects.linear),
        entries=[_entry(advance, effects.linear, batch, now) for advance in advances if advance],
        positions=[
            (row.writer, str(committed.positions.get((name, row.writer), row.position))) for row in effects.writers
        ],
        late=[_late(number, late, batch, now) for number, late in zip(numbers, effects.late, strict=True)],
        dropped=effects.dropped,
        allocated=str(effects.allocated),
    )


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
        entries=[_entry(item.advance, item.linear, item.batch, item.time) for _, item in past],
        positions=[(writer, str(position)) for writer, position in held.positions.items()],
        late=[_late(item.number, item.late, item.batch, item.time) for item in late],
        dropped=sorted(held.forgotten),
        allocated=str(held.allocated),
    )


def _entry(advance: WriterAdvance, linear: int, batch: int, time: int) -> AdvanceEntry:
    a = advance
    numbers = (a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, linear, batch, time)
    return AdvanceEntry(a.writer, *map(str, numbers))


def _late(number: int, late: LateCompletion, batch: int, time: int) -> LateEntry:
    return LateEntry(
        str(number),
        late.writer,
        str(late.epoch),
        str(late.prev),
        str(late.id),
        str(late.facts),
        late.why,
        str(batch),
        str(time),
    )
