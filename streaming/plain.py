"""The plain streams of a batch, all at once: numpy on whole arrays, and a few steps a stream. Pure; no Spark.

A stream is *plain* in a batch where nothing of it is pending, held or late before it and after it, and nothing came but
runs that continue their writers' chains: then its line comes as far as IDs are given out. So it is nearly always, and
what `streaming.stream` does then, object by object, is known beforehand. Each stream of which that is not certain is
left to it; the others get the same effects and the same state, byte for byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemark.streaming import joined
from tidemark.streaming.chain import ANNOUNCED_KEPT
from tidemark.streaming.direction import Direction
from tidemark.streaming.edge_columns import EdgeColumns
from tidemark.streaming.effects import StreamEffects, Summary, WriterAdvance, WriterRow
from tidemark.streaming.inbox import Inbox
from tidemark.streaming.model import Bounds
from tidemark.streaming.packed import COLUMNS, Pairs, StoredChain, StoredWriter
from tidemark.streaming.runs import PackedRun
from tidemark.streaming.state import FORMAT, StoredStream, StoredTable, decode_stored, encode_stored
from tidemark.streaming.states import States

_DIRECTIONS = {int(it): it for it in Direction}


class Advanced(NamedTuple):
    """What came of a plain stream; `whole` is its new state with all parts."""

    effects: StreamEffects
    whole: bytes


def advance_plain(inboxes: Mapping[str, Inbox], states: States, now: int, bounds: Bounds) -> dict[str, Advanced]:
    """What came of the streams that are certain to be plain in this batch; `now` is in ms since 1970."""
    found = (_candidate(name, inbox, states.get(name), now, bounds) for name, inbox in inboxes.items())
    candidates = [it for it in found if it is not None]
    if not candidates:
        return {}
    links = [link for it in candidates for link in it.links.values()]
    edges = EdgeColumns.of([it.runs for it in links], [len(it.links) for it in candidates])
    lines, floors, heads = (np.array([getattr(it, name) for it in candidates]) for name in ("line", "floor", "head"))
    plain = edges.reach(lines, floors, heads)
    if not plain.any():
        return {}
    for link, facts, empty in zip(links, *edges.counts(), strict=True):
        link.facts, link.empty = facts, empty
    for at, low, high in edges.declared():
        links[at].declared.append((low, high))
    return {it.name: it.advanced(now) for it, is_plain in zip(candidates, plain.tolist(), strict=True) if is_plain}


class AtRest(NamedTuple):
    """A stream whose line has come as far as IDs are given out, with the positions of its active writers; signed."""

    line: int
    positions: dict[str, int]


def at_rest(data: bytes) -> AtRest | None:
    """None for a state of which anything else is to be told, or that is none of today's format."""
    stored = decode_stored(data)
    if stored is None or stored.transactions or not _is_plain(stored) or _head(stored) != stored.line:
        return None
    sign = -1 if stored.direction == Direction.BACKWARD else 1
    return AtRest(sign * stored.line, {it.name: sign * it.position for it in stored.writers})


class _Link:
    """The runs of one writer, each of which continues the one before, up to `end`.

    Of its edges, `facts` are facts and `empty` is the width of what was `declared` to be without, ascending.
    """

    __slots__ = ("declared", "empty", "end", "facts", "runs", "writer")

    def __init__(self, writer: StoredWriter) -> None:
        self.writer = writer
        self.end = writer.chain.position
        self.runs: list[PackedRun] = []
        self.facts = self.empty = 0
        self.declared: Pairs = []

    def add(self, run: PackedRun, direction: int) -> bool:
        """Whether it continues the chain."""
        if run.start != self.end or run.epoch != self.writer.epoch or run.direction != direction:
            return False
        self.end = int.from_bytes(run.ids[-8:], "little", signed=True)
        self.runs.append(run)
        return True

    def advance(self, sign: int) -> WriterAdvance:
        it, prev = self.writer, self.writer.chain.position
        oldest = min(run.oldest for run in self.runs)
        return WriterAdvance(it.name, it.epoch, sign * prev, sign * self.end, self.facts, self.empty, 0, 0, oldest)

    def stored(self, now: int) -> StoredWriter:
        it, chain = self.writer, self.writer.chain
        return StoredWriter(
            it.name,
            it.epoch,
            StoredChain(self.end, chain.refused, [], _joined(chain.empty, self.declared)[-ANNOUNCED_KEPT:]),
            None,
            [],
            it.published,
            None,
            doubt=False,
            timeline=it.timeline,
            start=it.start,
            seen=max(it.seen, min(max(run.newest for run in self.runs), now)),
        )


