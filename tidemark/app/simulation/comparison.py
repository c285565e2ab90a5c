"""Holds what a reader was handed of a stream against the facts that are there. Pure; IDs are magnitudes.

A row is told by its mark, because an ID that a database gave out again stands for another fact than before.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from tidemark.sinks.reader import Mode


class FactRow(NamedTuple):
    """A row of a fact, as its writer committed it."""

    id: int
    writer: str
    mark: Hashable


class HandedRow(NamedTuple):
    """A row as a reader was handed it; `late`: for a late completion."""

    id: int
    writer: str
    mark: Hashable
    late: bool = False


class Stand(NamedTuple):
    """Where a reader says that it stands."""

    linear: int
    positions: Mapping[str, int]

    def passed(self, row: FactRow) -> bool:
        return row.id <= self.positions.get(row.writer, self.linear)


@dataclass(frozen=True, slots=True)
class ReadCount:
    """What is `written` for one reader, and not `read`, is yet to come; `missed` was passed without being read."""

    reader: str
    written: int = 0
    read: int = 0
    missed: int = 0
    doubled: int = 0
    disordered: int = 0

    @property
    def right(self) -> bool:
        return not (self.missed or self.doubled or self.disordered)

    @property
    def complete(self) -> bool:
        return self.right and self.read == self.written

    @property
    def figures(self) -> tuple[int, ...]:
        return astuple(self)[1:]

    def __add__(self, other: Self) -> Self:
        return type(self)(self.reader, *map(sum, zip(self.figures, other.figures, strict=True)))


def table(counts: Sequence[ReadCount], *further: str) -> str:
    """For people: a line for each; `further` columns are what else is counted."""
    columns = ("WRITTEN", "READ", "MISSED", "DOUBLED", "OUT OF ORDER", *further)
    lines = [" ".join(["READER  ", *(f"{column:>12}" for column in columns)])]
    lines += [" ".join([f"{it.reader:8}", *(f"{figure:12}" for figure in it.figures)]) for it in counts]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Count(ReadCount):
    """Facts of all streams.

    `doubled` are facts of which it was handed more rows than there are, `disordered` rows below an earlier one (of the
    same writer, for the vector). What a database that went back explains is none of them: `late` facts came with their
    late completion, `again` are those of them that had been read before, and
    `lost` were read, and are not there any more.
    """

    late: int = 0
    again: int = 0
    lost: int = 0

    def __str__(self) -> str:
        told = (
            f"{self.reader}: {self.written} facts written, {self.read} read, {self.missed} missed,"
            f" {self.doubled} doubled, {self.disordered} out of order"
        )
        explained = {"late": self.late, "again": self.again, "lost": self.lost}
        return ", ".join([told, *(f"{count} {what}" for what, count in explained.items() if count)])


@dataclass(frozen=True)
class Comparison:
    """One stream and one reader. `handed` is in the order in which it was.

    `back`: the ID beyond which a database that went back tells its facts again, None where it never did. What is beyond
    may be late, so it is not `missed` until `final`; it went back `times` times, and is late each time.
    """

    reader: Mode
    facts: Sequence[FactRow]
    handed: Sequence[HandedRow]
    stand: Stand
    back: int | None
    final: bool = False
    times: int = 1

    def count(self) -> Count:
        return Count(
            self.reader,
            len({row.id for row in self.facts}),
            len({row.id for row in self.facts} - self._unread),
            len({row.id for row in self.facts if row.id in self._unread and self._missed(row)}),
            len(self._doubled - self._again) + (0 if self.back is not None else len(self.strangers)),
            self._disordered(),
            len({row.id for row in self.handed if row.late}),
            len(self._again),
            0 if self.back is None else len(self.strangers),
        )

    def up_to(self, id: int) -> "Comparison":
        facts = [row for row in self.facts if row.id <= id]
        return replace(self, facts=facts, handed=[row for row in self.handed if row.id <= id])

    @property
    def marks(self) -> set[Hashable]:
        """Those of the rows that were handed over."""
        return {row.mark for row in self.handed}

    @cached_property
    def strangers(self) -> set[int]:
        """IDs that were handed over with rows that are not there."""
        marks = {row.mark for row in self.facts}
        return {row.id for row in self.handed if row.mark not in marks}

    @cached_property
    def _unread(self) -> set[int]:
        handed = self.marks
        return {row.id for row in self.facts if row.mark not in handed}

    def _missed(self, row: FactRow) -> bool:
        excused = self.back is not None and row.id > self.back and not self.final
        return self.stand.passed(row) and not excused

    @cached_property
    def _doubled(self) -> set[int]:
        return _more_often(1, self.handed)

    @cached_property
    def _again(self) -> set[int]:
        """Read in its order, and then for its late completions, one for each time that the database went back."""
        if self.back is None:
            return set()
        wrong = _more_often(1, (row for row in self.handed if not row.late))
        wrong |= _more_often(self.times, (row for row in self.handed if row.late))
        return {id for id in self._doubled - wrong if id > self.back}

    def _disordered(self) -> int:
        reached: dict[str, int] = {}
        below = 0
        for row in self.handed:
            if not row.late:
                line = row.writer if self.reader == "vector" else ""
                below += row.id < reached.get(line, 0)
                reached[line] = max(row.id, reached.get(line, 0))
        return below


def _more_often(times: int, rows: Iterable[HandedRow]) -> set[int]:
    counted = Counter((row.id, row.mark) for row in rows)
    return {id for (id, _), count in counted.items() if count > times}
