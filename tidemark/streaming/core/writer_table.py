"""The writers of a stream that have joined. Pure.

A batch *opens* those that it asks for; the others stay packed in two tables, of the active and of the retired, and go
on as the bytes that they are. So does, one by one, who has much pending. Open from the start is who has a little, and
who is active where there are few: a table pays for many.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import islice
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from tidemark.streaming.core.writer_codec import EMPTY, PackedTable, Straggler, WaitingWriter
from tidemark.streaming.core.writers import WriterState
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.runs import UNBOUNDED

FEW = 32  # active writers of a stream that are not packed
MANY = 32  # pending spans of a writer that is packed


class Writers(MutableMapping[str, WriterState]):
    """By name. To look a writer up opens it; to go through all of them opens all. `opened` counts the openings;
    `stored` is the table of the retired as it is kept apart, None where it is not.

    Who makes a writer active again, or sets its chain back, calls `follow`.
    """

    def __init__(
        self,
        opened: Mapping[str, WriterState] | None = None,
        active: PackedTable | None = None,
        retired: PackedTable | None = None,
        waiting: Iterable[WaitingWriter] = (),
    ) -> None:
        self.open = dict(opened or {})
        self.waiting = {it.name: it for it in waiting}
        self.opened = 0
        self.before = {name: (it.epoch, it.retired is not None) for name, it in self.open.items()}
        self._active = _Rest(active or EMPTY)
        self._retired = _Rest(retired or EMPTY)
        self.stored: PackedTable | None = retired or EMPTY
        self._behind: list[tuple[int, str]] | None = None

    def get(self, name: str, default: object = None) -> WriterState | None:  # type: ignore[override]
        return self.open.get(name) or self._open(name)

    def __getitem__(self, name: str) -> WriterState:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, writer: WriterState) -> None:
        self.get(name)
        self.open[name] = writer
        self.follow(name)

    def __delitem__(self, name: str) -> None:
        gone = self.open.pop(name, None) or self.waiting.pop(name, None)
        if gone is None and not (self._active.drop(name) or self._retired.drop(name)):
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.open, *self.waiting, *self._active.names(), *self._retired.names()])

    def __len__(self) -> int:
        return len(self.open) + len(self.waiting) + len(self._active) + len(self._retired)

    def follow(self, name: str) -> None:
        """The writer's chain stands lower than before, or it is active again."""
        if self._behind is not None:
            heappush(self._behind, (self.open[name].chain.position, name))

    def floor(self) -> int | None:
        """The lowest position of an active writer's chain; None where no writer is active."""
        if self._behind is None:
            self._behind = [(it.chain.position, name) for name, it in self.open.items() if it.retired is None]
            heapify(self._behind)
        # Chains go up only, but for those that are followed anew: an entry is never above its writer.
        while self._behind:
            position, name = self._behind[0]
            writer = self.open.get(name)
            if writer is None or writer.retired is not None:
                heappop(self._behind)
            elif writer.chain.position > position:
                heapreplace(self._behind, (writer.chain.position, name))
            else:
                break
        found = [it.position for it in self.waiting.values()]
        if self._behind:
            found.append(self._behind[0][0])
        if (packed := self._active.lowest()) is not None:
            found.append(packed)
        return min(found, default=None)

    def reach(self) -> int:
        """The highest ID that is settled on any chain."""
        waiting, opened = (it.reach for it in self.waiting.values()), (it.chain.reach for it in self.open.values())
        return max([self._active.reach(), self._retired.reach(), *waiting, *opened])

    def stragglers(self, line: int, most: int) -> tuple[list[Straggler], int]:
        """The lowest `most` active writers whose chains have not passed `line`, and how many there are."""
        found, packed = self._active.stragglers(line, most)
        found += [
            Straggler.of(name, it) for name, it in self.open.items() if it.retired is None and it.chain.position <= line
        ]
        found += [
            Straggler(it.position, it.name, it.epoch, it.since, it.seen)
            for it in self.waiting.values()
            if it.position <= line
        ]
        return sorted(found)[:most], len(found) + packed

    def beyond(self, id: int) -> Iterator[tuple[str, WriterState]]:
        """All that have settled anything beyond `id`, and perhaps others."""
        for rest in (self._active, self._retired):
            for name in rest.beyond(id):
                self._open(name)
        for name in [it.name for it in self.waiting.values() if it.reach > id]:
            self._open(name)
        yield from self.open.items()

    def open_waiting(self) -> None:
        """Open all that have anything pending."""
        for name in [*self.waiting]:
            self._open(name)

    def mark_uncertain(self) -> None:
        """Mark all as uncertain."""
        self.open_waiting()
        for writer in self.open.values():
            writer.chain.refuse(UNBOUNDED)
        self._active.mark_uncertain()
        self._retired.mark_uncertain()

    def outlived(self, line: int, kept: int, before: int, touched: Container[str]) -> list[str]:
        """Retired writers that the line has passed and the batch has not touched, longest retired first: those past the
        `kept` newest, and those that retired at `before` (ms) or earlier.
        """
        opened = sorted(
            (it.retired, name)
            for name, it in self.open.items()
            if it.retired is not None and it.position <= line and name not in touched
        )
        if not opened and not len(self._retired):
            return []
        packed, times = self._retired.passed(line)
        expired = int(np.count_nonzero(times <= before)) + sum(since <= before for since, _ in opened)
        many = max(expired, len(opened) + len(packed) - kept)
        if many <= 0:
            return []
        longest = np.argsort(times, kind="stable")[:many]
        found = ((int(times[at]), self._retired.name(int(packed[at]))) for at in longest)
        return [name for _, name in islice(merge(found, opened), many)]

    def packed(self) -> tuple[dict[str, WriterState], PackedTable, PackedTable, list[WaitingWriter]]:
        """Those that stay open, the active and the retired, and who waits, as a new `Writers` takes them."""
        stay, active, retired, waiting = {}, {}, {}, dict(self.waiting)
        for name, writer in sorted(self.open.items()):
            if len(writer.chain.pending) >= MANY and writer.retired is None:
                waiting[name] = WaitingWriter.of(name, writer)
            elif writer.chain.pending or writer.chain.deferred:
                stay[name] = writer
            elif writer.retired is None:
                active[name] = writer
            else:
                retired[name] = writer
        if len(active) + len(self._active) <= FEW:
            if len(self._active):
                active |= self._active.unpacked()
            stay, table = dict(sorted((stay | active).items())), EMPTY
        else:
            table = self._active.changed(active)
        return stay, table, self._retired.changed(retired), sorted(waiting.values(), key=attrgetter("name"))

    def _open(self, name: str) -> WriterState | None:
        waiting = self.waiting.pop(name, None)
        writer = waiting.writer() if waiting else self._active.take(name) or self._retired.take(name)
        if writer is not None:
            self.opened += 1
            self.open[name] = writer
            self.before[name] = writer.epoch, writer.retired is not None
            if writer.retired is None:
                self.follow(name)
        return writer