def _joined(empty: Pairs, declared: Pairs) -> Pairs:
    """Both, of which the second begins at the end of the first or beyond."""
    if empty and declared and empty[-1][1] == declared[0][0]:
        return [*empty[:-1], (empty[-1][0], declared[0][1]), *declared[1:]]
    return [*empty, *declared]


@dataclass(slots=True)
class _Candidate:
    """A stream that is plain if its IDs are complete from `floor`, below which nobody is open, to `head`, the highest
    that is given out; `before` is that before the batch. `links` are by writer.
    """

    name: str
    stored: StoredStream
    direction: int
    links: dict[str, _Link]
    before: int
    floor: int
    head: int

    @property
    def line(self) -> int:
        return self.stored.line

    def advanced(self, now: int) -> Advanced:
        stored, links, head = self.stored, self.links, self.head
        sign = -1 if self.direction == Direction.BACKWARD else 1
        advances = [links[name].advance(sign) for name in sorted(links)]
        transactions = dict(sorted(stored.transactions.items()))
        encoded = encode_stored(
            StoredStream(
                FORMAT,
                self.direction,
                stored.home,
                head,
                b"",
                [links[it.name].stored(now) if it.name in links else it for it in stored.writers],
                [],
                stored.timeline,
                stored.database,
                stored.ended,
                None,
                None,
                stored.refused,
                stored.began,
                stored.here,
                transactions,
            ),
            stored.apart,
        )
        effects = StreamEffects(
            self.name,
            _DIRECTIONS[self.direction],
            sign * stored.line,
            sign * head,
            sign * self.before,
            sign * head,
            advances,
            [WriterRow(it.writer, it.epoch, it.id, retired=False) for it in advances],
            [],
            [],
            [],
            [],
            [],
            [],
            {"applied": sum(len(run.kinds) for link in links.values() for run in link.runs)},
            Summary(0, 0, None, [], 0, None, transactions),
            encoded.state,
        )
        return Advanced(effects, encoded.whole)


def _candidate(name: str, inbox: Inbox, data: bytes | None, now: int, bounds: Bounds) -> _Candidate | None:
    if data is None or inbox.refused or inbox.apart or inbox.control or len(inbox.facts) != 1:
        return None
    stored = decode_stored(data)
    if stored is None or not _is_plain(stored):
        return None
    runs = _runs(stored, inbox)
    direction = stored.direction or runs[0].direction if runs else 0
    links = _links(stored, runs, direction)
    if not links:
        return None
    if stored.apart is not None:
        own, retired = bounds.of(name), _columns(stored.apart)["retired"]
        if len(retired) > own.retired or int(retired.min()) <= now - own.retirement:
            return None
    before = _head(stored)
    ends = [links[it.name].end if it.name in links else it.chain.position for it in stored.writers]
    return _Candidate(name, stored, direction, links, before, max(stored.line, min(ends)), max(before, *ends))


def _is_plain(stored: StoredStream) -> bool:
    """Whether all of it is positions of active writers, and what no run changes."""
    if stored.completed or stored.held or stored.active or stored.retired or stored.waiting or stored.ended is None:
        return False
    for it in stored.writers:  # no generator: a start asks this of each stream, of which there may be a million
        if it.chain.pending or it.chain.put_off or it.retired is not None:
            return False
    return len(stored.writers) <= joined.FEW


def _head(stored: StoredStream) -> int:
    """The highest ID that is given out."""
    retired = 0 if stored.apart is None else int(_columns(stored.apart)["chain"].max())
    return max([stored.line, retired, *(it.chain.position for it in stored.writers)])


def _columns(table: StoredTable) -> npt.NDArray[np.void]:
    return np.frombuffer(table.columns, COLUMNS)


def _runs(stored: StoredStream, inbox: Inbox) -> list[PackedRun]:
    """In the order in which they are fed; empty where anything else came, or elsewhere."""
    ((_, partition), items), *_ = inbox.facts.items()
    runs = [it for it in items if isinstance(it, PackedRun)]
    if partition != stored.home or len(runs) < len(items):
        return []
    return sorted(runs, key=attrgetter("first_offset"))


def _links(stored: StoredStream, runs: list[PackedRun], direction: int) -> dict[str, _Link]:
    """By writer what continues its chain; empty where anything does not."""
    writers = {it.name: it for it in stored.writers}
    links: dict[str, _Link] = {}
    for run in runs:
        if (link := links.get(run.writer)) is None:
            if (writer := writers.get(run.writer)) is None or not _may_go_on(writer, stored.timeline):
                return {}
            link = links[run.writer] = _Link(writer)
        if not link.add(run, direction):
            return {}
    return links


def _may_go_on(writer: StoredWriter, timeline: int) -> bool:
    position, empty = writer.chain.position, writer.chain.empty
    return (
        not writer.late
        and writer.published <= position
        and writer.timeline == timeline
        and (not empty or empty[-1][1] <= position)
    )
