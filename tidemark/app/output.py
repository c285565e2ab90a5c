"""What the verbs print: a table for people, one JSON object for programs."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WIDEST: Final = 48  # characters of a column, which the longest name would widen for all others


def as_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """A line for the headings and one for each of `rows`; columns whose heading is in `right` end where it ends. All
    but the last are cut in their middle where they are too wide."""
    rows = [[*map(_cut, row[:-1]), *row[-1:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in [headings, *rows]
    ]


def _cut(cell: str) -> str:
    half = WIDEST // 2
    return cell if len(cell) <= WIDEST else f"{cell[: half - 1]}…{cell[len(cell) - half :]}"


def printable(text: str) -> str:
    """What anybody may have written, so that no terminal obeys it: what is no character to be seen comes as its
    escape."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def for_people(lines: Iterable[str]) -> str:
    """Lines, each of them `printable`."""
    return "\n".join(map(printable, lines))


def one_line(problem: Exception) -> str:
    """What it says, whatever line breaks it has."""
    return " ".join(str(problem).split())


def counted(number: int, singular: str) -> str:
    """The number with its noun: `1 record`, `2 records`."""
    return f"{number} {singular if number == 1 else singular + 's'}"


def plain(it: "DataclassInstance") -> dict[str, Any]:
    """Its fields, as they are."""
    return {field.name: getattr(it, field.name) for field in fields(it)}


def as_object(found: object) -> str:
    """Of whatever msgspec encodes, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def ids_between(low: int, top: int) -> str:
    """The signed IDs in `(low, top]`."""
    first = low + 1 if top > 0 else low - 1
    return str(first) if first == top else f"{first}..{top}"


def aged(seconds: float) -> str:
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 2 * 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h"


def clock(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