_NOBODY: Ids = np.empty(0, np.int64)


class _Rest:
    """What of a table is still packed."""

    def __init__(self, table: PackedTable) -> None:
        self._table = table
        self._gone: set[int] = set()
        self._order: Ids | None = None
        self._lowest = 0

    def __len__(self) -> int:
        return len(self._table) - len(self._gone)

    def names(self) -> list[str]:
        return [self.name(at) for at in self._places().tolist()]

    def name(self, at: int) -> str:
        return self._table.name(at)

    def take(self, name: str) -> WriterState | None:
        at = self._find(name)
        if at is None:
            return None
        self._gone.add(at)
        return self._table.writer(at)

    def drop(self, name: str) -> bool:
        at = self._find(name)
        if at is not None:
            self._gone.add(at)
        return at is not None

    def lowest(self) -> int | None:
        """The lowest position of a chain."""
        if not len(self):
            return None
        chains = self._table.columns["chain"]
        if self._order is None:
            self._order = np.argsort(chains)
        while int(self._order[self._lowest]) in self._gone:
            self._lowest += 1
        return int(chains[self._order[self._lowest]])

    def reach(self) -> int:
        return int(self._column("chain").max()) if len(self) else 0

    def stragglers(self, line: int, most: int) -> tuple[list[Straggler], int]:
        """The lowest `most` whose chains have not passed `line`, the first by name of equals, and how many more."""
        if not len(self):
            return [], 0
        chains = self._column("chain")
        places, low = self._places()[chains <= line], chains[chains <= line]
        if more := max(0, len(places) - most):
            highest = np.partition(low, most - 1)[most - 1]
            below = places[low < highest]
            places = np.concatenate((below, places[low == highest][: most - len(below)]))
        return [Straggler.of(self.name(at), self._table.writer(at)) for at in places.tolist()], more

    def beyond(self, id: int) -> list[str]:
        if not len(self):
            return []
        return [self.name(at) for at in self._places()[self._column("chain") > id].tolist()]

    def passed(self, line: int) -> tuple[Ids, Ids]:
        """The places of those whose position is `line` or lower, and when they retired."""
        if not len(self):
            return _NOBODY, _NOBODY
        passed = self._column("position") <= line
        return self._places()[passed], self._column("retired")[passed]

    def mark_uncertain(self) -> None:
        if len(self):
            self._table = self._table.doubted()

    def changed(self, come: Mapping[str, WriterState]) -> PackedTable:
        return self._table.changed(self._gone, come)

    def unpacked(self) -> dict[str, WriterState]:
        return {self.name(at): self._table.writer(at) for at in self._places().tolist()}

    def _find(self, name: str) -> int | None:
        at = self._table.find(name)
        return None if at is None or at in self._gone else at

    def _places(self) -> Ids:
        return np.flatnonzero(self._live()) if self._gone else np.arange(len(self._table))

    def _column(self, name: str) -> Ids:
        column: Ids = self._table.columns[name]
        return column[self._live()] if self._gone else column

    def _live(self) -> npt.NDArray[np.bool_]:
        live = np.ones(len(self._table), np.bool_)
        live[list(self._gone)] = False
        return live
