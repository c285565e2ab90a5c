"""The plain streams of a batch, all at once: numpy on whole arrays, and a few steps a stream. Pure; no Spark.

A stream is *plain* in a batch where nothing of it is pending, held or late before it and after it, and nothing came but
runs that continue their writers' chains: then its line comes as far as IDs are given out. So it is nearly always, and
what `core.stream` does then, object by object, is known beforehand. Each stream of which that is not certain is
left to it; the others get the same effects and the same state, byte for byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemark.streaming.core import writer_table as joined
from tidemark.streaming.core.chain import ANNOUNCED_KEPT
from tidemark.streaming.core.codec import FORMAT, StoredStream, StoredTable, decode_stored, encode_stored
from tidemark.streaming.core.effects import StreamEffects, Summary, WriterAdvance, WriterRow
from tidemark.streaming.core.store import States
from tidemark.streaming.core.stream_input import Inbox
from tidemark.streaming.core.writer_codec import COLUMNS, StoredChain, StoredWriter
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import Ascending, Ids, are_different, extended, last_of
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.runs import POSITION, RDATA, Mask, RunColumns

_NONE: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class EdgeColumns:
    """Edges of some streams, link by link: a link begins at each of `firsts`, with an edge from one of `starts`, and a
    stream at each of `begins`. IDs ascend along a link.
    """

    ids: Ids
    kinds: npt.NDArray[np.uint8]
    starts: Ids
    firsts: Ids
    begins: Ids
    _others: Ids = field(init=False)
    """Where the edges are that are no facts."""
    _prevs: Ids = field(init=False)
    """Where each edge begins."""

    def __post_init__(self) -> None:
        self._others = np.flatnonzero(self.kinds != RDATA)
        self._prevs = np.empty_like(self.ids)
        self._prevs[1:] = self.ids[:-1]
        self._prevs[self.firsts] = self.starts

    def reach(self, lines: Ids, floors: Ids, heads: Ids) -> Mask:
        """For each stream whether its line goes to its head: all IDs beyond its floor are completed, each of them once
        and none of those that its line had passed.
        """
        announced = self._others[self.kinds[self._others] == POSITION]
        counts = np.diff(self.begins, append=len(self.ids))
        above = self.ids > np.repeat(floors, counts)
        above[announced] = False
        completed = np.bincount(self._streams(np.flatnonzero(above)), minlength=len(lines))
        reached: Mask = completed == heads - floors
        if np.any(self.ids[self.firsts] <= lines[self._streams(self.firsts)]):
            passed = self.ids <= np.repeat(lines, counts)
            passed[announced] = False
            reached[self._streams(np.flatnonzero(passed))] = False
        if len(self.firsts) > len(self.begins):
            reached[self._repeated(counts, announced, lines, heads)] = False
        return reached

    def _repeated(self, counts: Ids, announced: Ids, lines: Ids, heads: Ids) -> Ids:
        """The streams in which an ID is completed twice; all of them, where side by side their IDs take 62 bits."""
        # Streams side by side, each with room for what lies between its line and its head.
        rooms = heads - lines
        if rooms.sum(dtype=np.float64) >= 2**62:
            return np.arange(len(rooms))
        places = self.ids + np.repeat(np.cumsum(rooms) - rooms - lines, counts)
        if len(announced):
            places = np.delete(places, announced)
        if are_different(places):
            return _NONE
        streams = self._streams(np.delete(np.arange(len(self.ids)), announced))
        order = np.argsort(places, kind="stable")
        repeated: Ids = streams[order[1:][places[order[1:]] == places[order[:-1]]]]
        return repeated

    def counts(self) -> tuple[list[int], list[int]]:
        """By link how many facts there are, and how wide what was declared void or announced is."""
        others, links = self._others, self._links(self._others)
        facts = np.diff(self.firsts, append=len(self.ids)) - np.bincount(links, minlength=len(self.firsts))
        widths = np.where(self.kinds[others] == POSITION, self.ids[others] - self._prevs[others], 1)
        empty = np.zeros(len(self.firsts), np.int64)
        np.add.at(empty, links, widths)
        return facts.tolist(), empty.tolist()

    def declared(self, most: int) -> list[tuple[int, Ascending]]:
        """By link where its writer says that it has no facts (`Run.empty`): of each the highest `most` ranges."""
        highs = self.ids - (self.kinds == RDATA)
        places = np.flatnonzero(self._prevs < highs)
        if not len(places):
            return []
        links, lows, highs = self._links(places), self._prevs[places], highs[places]
        first = np.flatnonzero(np.concatenate(([True], (links[1:] != links[:-1]) | (lows[1:] > highs[:-1]))))
        last = np.append(first[1:], len(links)) - 1
        links, lows, highs = links[first], lows[first], highs[last]  # what touches is one
        kept = np.arange(len(links)) >= np.searchsorted(links, links, side="right") - most
        links, lows, highs = links[kept], lows[kept], highs[kept]
        firsts = np.flatnonzero(np.concatenate(([True], links[1:] != links[:-1])))
        return list(zip(links[firsts].tolist(), Ascending.all_of(lows, highs, firsts), strict=True))

    def _links(self, places: Ids) -> Ids:
        """Of these edges the links."""
        return np.searchsorted(self.firsts, places, side="right") - 1

    def _streams(self, places: Ids) -> Ids:
        """Of these edges the streams."""
        return np.searchsorted(self.begins, places, side="right") - 1


class Link(NamedTuple):
    """What came of one writer: `writer` is its number among those of all candidates, `end` where its chain gets to. Of
    its edges, `facts` are facts and `empty` is the width of what was void or announced. `declared` are the newest
    ranges in which the writer says that it has no facts.
    """

    writer: int
    end: int
    facts: int
    empty: int
    oldest: int
    newest: int
    declared: Ascending | None


class Candidate(NamedTuple):
    """A stream that may be plain; its first writer has the number `first` among those of all candidates."""

    name: str
    stored: StoredStream
    first: int


class Plain(NamedTuple):
    """A candidate that is plain. `before` and `head` are the highest IDs that were and are given out, `edges` are those
    of all its `links`.
    """

    candidate: Candidate
    direction: int
    before: int
    head: int
    edges: int
    links: list[Link]


@dataclass(frozen=True, slots=True)
class Links:
    """The runs of `candidates`, writer by writer, and of each writer each where the one before ends. Of each run its
    number among the `columns`, that of its writer, and its candidate's (`owners`).

    The others are of the candidates: `befores` and `heads` as in `Plain`, and `floors`, below which nobody is open.
    """

    candidates: list[Candidate]
    columns: RunColumns
    runs: Ids
    writers: Ids
    owners: Ids
    directions: Ids
    befores: Ids
    floors: Ids
    heads: Ids

    @classmethod
    def of(cls, candidates: list[Candidate], columns: RunColumns, runs: Ids, writers: Ids) -> "Links":
        order = np.lexsort((columns.rows["start"][runs], writers))
        runs, writers = runs[order], writers[order]
        rows, ends = columns.rows[runs], columns.ids[columns.rows["stop"][runs] - 1]
        stored = [it.stored for it in candidates]
        positions = np.array([it.chain.position for of in stored for it in of.writers])
        firsts = np.array([it.first for it in candidates])
        owners = np.searchsorted(firsts, writers, side="right") - 1
        directions = np.array([it.direction for it in stored])
        unknown = directions[owners] == Direction.UNKNOWN
        directions[owners[unknown]] = rows["direction"][unknown]
        # Whatever does not continue its writer's chain, as it came, makes its stream none that is plain.
        begins, offsets = np.concatenate(([0], ends[:-1])), rows["first_offset"]
        first = _begin(writers)
        begins[first] = positions[writers[first]]
        epochs = np.array([it.epoch for of in stored for it in of.writers])
        good = (rows["start"] == begins) & (rows["epoch"] == epochs[writers])
        good &= rows["direction"] == directions[owners]
        good &= first | (offsets >= np.concatenate(([0], offsets[:-1])))
        befores = np.maximum(np.maximum.reduceat(positions, firsts), [beside(it) for it in stored])
        positions[writers] = ends  # the last of each counts
        floors = np.maximum(np.minimum.reduceat(positions, firsts), [it.linear for it in stored])
        heads = np.maximum(np.maximum.reduceat(positions, firsts), befores)
        found = cls(candidates, columns, runs, writers, owners, directions, befores, floors, heads)
        return found if good.all() else found._without({*owners[~good].tolist()})

    def plain(self) -> Iterator[Plain]:
        """Each candidate that is plain."""
        if not self.candidates:
            return
        rows, begins = self.columns.rows[self.runs], self.columns.begins[self.runs]
        lengths = rows["stop"] - begins
        first = np.flatnonzero(_begin(self.writers))
        starts_at = np.cumsum(lengths) - lengths
        owners = self.owners[first]
        of_stream = np.flatnonzero(_begin(owners))
        edges = EdgeColumns(
            *_edges(self.columns, begins.tolist(), rows["stop"].tolist()),
            rows["start"][first],
            starts_at[first],
            starts_at[first][of_stream],
        )
        plain = edges.reach(np.array([it.stored.linear for it in self.candidates]), self.floors, self.heads)
        declared: list[Ascending | None] = [None] * len(first)
        for at, ranges in edges.declared(ANNOUNCED_KEPT):
            declared[at] = ranges
        numbers = (
            self.writers[first],
            self.columns.ids[rows["stop"][np.append(first[1:], len(rows)) - 1] - 1],
            *map(np.array, edges.counts()),
            np.minimum.reduceat(rows["oldest"], first),
            np.maximum.reduceat(rows["newest"], first),
        )
        links = [*map(Link, *(it.tolist() for it in numbers), declared)]
        for it, is_plain, direction, before, head, count, at, end in zip(
            self.candidates,
            plain.tolist(),
            self.directions.tolist(),
            self.befores.tolist(),
            self.heads.tolist(),
            np.add.reduceat(lengths, first[of_stream]).tolist(),
            of_stream.tolist(),
            [*of_stream[1:].tolist(), len(links)],
            strict=True,
        ):
            if is_plain:
                yield Plain(it, direction, before, head, count, links[at:end])

    def _without(self, bad: set[int]) -> "Links":
        """Without these candidates."""
        kept = np.array([at not in bad for at in range(len(self.candidates))])
        those = kept[self.owners]
        return Links(
            [it for at, it in enumerate(self.candidates) if at not in bad],
            self.columns,
            self.runs[those],
            self.writers[those],
            (np.cumsum(kept) - 1)[self.owners[those]],
            *(it[kept] for it in (self.directions, self.befores, self.floors, self.heads)),
        )


def _begin(numbers: Ids) -> Mask:
    """Which are not the same as the one before."""
    return np.concatenate(([True], numbers[1:] != numbers[:-1]))


def _edges(columns: RunColumns, begins: list[int], stops: list[int]) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """IDs and kinds of some runs, end to end."""
    ids, kinds = columns.ids.data, columns.kinds.data
    parts = [slice(*bounds) for bounds in zip(begins, stops, strict=True)]
    joined = b"".join([ids[part] for part in parts]), b"".join([kinds[part] for part in parts])
    return np.frombuffer(joined[0], np.int64), np.frombuffer(joined[1], np.uint8)


def beside(stored: StoredStream) -> int:
    """The highest that anything but an active writer shows to be given out."""
    retired = 0 if stored.retired is None else int(columns_of(stored.retired)["chain"].max())
    return max(stored.linear, retired)


def columns_of(table: StoredTable) -> npt.NDArray[np.void]:
    return np.frombuffer(table.columns, COLUMNS)


_DIRECTIONS = {int(it): it for it in Direction}


class Advanced(NamedTuple):
    """What came of a plain stream; `whole` is its new state with all parts."""

    effects: StreamEffects
    whole: bytes


def advance_plain(
    inboxes: Mapping[str, Inbox], columns: RunColumns, states: States, now: int, bounds: Bounds
) -> dict[str, Advanced]:
    """What came of the streams that are certain to be plain in this batch; `now` is in ms since 1970."""
    candidates: list[Candidate] = []
    chosen: list[int] = []
    slots: list[int] = []
    writers = 0
    for name, inbox in inboxes.items():
        stored = _stored(name, inbox, states.get(name), now, bounds)
        if stored is None:
            continue
        (runs,) = inbox.runs.values()
        of_runs = _slots(stored, [columns.writers[at] for at in runs], writers)
        if of_runs:
            candidates.append(Candidate(name, stored, writers))
            writers += len(stored.writers)
            chosen += runs
            slots += of_runs
    if not candidates:
        return {}
    links = Links.of(candidates, columns, np.array(chosen), np.array(slots))
    return {it.candidate.name: _advanced(it, now) for it in links.plain()}


def _advanced(plain: Plain, now: int) -> Advanced:
    (name, stored, first), direction, before, head, edges, links = plain
    writers = [*stored.writers]
    sign = -1 if direction == Direction.BACKWARD else 1
    advances = [_advance(it, writers[it.writer - first], sign) for it in links]
    for it in links:
        writers[it.writer - first] = _moved(writers[it.writer - first], it, now)
    transactions = dict(sorted(stored.transactions.items()))
    encoded = encode_stored(
        StoredStream(
            FORMAT,
            direction,
            stored.home,
            head,
            b"",
            writers,
            [],
            stored.timeline,
            stored.database,
            stored.ended,
            None,
            stored.refused,
            stored.began,
            stored.here,
            transactions,
            [],
            [],
        ),
        stored.retired,
    )
    effects = StreamEffects(
        name,
        _DIRECTIONS[direction],
        sign * stored.linear,
        sign * head,
        sign * before,
        sign * head,
        advances,
        [WriterRow(it.writer, it.epoch, it.id, retired=False) for it in advances],
        [],
        [],
        [],
        [],
        [],
        [],
        {"applied": edges},
        Summary(0, 0, None, [], 0, None, transactions),
        encoded.state,
    )
    return Advanced(effects, encoded.whole)


def _advance(link: Link, it: StoredWriter, sign: int) -> WriterAdvance:
    prev, end = sign * it.chain.position, sign * link.end
    return WriterAdvance(it.name, it.epoch, prev, end, link.facts, link.empty, 0, 0, link.oldest)


def _moved(it: StoredWriter, link: Link, now: int) -> StoredWriter:
    return StoredWriter(
        it.name,
        it.epoch,
        StoredChain(link.end, it.chain.refused, [], extended(it.chain.empty, link.declared, ANNOUNCED_KEPT), []),
        None,
        [],
        it.published,
        it.timeline,
        it.start,
        max(it.seen, now),
        it.joined,
    )


class AtRest(NamedTuple):
    """A stream whose line has come as far as IDs are given out, with the positions of its active writers; signed."""

    line: int
    positions: dict[str, int]


def at_rest(data: bytes) -> AtRest | None:
    """None for a state of which anything else is to be told."""
    stored = decode_stored(data)
    if stored.transactions or not _is_plain(stored) or _head(stored) != stored.linear:
        return None
    sign = -1 if stored.direction == Direction.BACKWARD else 1
    return AtRest(sign * stored.linear, {it.name: sign * it.position for it in stored.writers})


def _stored(name: str, inbox: Inbox, data: bytes | None, now: int, bounds: Bounds) -> StoredStream | None:
    """A state that is plain, and of which nothing came but runs, where its stream is at home."""
    if data is None or inbox.facts or inbox.refused or inbox.apart or inbox.control or len(inbox.runs) != 1:
        return None
    stored = decode_stored(data)
    if not _is_plain(stored):
        return None
    if stored.retired is not None:
        own, retired = bounds.of(name), columns_of(stored.retired)["retired"]
        if len(retired) > own.retired or int(retired.min()) <= now - own.retirement:
            return None
    ((_, partition),) = inbox.runs
    return stored if partition == stored.home else None


def _slots(stored: StoredStream, names: list[str], first: int) -> list[int]:
    """The numbers of these writers, counted from `first`; empty where one of them does nothing that is plain."""
    numbers = {it.name: number for number, it in enumerate(stored.writers, first)}
    found = [numbers.get(name, -1) for name in names]
    for number in {*found}:
        if number < 0 or not _may_go_on(stored.writers[number - first], stored.timeline):
            return []
    return found


def _is_plain(stored: StoredStream) -> bool:
    """Whether all of it is positions of active writers, and what no run changes."""
    if stored.completed or stored.unjoined or stored.active or stored.waiting:
        return False
    for it in stored.writers:  # no generator: a start asks this of each stream, of which there may be a million
        if it.chain.pending or it.chain.deferred or it.retired is not None:
            return False
    return len(stored.writers) <= joined.FEW


def _head(stored: StoredStream) -> int:
    """The highest ID that is given out."""
    return max([beside(stored), *(it.chain.position for it in stored.writers)])


def _may_go_on(writer: StoredWriter, timeline: int) -> bool:
    position = writer.chain.position
    return (
        not writer.late
        and writer.published <= position
        and writer.timeline == timeline
        and last_of(writer.chain.empty) <= position
    )
