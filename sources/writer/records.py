"""The records that a writer sends for one stream (docs/design.md 3). Pure; magnitudes in, signed IDs out."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import Raw

from tidemark.sources.writer.chain import SettledSpan
from tidemark.streaming import records
from tidemark.streaming.direction import Direction


@dataclass(frozen=True, slots=True)
class OutboxFact:
    """`bodies` are its rows as JSON, in order; at least one."""

    id: int
    bodies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordBuilder:
    """One writer, in one epoch, on one stream."""

    instance: str
    epoch: int
    stream: str
    towards: Direction

    def span(self, span: SettledSpan, facts: Sequence[OutboxFact], voids: Sequence[int]) -> Iterator[bytes]:
        """Edges that tile `span`: one for each of its facts, and of `voids`: reserved IDs without a fact.

        Both are in order. What else is empty (announcements, and IDs of which that is not known) is covered by the edge
        behind it, or by an announcement at the end: no single ID of it is named, so none counts as completed.
        """
        at = span.prev
        for fact in facts:
            for void in _between(voids, at, fact.id):
                yield self._void(at, void)
                at = void
            yield from self.fact(fact, at)
            at = fact.id
        for void in _between(voids, at, span.id):
            yield self._void(at, void)
            at = void
        if at < span.id:
            yield records.encode(
                records.Position(
                    stream=self.stream,
                    writer=self.instance,
                    epoch=self.epoch,
                    prev=self.towards.signed(at),
                    id=self.towards.signed(span.id),
                )
            )

    def fact(self, fact: OutboxFact, prev: int) -> Iterator[bytes]:
        """One record per row; the last carries the number."""
        *first, last = fact.bodies
        for body in first:
            yield records.encode(
                records.Rdata(stream=self.stream, writer=self.instance, epoch=self.epoch, id="batch", row=Raw(body))
            )
        yield records.encode(
            records.Rdata(
                stream=self.stream,
                writer=self.instance,
                epoch=self.epoch,
                prev=self.towards.signed(prev),
                id=self.towards.signed(fact.id),
                row=Raw(last),
            )
        )

    def leftover(self, fact: OutboxFact) -> Iterator[bytes]:
        """A fact whose neighbours in the chain are not known any more: an edge of one ID.

        Where its writer had announced it before it died, that edge lies inside the announced one: a duplicate.
        """
        return self.fact(fact, fact.id - 1)

    def join(self, id: int, timeline: records.Timeline) -> bytes:
        return records.encode(
            records.Join(
                stream=self.stream,
                writer=self.instance,
                epoch=self.epoch,
                id=self.towards.signed(id),
                timeline=timeline,
            )
        )

    def retire(self, id: int) -> bytes:
        return records.encode(
            records.Retire(stream=self.stream, writer=self.instance, epoch=self.epoch, id=self.towards.signed(id))
        )

    def _void(self, prev: int, id: int) -> bytes:
        return records.encode(
            records.Void(
                stream=self.stream,
                writer=self.instance,
                epoch=self.epoch,
                prev=self.towards.signed(prev),
                id=self.towards.signed(id),
            )
        )


def _between(ids: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Those of the sorted `ids` in `(low, high]`."""
    return ids[bisect_right(ids, low) : bisect_right(ids, high)]
