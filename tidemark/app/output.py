"""The output of commands: tables and sentences for people, one JSON object for programs.

On a terminal, the output has colours and progress bars, and fits the width. A pipe or a file gets plain text.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TextIO

import click
import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_CELL_CHARS: Final = 48  # of a cell before the last column
MIN_CELL_CHARS: Final = 12  # cells are not cut to fewer characters, even on a narrow terminal
CLEAR_LINE: Final = "\r\x1b[K"
"""Terminal code that clears the current line, which may show a progress bar."""
_HEADING_PATTERN: Final = re.compile(r"[A-Z][A-Z ()]*$")
_PROBLEM_PATTERN: Final = re.compile(r"problem: |failed ")
_COMMAND_PATTERN: Final = re.compile(r" {4}(.*\btidemark |select |rollback )")


# ---- tables and lines


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right_aligned: Collection[str] = (),
    width: int | None = None,
) -> list[str]:
    """Align cells in columns. Returns a line for the headings and a line for each row.

    A long cell is cut in the middle. A long cell of the last column is cut at its end, if lines have a maximum width.

    Args:
        headings: the heading of each column.
        rows: the cells of each row.
        right_aligned: the headings of the columns that are aligned to the right.
        width: the maximum width of a line in characters. None: the width of the terminal; if there is no terminal, the
            width has no maximum.
    """
    width = terminal_width() if width is None else width
    limit = MAX_CELL_CHARS
    while True:
        cells = [[*(_shorten(cell, limit) for cell in row[:-1]), *row[-1:]] for row in rows]
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        before_last = sum(widths[:-1]) + 2 * (len(widths) - 1)
        if width is None or before_last + min(widths[-1], MIN_CELL_CHARS) <= width or limit <= MIN_CELL_CHARS:
            break
        limit -= 4
    lines = [
        "  ".join(
            cell.rjust(size) if heading in right_aligned else cell.ljust(size)
            for heading, cell, size in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in [headings, *cells]
    ]
    return lines if width is None else [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _shorten(cell: str, limit: int) -> str:
    half = limit // 2
    return cell if len(cell) <= limit else f"{cell[: half - 1]}…{cell[len(cell) - half :]}"


def terminal_width() -> int | None:
    """The width of the terminal in characters; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None


def escape_unprintable(text: str) -> str:
    """Escape the characters of `text` that are not printable, also line breaks. So a terminal does not execute
    untrusted text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def join_escaped(lines: Iterable[str]) -> str:
    """Join lines to one text, after the characters of each line that are not printable are escaped."""
    return "\n".join(map(escape_unprintable, lines))


def one_line(problem: Exception) -> str:
    """The text of an error as one line. A line break or other white space becomes one space."""
    return " ".join(str(problem).split())


# ---- numbers, IDs and durations: one format in every verb; `common.timestamps` formats times


def count(number: int, singular: str) -> str:
    """The number with its noun: `1 record`, `2 records`."""
    return f"{number} {singular if number == 1 else plural(singular)}"


def applied_migrations(versions: Sequence[int]) -> str:
    """The result of a migration as text. `versions`: the migrations that were applied now; may be empty."""
    if not versions:
        return "the schema is up to date"
    return f"applied {'migration' if len(versions) == 1 else 'migrations'} {', '.join(map(str, versions))}"


def plural(noun: str) -> str:
    """The plural of an English noun: `records`, `batches`, `entries`."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def id_range(low: int, top: int) -> str:
    """The IDs in `(low, top]` as text: `7`, or `7..9`. IDs are signed; in a backward stream, `top` is below `low`."""
    first = low + 1 if top > 0 else low - 1
    return str(first) if first == top else f"{first}..{top}"


def ids(low: int, top: int) -> str:
    """The IDs in `(low, top]` with their noun: `ID 7`, or `IDs 7..9`. See `id_range`."""
    text = id_range(low, top)
    return f"{'IDs' if '..' in text else 'ID'} {text}"


def duration(seconds: float) -> str:
    """A duration or an age in one unit, rounded down: `4 s`, `12 min`, `5 h`, `3 d`. Negative: `0 s`."""
    seconds = max(0, int(seconds))
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


# ---- objects for programs


def field_values(value: "DataclassInstance") -> dict[str, Any]:
    """The fields of a dataclass: name -> value. Values are not converted."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def json_text(value: object) -> str:
    """Encode a value as indented JSON text. The value must be of types that msgspec can encode."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


# ---- the terminal


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()  # None: the stream is closed


def has_colour(stream: TextIO | None = None) -> bool:
    """Whether to print colours to `stream`; None: standard output. True if the stream is a terminal that supports
    colours, and the variable NO_COLOR is not set (no-color.org).
    """
    return (
        _is_terminal(sys.stdout if stream is None else stream)
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def echo(text: str) -> None:
    """Print text for people. If `has_colour`, headings are bold, problems red, and commands to type cyan."""
    if not has_colour():
        click.echo(click.unstyle(text), color=False)
        return
    click.echo("\n".join(map(_colour_line, text.split("\n"))), color=True)


def _colour_line(line: str) -> str:
    if _HEADING_PATTERN.match(line):
        return click.style(line, bold=True)
    if _PROBLEM_PATTERN.match(line):
        return click.style(line, fg="red")
    return click.style(line, fg="cyan") if _COMMAND_PATTERN.match(line) else line


def shows_progress() -> bool:
    """Whether standard error is a terminal, so that `progress` shows a bar."""
    return _is_terminal(sys.stderr)


@contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar with rate and remaining time on standard error during the block, if it is a terminal.

    Args:
        label: the description of the work, such as `reading Kafka`.
        total: the number of units. If it is 0, there is no bar.
        unit: the noun of a unit, in the singular.

    Yields:
        A function to call with the number of units that were completed since its last call.
    """
    if not shows_progress() or total <= 0:
        yield lambda _: None
        return
    began, done = time.monotonic(), 0

    def rate(_: object) -> str:
        seconds = max(time.monotonic() - began, 0.001)
        return (
            f"{done / seconds:,.0f} {plural(unit)}/s"
            if done / seconds >= 10
            else f"{done / seconds:.1f} {plural(unit)}/s"
        )

    with click.progressbar(
        length=total,
        label=label,
        show_pos=True,
        show_eta=True,
        item_show_func=rate,
        width=20,
        file=sys.stderr,
        color=has_colour(sys.stderr),
        update_min_steps=max(1, total // 200),
    ) as bar:

        def advance(units: int) -> None:
            nonlocal done
            done += units
            bar.update(units, current_item=units)

        yield advance
