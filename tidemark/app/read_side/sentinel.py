"""Checks the advances on a stream's list in Redis against the rules of docs/design.md, for each follower. Pure.

It reads entries as they are on the list, before the follower joins them and repairs what is missing. So a mistake in
writing is seen although no reader suffers. At the start of a list, and after an entry that is gone, the chain of each
writer begins with its next entry.
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
    """An entry that breaks a rule.

    `hole`: IDs between two advances of a writer are in neither. `overlap`: IDs are in both. `regress`: an advance to
    where the writer was before, or below; or the linear position went back. `empty`: an advance over no ID, or without
    any evidence.

    Attributes:
        writer: None for the linear position.
        reached: where the writer was; for the linear position, where it was, and `id` is where it is.
        entry: the name of the entry on the list.
    """

    kind: FaultKind
    writer: str | None
    prev: int
    id: int
    reached: int | None
    entry: str


class Sentinel:
    """Checks one stream. Each fault is reported once: the chain continues from the entry that had it."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}
        self._line: int | None = None
        self._last: str | None = None

    def look(self, request: ReadList | ReadNewest, keys: Answer) -> Iterator[ChainFault]:
        """The faults of what was read. Take all of them before the next call."""
        assert isinstance(keys, StreamKeys)
        after = request.after.name if isinstance(request, ReadList) and request.after else None
        if after is None or after != self._last or not keys.joined:
            self._reached.clear()
            self._last = None
        for entry in keys.entries:
            self._last = entry.name
            if entry.fields["kind"] == "POSITION":
                yield from self._advance(entry)
        if keys.linear is not None and keys.last != NO_LIST:
            before, self._line = self._line, keys.linear
            if before is not None and beyond(before, keys.linear):
                yield ChainFault("regress", None, before, keys.linear, before, keys.last)

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
