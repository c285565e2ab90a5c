"""Facts of Synapse's streams, and what is proven of them. Pure; magnitudes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Raw

from tidemark.streaming.values.direction import Direction
from tidemark.streaming.wire.records import Join, Position, Rdata, Record, Retire, Timeline

MASTER = "master"
"""The main process, which older rows do not name."""


@dataclass(frozen=True, slots=True)
class StreamFact:
    """`rows` are JSON, at least one. `writer` is empty if the table does not name it.

    `marks`: a hash of each row's identity; empty for a fact that was received and is in no table. `is_proof`: no other
    history has a fact of these marks.
    """

    id: int
    writer: str
    rows: Sequence[str]
    marks: frozenset[int] = field(default=frozenset(), compare=False)
    is_proof: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class ProvenAdvance:
    """Everything of the writer in `(prev, id]` has ended, and `facts` are its facts there, in order.

    `unseen`: there may be more facts, which are not known.
    """

    writer: str
    prev: int
    id: int
    facts: Sequence[StreamFact]
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class WriterEncoder:
    """Makes the records of a writer in its epoch."""

    stream: str
    writer: str
    epoch: int
    towards: Direction
    timeline: Timeline

    def join(self, id: int, *, unseen: bool = False) -> Join:
        signed = self.towards.signed(id)
        return Join(
            stream=self.stream,
            writer=self.writer,
            epoch=self.epoch,
            id=signed,
            unseen=unseen and id > 0,
            timeline=self.timeline,
        )

    def retire(self, id: int) -> Retire:
        return Retire(stream=self.stream, writer=self.writer, epoch=self.epoch, id=self.towards.signed(id))

    def advance(self, advance: ProvenAdvance) -> Iterator[Record]:
        """The records of an advance. Each fact is an edge from the one before; the rest is an announcement.

        If more facts may be there, each fact is an edge of one ID, and the JOIN of the next epoch settles the IDs
        between: `epoch` is one less than that.
        """
        prev, signed = advance.prev, self.towards.signed
        for fact in advance.facts:
            if advance.unseen:
                prev = fact.id - 1
            *first, last = (Raw(row.encode()) for row in fact.rows)
            for row in first:
                yield Rdata(stream=self.stream, writer=self.writer, epoch=self.epoch, id="batch", row=row)
            edge = {"prev": signed(prev), "id": signed(fact.id)}
            yield Rdata(stream=self.stream, writer=self.writer, epoch=self.epoch, row=last, **edge)
            prev = fact.id
        if prev < advance.id and not advance.unseen:
            edge = {"prev": signed(prev), "id": signed(advance.id)}
            yield Position(stream=self.stream, writer=self.writer, epoch=self.epoch, **edge)
