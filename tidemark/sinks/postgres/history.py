"""The history of advances and of late completions: what is written of it, what is read, and how long it is kept.

Advances are packed, `TOGETHER` of a batch in a row: one array per column, and what is nearly always the same is left
out (a name has a number, `prev` and the line are told as distances). So one costs about 20 bytes in place of 270.
There is no index by writer, which would cost more than that: `stream_positions.advanced` has the *place* of a writer's
newest advance, and each advance that of the one before it, so that a chain is read without its neighbours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal, LiteralString

from tidemark.common.postgres_session import Connection
from tidemark.sinks.postgres.database import execute
from tidemark.streaming.core.effects import LateCompletion, WriterAdvance

TOGETHER = 200  # more in a row are no smaller, and each costs more to read
_PARTS = 4096  # rows of one batch that are told apart; beyond, a place names several, and the IDs tell which


@dataclass(frozen=True, slots=True)
class Retention:
    """In days: of advances, closed gaps and applied batches; and of the audit, operators' acts and what came late."""

    history: int = 7
    audit: int = 400


@dataclass(frozen=True, slots=True)
class PastAdvance:
    """An advance out of the history: `linear` after it, the batch that made it, and that batch's time (ms)."""

    advance: WriterAdvance
    linear: int
    batch: int
    time: int


@dataclass(frozen=True, slots=True)
class PastLate:
    number: int
    late: LateCompletion
    batch: int
    time: int


def place(now: int, number: int) -> int:
    """Of the advance with that `number` in its batch, of which `now` is the time."""
    return now * _PARTS + number // TOGETHER % _PARTS


