"""A sentinel beside each follower: whether the advances on a stream's list in Redis keep what docs/design.md promises.

It looks at entries as they stand there, before the follower joins them and repairs what is missing, so that what went
wrong in the writing is seen although no reader suffers. What it cannot know it takes for good: where a list began anew,
and where an entry that it saw last is gone, each writer's chain begins with its next entry. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tidemark.sinks.reader import Answer, ListEntry, ReadList, ReadNewest, StreamKeys
from tidemark.streaming.values.direction import beyond

FaultKind = Literal["hole", "overlap", "regress", "empty"]
FAULT_KINDS: tuple[FaultKind, ...] = ("hole", "overlap", "regress", "empty")
NO_LIST = "0-0"  # Postgres told, and may be ahead of Redis for a while
EVIDENCE = ("facts", "empty", "unseen", "skipped")


@dataclass(frozen=True, slots=True)
class ChainFault:
    """What breaks a rule. `entry` names it on the list; `prev` and `id` are its range, and the writer had come to
    `reached`. Of the line, which has no writer, `reached` is where it was and `id` where it is.

    `hole`: IDs between two advances of a writer that are in neither. `overlap`: IDs that are in both. `regress`: an
    advance to where the writer was already, or before it; or the line went back. `empty`: an advance over no ID, or
    without any evidence.
    """

    kind: FaultKind
    writer: str | None
    prev: int
    id: int
    reached: int | None
    entry: str


class Sentinel:
    """Of one stream. Each fault is told once: the chain goes on from the entry that had it."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}
        self._line: int | None = None
        self._last: str | None = None

    def look(self, request: ReadList | ReadNewest, found: Answer) -> Iterator[ChainFault]:
        """The faults of what was read; to be taken from it before the next call."""
        assert isinstance(found, StreamKeys)
        after = request.after.name if isinstance(request, ReadList) and request.after else None
        if after is None or after != self._last or not found.joined:
            self._reached.clear()
            self._last = None
        for entry in found.entries:
            self._last = entry.name
            if entry.fields["kind"] == "POSITION":
                yield from self._advance(entry)
        if found.linear is not None and found.last != NO_LIST:
            line, self._line = self._line, found.linear
            if line is not None and beyond(line, found.linear):
                yield ChainFault("regress", None, line, found.linear, line, found.last)

    def _advance(self, entry: ListEntry) -> Iterator[ChainFault]:
        writer, prev, id = entry.fields["writer"], int(entry.fields["prev"]), int(entry.fields["id"])
        reached = self._reached.get(writer)
        kind: FaultKind | None = None
        if not beyond(id, prev) or not any(int(entry.fields[count]) for count in EVIDENCE):
            kind = "empty"
        elif reached is None or prev == reached:
            pass
        elif not beyond(id, reached):
            kind = "regress"
        else:
            kind = "hole" if beyond(prev, reached) else "overlap"
        if kind is not None:
            yield ChainFault(kind, writer, prev, id, reached, entry.name)
        if reached is None or beyond(id, reached):
            self._reached[writer] = id
