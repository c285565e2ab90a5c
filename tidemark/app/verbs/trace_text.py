"""What `tidemark trace` prints of an `IdTrace`: sentences for people, one object for programs."""

import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from tidemark.app.printed import as_object, for_people, plain
from tidemark.app.verbs import letters
from tidemark.app.verbs.explain import CLOSED, clock, evidence, offsets
from tidemark.app.verbs.status import aged, ids_between
from tidemark.app.verbs.trace import IdTrace, Says, Stands, TracedRecord, WriterStand
from tidemark.sinks.postgres.inspect import PastGap
from tidemark.streaming.values.direction import beyond

SHOWN: Final = 10  # of each kind; the JSON has all
LINE: Final = 300  # characters of a record

_SAYS: Final[dict[Says, str]] = {
    "fact": "it completed",
    "void": "it was rolled back",
    "announced": "it is announced that this writer has nothing there",
    "settled": "all of this writer up to a higher ID is settled",
    "passed": "it is none of this writer's",
    "mentions": "cannot be read, and the number is in it",
}
_STANDS: Final[dict[Stands, str]] = {
    "complete": "has told beyond it, and waits for {range} since {since}",
    "owed": "owes {range}, in which it lies, since {since}",
    "silent": "has told nothing beyond {low}",
    "unknown": "has not joined; what it tells is held since {since}",
}


def as_json(it: IdTrace) -> str:
    return as_object(plain(it) | {"dead_letters": [letters.plain(one, {}) for one in it.dead_letters]})


def as_text(it: IdTrace) -> str:
    lines = [f"{it.stream} {it.id}: {_headline(it)}"]
    parts = (_told(it), _settled(it), _standing(it), _line(it), _beside(it))
    lines += [f"  {line}" for part in parts for line in part]
    return for_people([*lines, *(f"  not known: {problem}" for problem in it.unknown)])


def _headline(it: IdTrace) -> str:
    if it.known:
        where = "the line has passed it" if it.passed else "the line has not passed it"
        return f"{where}, and is at {it.linear}"
    if beyond(it.id, it.highest):
        return f"no record has named an ID as high; the highest is {it.highest}, and the line is at {it.linear}"
    return f"the stream's IDs lie on the other side of 0; the highest is {it.highest}"


def _some(lines: Iterable[str], count: int, what: str) -> Iterator[str]:
    for line, _ in zip(lines, range(SHOWN), strict=False):
        yield line
    if count > SHOWN:
        yield f"and {count - SHOWN} {what} more: --json has them"


def _told(it: IdTrace) -> Iterator[str]:
    for record, _ in zip(it.records, range(SHOWN), strict=False):
        yield _record(record) + (", and no batch has read it yet" if record.offset >= it.unread else "")
        yield f"    {record.text[:LINE]}" + ("..." if record.cut or len(record.text) > LINE else "")
    if len(it.records) > SHOWN:
        yield f"and {len(it.records) - SHOWN} records more: --json has them"
    looked = it.looked if it.known else None
    if looked is None or any(one.says in ("fact", "void") for one in it.records):
        return
    place = f"{looked.topic}/{looked.partition}"
    searched = f"offsets {looked.first}..{looked.end - 1}" if looked.first < looked.end else "no offset"
    yield f"no record completes it in what was read again of {place}: {searched}"
    if looked.wanted < looked.kept:
        yield f"retention removed what was before offset {looked.kept}, where its record may have been"
    if max(looked.wanted, looked.kept) < looked.first:
        yield f"offsets {max(looked.wanted, looked.kept)}..{looked.first - 1} may hold it: --records reads more"


def _record(it: TracedRecord) -> str:
    whose = "a record" if it.kind is None else f"{it.kind} of {it.writer or ''} (epoch {it.epoch})"
    return f"{clock(it.time)} told by {whose} at {it.topic}/{it.partition} {it.offset}: {_SAYS[it.says]}"


def _settled(it: IdTrace) -> Iterator[str]:
    how = "settled" if it.writer is not None or it.passed else "passed"
    moves = (
        f"{clock(one.time)} {how} in batch {one.batch}: {one.writer} (epoch {one.epoch}) moved from"
        f" {one.prev} to {one.id}: {evidence(one.evidence)}"
        for one in it.settled
    )
    yield from _some(moves, len(it.settled), "writers")
    if it.offsets:
        yield f"  that batch read {', '.join(map(offsets, it.offsets))}"
    if it.passed and not it.settled:
        yield "when it was settled the history does not tell: that day is no longer kept, or no position passed it"
    yield from _some((_gap(it, gap) for gap in it.gaps), len(it.gaps), "gaps")


def _gap(it: IdTrace, gap: PastGap) -> str:
    inside = abs(gap.low) < abs(it.id) <= abs(gap.top)
    what = "it lay in the gap" if inside else "below it was the gap"
    opened = f"{what} {ids_between(gap.low, gap.top)} of {gap.writer}, open from {clock(gap.opened)}"
    if gap.closed is None:
        return f"{opened} on"
    lasted = aged((gap.closed - gap.opened).total_seconds())
    return f"{opened} to {clock(gap.closed)}, for {lasted}: {CLOSED.get(gap.closed_by or '', gap.closed_by)}"


def _standing(it: IdTrace) -> Iterator[str]:
    if it.passed:
        return
    yield from _some(map(_stand, it.standing), len(it.standing), "writers")
    if it.standing:
        yield f"what to do: tidemark gaps {shlex.quote(it.stream)}"


def _stand(it: WriterStand) -> str:
    since = "" if it.since is None else clock(it.since)
    span = "" if it.low is None or it.top is None else ids_between(it.low, it.top)
    return f"{it.writer} (epoch {it.epoch}) " + _STANDS[it.stands].format(range=span, low=it.low, since=since)


def _line(it: IdTrace) -> Iterator[str]:
    stream = shlex.quote(it.stream)
    if it.line is not None:
        yield f"{clock(it.line.time)} the line passed it in batch {it.line.batch}, and came to {it.line.linear}"
        if it.settled and it.line.time > it.settled[0].time:
            at = it.settled[0].time.isoformat(timespec="milliseconds")
            yield f"  what held the line between: tidemark explain {stream} --at {at}"
    elif it.passed:
        yield "when the line passed it no advance tells"
    if it.published is not None:
        yield f"{clock(it.published)} published in Redis, by its clock"
    elif it.settled and not it.unknown and (it.passed or it.writer is not None):
        yield "Redis's list of advances does not tell when it was published: it keeps the newest alone"


def _beside(it: IdTrace) -> Iterator[str]:
    late = (
        f"{clock(one.time)} late, number {one.number}: {one.writer} (epoch {one.epoch}) completed"
        f" {ids_between(one.prev, one.id)}, facts {one.facts} ({one.why}); "
        + ("nobody has resolved it" if one.act is None else f"resolved by act {one.act}")
        for one in it.late
    )
    yield from _some(late, len(it.late), "late completions")
    acts = (
        f"{clock(one.time)} {one.kind} of {one.writer} in epoch {one.epoch},"
        f" {ids_between(one.prev, one.id)}, by {one.by}: {one.why}"
        + ("" if one.number is None else f" (act {one.number} of {one.seen_as})")
        for one in it.acts
    )
    yield from _some(acts, len(it.acts), "acts")
    refused = (
        "refused as {}: {}/{} {}; tidemark dead-letters show {}".format(one.reason, *one.origin, one.place)
        for one in it.dead_letters
    )
    yield from _some(refused, len(it.dead_letters), "dead letters")
