"""The records of what is decided (docs/design.md 3): edges of one ID each, so no two relays cut them differently."""

from collections.abc import Iterator

from msgspec import Raw

from tidemark.sources.relay.decider import Decided
from tidemark.sources.relay.evidence import ids_of
from tidemark.streaming import records
from tidemark.streaming.records import Rdata, Void


def told(decided: Decided, writer: str) -> Iterator[bytes]:
    """A record for each row of each fact, the last with its number, and one for each ID without a fact; IDs ascend."""
    stream, epoch, signed = decided.told.stream.name, decided.told.epoch, decided.told.stream.towards.signed

    def void(id: int) -> bytes:
        return records.encode(Void(stream=stream, writer=writer, epoch=epoch, prev=signed(id - 1), id=signed(id)))

    voids = ids_of(decided.voids)
    next_void = next(voids, None)
    for fact in decided.facts:
        while next_void is not None and next_void < fact.id:
            yield void(next_void)
            next_void = next(voids, None)
        if not fact.rows:
            yield void(fact.id)
            continue
        *first, last = fact.rows
        for body in first:
            yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id="batch", row=Raw(body)))
        yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id=signed(fact.id), row=Raw(last)))
    while next_void is not None:
        yield void(next_void)
        next_void = next(voids, None)
