"""The records of what is decided (docs/design.md 3): no two relays cut them differently, whenever they look."""

from collections.abc import Iterator

from msgspec import Raw

from tidemark.sources.relay.decider import Decided
from tidemark.sources.relay.evidence import ids_of
from tidemark.streaming import records
from tidemark.streaming.records import Position, Rdata, Void


def told(decided: Decided) -> Iterator[bytes]:
    """A record for each row of each fact, the last with its number, one for each ID without a fact, and one for each
    range that is announced; IDs of facts and voids ascend.
    """
    of, stream = decided.told, decided.told.stream.name
    signed = of.stream.towards.signed

    def void(id: int, writer: str) -> bytes:
        epoch = of.writers[writer].epoch
        return records.encode(Void(stream=stream, writer=writer, epoch=epoch, prev=signed(id - 1), id=signed(id)))

    voids = ids_of(decided.voids)
    next_void = next(voids, None)
    for fact in decided.facts:
        while next_void is not None and next_void < fact.id:
            yield void(next_void, of.own)
            next_void = next(voids, None)
        writer = of.name_of(fact.writer)
        if fact.void:
            yield void(fact.id, writer)
            continue
        epoch = of.writers[writer].epoch
        *first, last = fact.rows
        for body in first:
            yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id="batch", row=Raw(body)))
        yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id=signed(fact.id), row=Raw(last)))
    while next_void is not None:
        yield void(next_void, of.own)
        next_void = next(voids, None)
    for each in decided.announced:
        epoch = of.writers[each.writer].epoch
        prev, id = signed(each.prev), signed(each.id)
        yield records.encode(Position(stream=stream, writer=each.writer, epoch=epoch, prev=prev, id=id))
