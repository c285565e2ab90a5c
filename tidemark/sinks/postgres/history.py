"""The history of advances and of late completions, as the sinks and the sidecar read it.

Up to 200 advances of a batch share one row of `packed_advances`, with an array per column. An array that equals another
one is left out. A writer has a number, and `prev` and the linear position are distances from the ID. One advance costs
about 20 bytes instead of 270. There is no index by writer, which would cost more than the rows. Instead
`stream_positions.advanced` has the place of a writer's newest advance, and each advance the place of the one before it:
a chain is read without its neighbours. `positions.write_positions` writes the rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, LiteralString

from tidemark.common.postgres_session import Connection
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.positions import NEWEST_ADVANCES, stored_positions
from tidemark.streaming.core.effects import LateCompletion, WriterAdvance


@dataclass(frozen=True, slots=True)
class StoredAdvance:
    """An advance of the history: `linear` is the linear position after it, `time` that of its `batch` (ms)."""

    advance: WriterAdvance
    linear: int
    batch: int
    time: int


@dataclass(frozen=True, slots=True)
class StoredLate:
    """A late completion of the history; `time` is that of its `batch` (ms)."""

    number: int
    late: LateCompletion
    batch: int
    time: int


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Bounds of one page of a stream's history.

    A page has at most `newest` advances of each writer, at most `most` advances and as many late completions. One
    statement may take `seconds`.
    """

    newest: int
    most: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page of a stream's history.

    `chains`: writer -> the position to which its advances lead, and those advances that are still stored. `more`:
    writers or late completions are left out.
    """

    chains: dict[str, tuple[int, list[StoredAdvance]]]
    late: list[StoredLate]
    more: bool


# Each chain is read from its newest advance back, one chain after the other, so that a limit ends the reading. Streams
# share rows, and one stream may keep its history longer than another.
_CHAINS: LiteralString = f"""
select known.stream, known.writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch,
    (extract(epoch from time) * 1000)::bigint
from unnest(%s::text[], %s::text[], %s::bigint[]) as known (stream, writer, position)
cross join lateral (select * from (
    with recursive chain as (
        select n.number, n.advanced as before, 9223372036854775807 as prev, 0::bigint as epoch,
            0::bigint as id, 0::bigint as facts, 0::bigint as empty, 0::bigint as unseen, 0::bigint as skipped,
            0::bigint as linear, 0::bigint as batch, null::timestamptz as time, 0 as length
        from {NEWEST_ADVANCES} n where (stream, writer) = (known.stream, known.writer)
        union all
        select number, a.*, length + 1
        from chain cross join lateral (
            select p.before[i], p.ids[i] - p.spans[i], p.epochs[i], p.ids[i], coalesce(p.facts[i], abs(p.spans[i])),
                coalesce(p.empty[i], 0), coalesce(p.unseen[i], 0), coalesce(p.skipped[i], 0),
                p.ids[i] - coalesce(p.ahead[i], 0), p.batch, p.time
            from tidemark.packed_advances p cross join lateral array_position(p.writers, chain.number) as i
            where p.time = to_timestamp((chain.before / 4096) / 1000.0) and p.part = mod(chain.before, 4096)
                and i is not null and abs(p.ids[i]) <= abs(chain.prev)
                and (p.time >= (select coalesce(max(since), '-infinity') from tidemark.history_since)
                    or tidemark.is_shown(known.stream, p.time))
            order by abs(p.ids[i]) desc limit 1
        ) a (before, prev, epoch, id, facts, empty, unseen, skipped, linear, batch, time)
        where abs(a.id) > abs(known.position) and length < %s
    )
    select epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time from chain where length > 0
) parts order by abs(id) limit %s) a
limit %s
"""


def advances_since(
    connection: Connection, known: Iterable[tuple[str, str, int]], newest: int, most: int | None = None
) -> dict[tuple[str, str], list[StoredAdvance]]:
    """The advances of writers beyond given positions, oldest first.

    Args:
        known: stream, writer and position of each writer.
        newest: how many of the newest advances of each writer are returned.
        most: bound of all advances together. If the result reaches it, the end of the last chain may be missing, and
            other chains may be left out.
    """
    chains: dict[tuple[str, str], list[StoredAdvance]] = {}
    rows = execute(connection, _CHAINS, known, newest, most, most)
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, linear, batch, time in rows or ():
        advance = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, time)
        chains.setdefault((stream, writer), []).append(StoredAdvance(advance, linear, batch, time))
    return chains


def page_after(
    connection: Connection, stream: str, position_of: Callable[[str], int], late: int, bounds: PageBounds
) -> StoredPage:
    """The history of `stream` beyond a reader's positions.

    Args:
        position_of: writer -> the reader's position.
        late: number of the newest late completion that the reader knows.
    """
    with connection.transaction():
        connection.execute("select set_config('statement_timeout', %s, true)", (f"{bounds.seconds * 1000:.0f}",))
        # Positions before advances: no position may be beyond the end of the advances that are read.
        moved = {
            writer: position
            for _, writer, position, _ in stored_positions(connection, [stream])
            if abs(position) > abs(position_of(writer))
        }
        known = [(stream, writer, position_of(writer)) for writer in moved]
        stored = advances_since(connection, known, bounds.newest, bounds.most)
        lates = late_since(connection, [(stream, late)], bounds.most, "oldest").get(stream, [])
    is_cut = sum(map(len, stored.values())) == bounds.most
    chains = {writer: (moved[writer], advances) for (_, writer), advances in stored.items()}
    if is_cut:
        writer, (_, advances) = chains.popitem()
        chains[writer] = (advances[-1].advance.id, advances)
    else:
        chains |= {writer: (position, []) for writer, position in moved.items() if writer not in chains}
    return StoredPage(chains, lates, is_cut or len(lates) == bounds.most)


def late_since(
    connection: Connection, known: Iterable[tuple[str, int]], most: int, which: Literal["newest", "oldest"] = "newest"
) -> dict[str, list[StoredLate]]:
    """The late completions of streams after given numbers, oldest first.

    Args:
        known: stream, and the number of the newest late completion that the reader knows.
        most: bound for each stream.
        which: the `newest` or the `oldest` ones, if a stream has more than `most`.
    """
    lates: dict[str, list[StoredLate]] = {}
    order: LiteralString = "desc" if which == "newest" else "asc"
    rows = execute(
        connection,
        f"""
        select stream, late.number, writer, epoch, prev, id, facts, why, batch,
            (extract(epoch from time) * 1000)::bigint
        from unnest(%s::text[], %s::bigint[]) as known (stream, number)
        cross join lateral (
            select l.number, writer, epoch, prev, id, facts, why, batch, time from tidemark.late_completions l
            where l.stream = known.stream and l.number > known.number order by l.number {order} limit %s
        ) late
        order by stream, late.number
        """,
        known,
        most,
    )
    for stream, number, writer, epoch, prev, id_, facts, why, batch, time in rows or ():
        late = LateCompletion(writer, epoch, prev, id_, facts, why)
        lates.setdefault(stream, []).append(StoredLate(number, late, batch, time))
    return lates
