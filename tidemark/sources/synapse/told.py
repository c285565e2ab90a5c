"""The records of what is decided of Synapse's streams (docs/design.md 3). Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import Raw

from tidemark.sources.synapse.facts import ProvenAdvance
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.wire.records import Join, Position, Rdata, Record, Retire, Timeline


@dataclass(frozen=True, slots=True)
class WriterTeller:
    """A writer in its epoch, as Tidemark knows it."""

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
        """Each fact is an edge from the one before; what is left an announcement. Where more may be there, facts are
        edges of one ID each, and the JOIN of the next epoch settles what lies between: `epoch` is one less."""
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
