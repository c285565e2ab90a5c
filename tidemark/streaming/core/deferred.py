"""Where the edges stand in Kafka that were put off for want of room on their chain, so that they can come again. Pure.

A chain holds a bounded number of spans. An edge that would add one more is not kept but its offset is, in ranges of
which there is a bounded number too: where there are more, neighbours become one. So a range also holds records of
others, and edges that were taken; who recalls it sends on what is its chain's, and what was taken is a duplicate.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from tidemark.common.errors import BadRecord
from tidemark.streaming.wire.records import FactRun, Position, Rdata, Topic, Void, read

RANGES_KEPT = 32  # of each chain: a few hundred bytes in its state; fewer are wider, and more comes again in vain


class DeferredRange(NamedTuple):
    """The records from offset `first` to `last` of the partition in which the stream lives; the two at its ends were
    put off, and perhaps others between. `prev` is the lowest of theirs.
    """

    first: int
    last: int
    prev: int

    def joined(self, other: "DeferredRange") -> "DeferredRange":
        """The smallest range that has both."""
        return DeferredRange(min(self.first, other.first), max(self.last, other.last), min(self.prev, other.prev))


def united(ranges: Iterable[DeferredRange]) -> list[DeferredRange]:
    """The ranges by offset: those that touch as one, then the narrowest pairs, until they are `RANGES_KEPT`."""
    found: list[DeferredRange] = []
    for it in sorted(ranges):
        if found and it.first <= found[-1].last + 1:
            found[-1] = found[-1].joined(it)
        else:
            found.append(it)
    while len(found) > RANGES_KEPT:
        widths = [after.last - before.first for before, after in pairwise(found)]
        at = widths.index(min(widths))
        found[at : at + 2] = [found[at].joined(found[at + 1])]
    return found


def is_edge(value: bytes | None, key: bytes | None, stream: str, writer: str, epoch: int) -> bool:
    """Whether a record of the facts topic has edges of that writer in that epoch: no other comes again."""
    if key != stream.encode():
        return False
    try:
        record = read(value, key, Topic.FACTS)
    except BadRecord:
        return False
    if isinstance(record, Rdata) and record.id == "batch":
        return False
    kinds = Rdata | Void | Position | FactRun
    return isinstance(record, kinds) and (record.writer, record.epoch) == (writer, epoch)