# Each chain is read from its newest advance back, one chain after the other, so that a limit ends the reading. Streams
# share rows, and one stream may keep its history longer than another.
_CHAINS: LiteralString = """
select known.stream, known.writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch,
    (extract(epoch from time) * 1000)::bigint
from unnest(%s::text[], %s::text[], %s::bigint[]) as known (stream, writer, position)
cross join lateral (select * from (
    with recursive chain as (
        select n.number, p.advanced as before, 9223372036854775807 as prev, 0::bigint as epoch,
            0::bigint as id, 0::bigint as facts, 0::bigint as empty, 0::bigint as unseen, 0::bigint as skipped,
            0::bigint as linear, 0::bigint as batch, null::timestamptz as time, 0 as length
        from tidemark.writer_numbers n join tidemark.stream_positions p using (stream, writer)
        where (stream, writer) = (known.stream, known.writer)
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
) -> dict[tuple[str, str], list[PastAdvance]]:
    """Of each (stream, writer, position) the advances beyond that position, oldest first, at most the `newest`.

    Where there are `most` of them in all, the last chain may be cut off behind its last advance, and chains that are
    not there may have been left out.
    """
    found: dict[tuple[str, str], list[PastAdvance]] = {}
    rows = execute(connection, _CHAINS, known, newest, most, most)
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, linear, batch, at in rows or ():
        advance = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, at)
        found.setdefault((stream, writer), []).append(PastAdvance(advance, linear, batch, at))
    return found


@dataclass(frozen=True, slots=True)
class PageBounds:
    """At most `most` advances and as many late completions, of those that are the `newest` of their writer; `seconds`
    is what one statement may take."""

    newest: int
    most: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PastPage:
    """`chains`: by writer, how far its advances lead, and those of them that are still kept. Where there is `more`,
    writers are left out, or late completions."""

    chains: dict[str, tuple[int, list[PastAdvance]]]
    late: list[PastLate]
    more: bool


def page_after(
    connection: Connection, stream: str, standing: Callable[[str], int], late: int, bounds: PageBounds
) -> PastPage:
    """What was published of `stream` beyond where each writer is `standing`, and of late completions after `late`."""
    with connection.transaction():
        connection.execute("select set_config('statement_timeout', %s, true)", (f"{bounds.seconds * 1000:.0f}",))
        # Positions before advances: a writer may not seem to stand where its advances do not lead yet.
        writers = connection.execute(
            "select writer, position from tidemark.stream_positions where stream = %s", (stream,)
        )
        moved = {name: at for name, at in writers.fetchall() if abs(at) > abs(standing(name))}
        known = [(stream, name, standing(name)) for name in moved]
        found = advances_since(connection, known, bounds.newest, bounds.most)
        lates = late_since(connection, [(stream, late)], bounds.most, "oldest").get(stream, [])
    cut = sum(map(len, found.values())) == bounds.most
    chains = {name: (moved[name], advances) for (_, name), advances in found.items()}
    if cut:
        name, (_, advances) = chains.popitem()
        chains[name] = (advances[-1].advance.id, advances)
    else:
        chains |= {name: (at, []) for name, at in moved.items() if name not in chains}
    return PastPage(chains, lates, cut or len(lates) == bounds.most)


def late_since(
    connection: Connection, known: Iterable[tuple[str, int]], most: int, which: Literal["newest", "oldest"] = "newest"
) -> dict[str, list[PastLate]]:
    """Of each (stream, number) the late completions after that number, oldest first, at most so many of them."""
    found: dict[str, list[PastLate]] = {}
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
    for stream, number, writer, epoch, prev, id_, facts, why, batch, at in rows or ():
        late = LateCompletion(writer, epoch, prev, id_, facts, why)
        found.setdefault(stream, []).append(PastLate(number, late, batch, at))
    return found


def _firsts(connection: Connection, today: date, retention: Retention) -> dict[str, date]:
    """The first day that is kept, by name of the policy."""
    rows = connection.execute("select stream, value from tidemark.policies where setting = 'history_days'")
    days = {"*": retention.history, **dict(rows.fetchall())}
    return {name: today - timedelta(days=count) for name, count in days.items()}


def oldest_kept(connection: Connection, today: date, retention: Retention) -> date:
    """The first day of advances that is kept. Streams share rows, so the longest that a policy asks for counts."""
    return min(_firsts(connection, today, retention).values())


def hide(connection: Connection, today: date, retention: Retention) -> None:
    """Show no advance that is past the time of its own stream."""
    firsts = _firsts(connection, today, retention)
    since = {name: datetime.combine(day, time(), UTC) for name, day in firsts.items()}
    with connection.transaction():
        if dict(connection.execute("select stream, since from tidemark.history_since").fetchall()) == since:
            return
        connection.execute("delete from tidemark.history_since where stream <> all(%s)", ([*since],))
        execute(
            connection,
            "insert into tidemark.history_since select * from unnest(%s::text[], %s::timestamptz[])"
            " on conflict (stream) do update set since = excluded.since",
            since.items(),
        )


def forget(connection: Connection, today: date, retention: Retention) -> None:
    """Delete what is past its time, but for days of advances, which are dropped as a whole. Outside a transaction."""
    hide(connection, today, retention)
    oldest, audited = oldest_kept(connection, today, retention), today - timedelta(days=retention.audit)
    # The most particular policy counts, as in `streaming.values.policies`.
    past_its_time: LiteralString = """ < %s - coalesce((
        select value from tidemark.policies p where setting = 'history_days'
            and (p.stream = g.stream or p.stream like '%%*' and starts_with(g.stream, left(p.stream, -1)))
        order by p.stream = g.stream desc, length(p.stream) desc limit 1
    ), %s)::integer"""
    for rows in ("tidemark.stream_gaps g where closed_at", "tidemark.line_moves g where time"):
        connection.execute(f"delete from {rows}{past_its_time}", (today, retention.history))
    connection.execute(
        "delete from tidemark.applied_batches where applied_at < %s"
        " and number < (select max(number) from tidemark.applied_batches)",
        (oldest,),
    )
    connection.execute("delete from tidemark.skips where time < %s", (audited,))
    connection.execute("delete from tidemark.acts where time < %s", (audited,))
    # The newest of each stream stays: by its number it is known that there were any.
    connection.execute(
        "delete from tidemark.late_completions l where time < %s and number <"
        " (select max(number) from tidemark.late_completions newer where newer.stream = l.stream)",
        (audited,),
    )
    with connection.transaction():
        # Batches wait meanwhile: one that brings a writer back writes its number into the history.
        connection.execute("select 1 from tidemark.query_lease for update")
        connection.execute(
            "delete from tidemark.writer_numbers n using tidemark.stream_positions p"
            " where (p.stream, p.writer) = (n.stream, n.writer) and p.forgotten and p.advanced < %s",
            (int(datetime.combine(oldest, time(), UTC).timestamp() * 1000) * _PARTS,),
        )
