"""Effects: what a batch did to the streams of a shard. All that leaves the state function, and all that sinks are told.

IDs are signed; "beyond" means away from 0, so sinks compare magnitudes. Equal input gives equal bytes: lists are
sorted, and the only clock is the batch's (`now`, ms since 1970). Effects live from the state function to the driver of
the same batch, and are stored nowhere. `Summary` and `blockers` describe a stream's state for people. Needs no numpy:
services that only read import this module too.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from tidemark.streaming.core.linear_lag import Behind, behind
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Evidence, Rejected

if TYPE_CHECKING:
    from tidemark.streaming.core.stream import StreamState  # numpy's, which a service that only reads does not have


class WriterAdvance(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A writer's position moved over `(prev, id]`. At most one per writer, stream and batch.

    The counts are those of its `evidence`. `oldest` is the Kafka time (ms) of the writer's oldest record in the batch.
    """

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    empty: int
    unseen: int
    skipped: int
    oldest: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.facts, self.empty, self.unseen, self.skipped)


class WriterRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A joined writer as it stands after the batch; sent when position, epoch or retirement changed."""

    writer: str
    epoch: int
    position: int
    retired: bool


class Gap(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`(low, top]` of `writer` is open since `since` (ms). `top` names a gap while it lives; `low` may move up."""

    writer: str
    epoch: int
    low: int
    top: int
    since: int


class GapClosed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The gap of `writer` that ended at `top` is closed; `how` is `completed`, `joined`, `retired` or `skipped`."""

    writer: str
    top: int
    how: str


class LateCompletion(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Completions in `(prev, id]` that came after the range was settled without them; `facts` of them are RDATA.

    `why`: `skipped` (an operator's SKIP, RETIRE or JOIN passed them), `regressed` (the source went back), `final` (the
    linear position had passed the ID, or another writer had completed it) or `announced` (their own writer had said
    that it has no facts there).
    """

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: str


class Recall(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Edges of `writer` in `epoch` that were put off for want of room may come again: they stand among the records at
    the offsets `first` to `last` of that partition of the facts topic.
    """

    writer: str
    epoch: int
    partition: int
    first: int
    last: int


class Forced(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An operator's act from the control topic, for the audit table; `kind` is SKIP, RETIRE or JOIN."""

    writer: str
    epoch: int
    kind: str
    prev: int
    id: int
    by: str
    why: str


class NewTimeline(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Timeline `number` of the stream began with the JOIN of `writer` at `id`: a database went back (docs/design.md 3).

    `position` is the writer's; `why` says what showed it: a JOIN below that `position` or below what had completed
    beyond it, another history of the `database`, or a `start` that does not follow the writer's last one.
    """

    writer: str
    epoch: int
    id: int
    position: int
    number: int
    why: str


class Blocker(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Who holds a position back: the open range `(low, top]`, or a writer that never joined (`unknown`)."""

    writer: str
    epoch: int
    low: int
    top: int
    since: int
    unknown: bool


class Summary(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A stream for people: for metrics and `tidemark status`.

    `pending` counts completed edges above their writer's position, `oldest` is the blocker that stands longest,
    `unknown` names writers (`writer/epoch`) that are held because they never joined, `completed` counts the
    intervals of completed IDs kept above the line. `behind` says how far the line is below what is allocated and who
    holds it there, gap or no gap; None where nobody does. `transactions` says who holds a writer's open IDs, where it
    tells. `deferred` names writers (`writer/epoch`) of which edges wait in Kafka for room. `spans` counts the intervals
    that are pending of the writer that has most.
    """

    pending: int
    gaps: int
    oldest: Blocker | None
    unknown: list[str]
    completed: int
    behind: Behind | None
    transactions: dict[str, list[str]] = {}
    deferred: list[str] = []
    spans: int = 0


class StreamEffects(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What happened to one stream.

    `allocated` is the highest ID that a record of the stream has named: how far IDs are known to be given out.

    `counts` holds records by outcome: `applied`, `held`, `deferred`, `duplicate`, `late`, `batch`, and `forgotten`
    (completed IDs dropped at the bound). Rejected ones are in `ShardEffects.rejected`. `dropped` names retired writers
    that left the state. `state` is the stream's new state in `core.codec`'s encoding, without the table of its
    retired writers; that is `retired`, where the batch changed it.
    """

    stream: str
    direction: Direction
    linear_prev: int
    linear: int
    allocated_prev: int
    allocated: int
    advances: list[WriterAdvance]
    writers: list[WriterRow]
    gaps: list[Gap]
    closed: list[GapClosed]
    late: list[LateCompletion]
    forced: list[Forced]
    timelines: list[NewTimeline]
    dropped: list[str]
    counts: dict[str, int]
    summary: Summary
    state: bytes
    retired: bytes | None = None
    recalls: list[Recall] = []


class Progress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The next offset to read of one Kafka partition."""

    topic: str
    partition: int
    offset: int


class ShardEffects(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One row of the query's output. `now` is the batch's time; streams are sorted by name. `cut`: `progress` ends
    before what Spark has planned for the batch (`streaming.ingest.compact`).
    """

    shard: int
    now: int
    streams: list[StreamEffects]
    rejected: list[Rejected]
    progress: list[Progress]
    cut: bool = False


def encode(effects: ShardEffects) -> bytes:
    return msgspec.msgpack.encode(effects)


_decoder = msgspec.msgpack.Decoder(ShardEffects)


def decode(data: bytes) -> ShardEffects:
    return _decoder.decode(data)


def blockers(stream: "StreamState") -> list[Blocker]:
    """Everything that holds a position of `stream` back, longest first. IDs come out signed."""
    stream.writers.open_waiting()
    return sorted(_blockers(stream), key=_age)


def summarize(stream: "StreamState") -> Summary:
    found = [*_blockers(stream)]
    waiting, signed = stream.writers.waiting.values(), stream.direction.signed
    chains = [writer.chain for writer in stream.writers.open.values()] + [
        held.chain for held in stream.unjoined.values()
    ]
    oldest = [Blocker(it.name, it.epoch, signed(it.low), signed(it.top), it.since, unknown=False) for it in waiting]
    return Summary(
        pending=sum(span.edges for chain in chains for span in chain.pending) + sum(it.edges for it in waiting),
        gaps=sum(not blocker.unknown for blocker in found) + sum(it.gaps for it in waiting),
        oldest=min([*found, *oldest], key=_age, default=None),
        unknown=sorted(f"{name}/{epoch}" for name, epoch in stream.unjoined),
        completed=len(stream.linear.completed),
        behind=behind(stream),
        transactions=stream.transactions,
        deferred=sorted(
            [f"{name}/{it.epoch}" for name, it in stream.writers.open.items() if it.chain.deferred]
            + [f"{name}/{epoch}" for (name, epoch), it in stream.unjoined.items() if it.chain.deferred]
            + [f"{it.name}/{it.epoch}" for it in waiting if it.deferred]
        ),
        spans=max([0, *(len(chain.pending) for chain in chains), *(it.gaps for it in waiting)]),
    )


def _blockers(stream: "StreamState") -> Iterator[Blocker]:
    signed = stream.direction.signed
    for name, writer in stream.writers.open.items():
        for low, top, since in writer.chain.gaps():
            yield Blocker(name, writer.epoch, signed(low), signed(top), since, unknown=False)
    for (name, epoch), held in stream.unjoined.items():
        yield Blocker(name, epoch, 0, 0, held.since, unknown=True)


def _age(blocker: Blocker) -> tuple[int, str, int]:
    return blocker.since, blocker.writer, blocker.epoch
