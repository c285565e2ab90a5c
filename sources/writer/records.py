"""What a writer says of one stream: the records of DESIGN 3. Pure; magnitudes in, signed IDs out."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import Raw

from sources.writer.chain import Span
from streaming import wire


@dataclass(frozen=True, slots=True)
class Fact:
    """`bodies` are its rows as JSON, in order; at least one."""

    prev: int
    id: int
    bodies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Voice:
    """One writer, in one epoch, on one stream. `sign` is -1 where the IDs go down."""

    instance: str
    epoch: int
    stream: str
    sign: int

    def span(self, span: Span, facts: Sequence[Fact], voids: Sequence[int]) -> Iterator[bytes]:
        """Edges that tile `span`: its facts, which are in order, and between and behind them what is empty.

        `voids` (ascending) are reserved IDs without a fact; each is an edge of its own, because it counts as completed.
        Of what else is empty (announced heads, and IDs of which that is not known) no single ID is named.
        """
        at = span.prev
        for fact in facts:
            yield from self._empty(at, fact.prev, voids)
            yield from self.fact(fact)
            at = fact.id
        yield from self._empty(at, span.id, voids)

    def fact(self, fact: Fact) -> Iterator[bytes]:
        """One record per row; the last carries the number."""
        *first, last = fact.bodies
        for body in first:
            yield wire.encode(
                wire.Rdata(stream=self.stream, writer=self.instance, epoch=self.epoch, id="batch", row=Raw(body))
            )
        yield wire.encode(
            wire.Rdata(
                stream=self.stream,
                writer=self.instance,
                epoch=self.epoch,
                prev=self.sign * fact.prev,
                id=self.sign * fact.id,
                row=Raw(last),
            )
        )

    def join(self, id: int) -> bytes:
        return wire.encode(wire.Join(stream=self.stream, writer=self.instance, epoch=self.epoch, id=self.sign * id))

    def retire(self, id: int) -> bytes:
        return wire.encode(wire.Retire(stream=self.stream, writer=self.instance, epoch=self.epoch, id=self.sign * id))

    def _empty(self, prev: int, id: int, voids: Sequence[int]) -> Iterator[bytes]:
        for void in voids[bisect_right(voids, prev) : bisect_right(voids, id)]:
            yield self._edge(wire.Void, prev, void)
            prev = void
        if prev < id:
            yield self._edge(wire.Position, prev, id)

    def _edge(self, kind: type[wire.Void] | type[wire.Position], prev: int, id: int) -> bytes:
        return wire.encode(
            kind(
                stream=self.stream,
                writer=self.instance,
                epoch=self.epoch,
                prev=self.sign * prev,
                id=self.sign * id,
            )
        )
