"""Streams that may be plain, and what came of their writers: linked run to run, all at once. Pure: numpy on columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemark.streaming.core.chain import ANNOUNCED_KEPT
from tidemark.streaming.core.codec import StoredStream, StoredTable
from tidemark.streaming.core.edge_columns import EdgeColumns
from tidemark.streaming.core.writer_codec import COLUMNS
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import Ascending, Ids
from tidemark.streaming.wire.run_codec import RunColumns
from tidemark.streaming.wire.runs import Mask


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
        floors = np.maximum(np.minimum.reduceat(positions, firsts), [it.line for it in stored])
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
        plain = edges.reach(np.array([it.stored.line for it in self.candidates]), self.floors, self.heads)
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
    retired = 0 if stored.apart is None else int(columns_of(stored.apart)["chain"].max())
    return max(stored.line, retired)


def columns_of(table: StoredTable) -> npt.NDArray[np.void]:
    return np.frombuffer(table.columns, COLUMNS)
