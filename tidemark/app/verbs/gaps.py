"""`tidemark gaps`: what holds positions back, as lines for people and as JSON for programs."""

import shlex
from collections.abc import Iterator, Sequence

from tidemark.app.open_ranges import OpenRange
from tidemark.app.printed import as_object, for_people
from tidemark.app.remedies import arguments
from tidemark.app.verbs.status import aged, ids_between

SHOWN = 10  # gaps of one writer in the text; the JSON has all


def as_json(found: Sequence[OpenRange]) -> str:
    return as_object({"gaps": found})


def as_text(found: Sequence[OpenRange], now: float) -> str:
    """A line for each, and below the last one of a writer its transactions and the verb."""
    lines: list[str] = []
    writers: dict[tuple[str, str, int], list[OpenRange]] = {}
    for it in found:
        writers.setdefault((it.stream, it.writer, it.epoch), []).append(it)
    for ranges in writers.values():
        lines += [_line(it, now) for it in ranges[:SHOWN]]
        if len(ranges) > SHOWN:
            lines.append(f"{ranges[0].stream}: {ranges[0].writer} has {len(ranges) - SHOWN} gaps more")
        lines += _remedy(ranges[0])
    return for_people(lines)


def _line(it: OpenRange, now: float) -> str:
    if it.low is None:
        what = "has not joined"
    elif it.top is None:
        what = f"has told nothing beyond {it.low}"
    else:
        what = f"owes {ids_between(it.low, it.top)}"
    age = "" if it.since is None else f", for {aged(now - it.since.timestamp())}"
    seen = "never seen" if it.last_seen is None else f"last seen {aged(now - it.last_seen.timestamp())} ago"
    waits = f"; {it.waiting} IDs wait, {it.facts} with a fact" if it.waiting else ""
    return f"{it.stream}: {it.writer} (epoch {it.epoch}) {what}{age}: {it.verdict}, {seen}{waits}"


def _remedy(it: OpenRange) -> Iterator[str]:
    yield from (f"    open: {transaction}" for transaction in it.transactions)
    yield f"    {it.advice} {it.verb}".rstrip()
    if it.verdict in ("silent", "fenced") and it.low is not None and it.top is not None:
        words = shlex.join(arguments(it.stream, it.writer, ids_between(it.low, it.top)))
        yield f'    If it lives on and these IDs are lost: tidemark skip --by "$USER" --why "lost" {words}'
