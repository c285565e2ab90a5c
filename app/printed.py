"""What the verbs print: a table for people, one JSON object for programs."""

from collections.abc import Collection, Sequence

import msgspec


def as_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """A line for the headings and one for each of `rows`; columns whose heading is in `right` end where it ends."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in [headings, *rows]
    ]


def printable(text: str) -> str:
    """What anybody may have written, so that no terminal obeys it: what is no character to be seen comes as its
    escape."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def as_object(found: object) -> str:
    """Of whatever msgspec encodes, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
