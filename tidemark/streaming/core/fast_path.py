"""The plain streams of a batch, all at once: numpy on whole arrays, and a few steps a stream. Pure; no Spark.

A stream is *plain* in a batch where nothing of it is pending, held or late before it and after it, and nothing came but
runs that continue their writers' chains: then its line comes as far as IDs are given out. So it is nearly always, and
what `core.stream` does then, object by object, is known beforehand. Each stream of which that is not certain is
left to it; the others get the same effects and the same state, byte for byte.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tidemark.streaming.core import writer_table as joined
from tidemark.streaming.core.chain import ANNOUNCED_KEPT
from tidemark.streaming.core.codec import FORMAT, StoredStream, decode_stored, encode_stored
from tidemark.streaming.core.effects import StreamEffects, Summary, WriterAdvance, WriterRow
from tidemark.streaming.core.plain_links import Candidate, Link, Links, Plain, beside, columns_of
from tidemark.streaming.core.store import States
from tidemark.streaming.core.stream_input import Inbox
from tidemark.streaming.core.writer_codec import StoredChain, StoredWriter
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import extended, last_of
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.run_codec import RunColumns

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
            None,
            stored.refused,
            stored.began,
            stored.here,
            transactions,
        ),
        stored.apart,
    )
    effects = StreamEffects(
        name,
        _DIRECTIONS[direction],
        sign * stored.line,
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
    empty = it.chain.empty
    assert isinstance(empty, bytes)  # as all are in a state of today's format
    return StoredWriter(
        it.name,
        it.epoch,
        StoredChain(link.end, it.chain.refused, [], extended(empty, link.declared, ANNOUNCED_KEPT)),
        None,
        [],
        it.published,
        None,
        doubt=False,
        timeline=it.timeline,
        start=it.start,
        seen=max(it.seen, now),
        joined=it.joined,
    )


class AtRest(NamedTuple):
    """A stream whose line has come as far as IDs are given out, with the positions of its active writers; signed."""

    line: int
    positions: dict[str, int]


def at_rest(data: bytes) -> AtRest | None:
    """None for a state of which anything else is to be told, or that is none of today's format."""
    stored = decode_stored(data)
    if stored is None or stored.transactions or not _is_plain(stored) or _head(stored) != stored.line:
        return None
    sign = -1 if stored.direction == Direction.BACKWARD else 1
    return AtRest(sign * stored.line, {it.name: sign * it.position for it in stored.writers})


def _stored(name: str, inbox: Inbox, data: bytes | None, now: int, bounds: Bounds) -> StoredStream | None:
    """A state that is plain, and of which nothing came but runs, where its stream is at home."""
    if data is None or inbox.facts or inbox.refused or inbox.apart or inbox.control or len(inbox.runs) != 1:
        return None
    stored = decode_stored(data)
    if stored is None or not _is_plain(stored):
        return None
    if stored.apart is not None:
        own, retired = bounds.of(name), columns_of(stored.apart)["retired"]
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
    if stored.completed or stored.held or stored.active or stored.retired or stored.waiting or stored.ended is None:
        return False
    for it in stored.writers:  # no generator: a start asks this of each stream, of which there may be a million
        if it.chain.pending or it.chain.put_off or it.retired is not None:
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
        and isinstance(writer.chain.empty, bytes)
        and last_of(writer.chain.empty) <= position
    )
