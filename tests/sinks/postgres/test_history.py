"""The packed history, on a real Postgres: nothing of an advance is lost by packing, and nothing is kept for ever."""

import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING
from tests.fix_sinks import LEASE
from tests.sinks.given import NOW, advance, batch, stream
from tests.waiting import eventually
from tidemark.sinks.postgres import positions
from tidemark.sinks.postgres.database import SCHEMA, migrate, session_of
from tidemark.sinks.postgres.history import PageBounds, StoredPage
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.retention import Retention
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.core.effects import ClosedGap, Gap, LateCompletion, OperatorOverride, WriterAdvance
from tidemark.streaming.values.limits import Evidence

LARGEST = 2**63 - 1
DAY = timedelta(days=1)
TODAY = datetime.fromtimestamp(NOW / 1000, UTC)
COLUMNS = "stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time"

Row = tuple[Any, ...]


@pytest.fixture
def token(lease: Lease) -> int:
    return lease.token


def rows(sql: psycopg.Connection, query: str, *values: object) -> list[Row]:
    return sql.execute(query.encode(), values).fetchall()


def viewed(sql: psycopg.Connection, columns: str = "prev, id") -> list[Row]:
    return rows(sql, f"select {columns} from tidemark.position_advances order by stream, writer, abs(id)")


def row(name: str, moved: WriterAdvance, line: int, number: int, now: int) -> Row:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=now)
    return name, moved.writer, moved.epoch, moved.prev, moved.id, *moved.evidence.counts, line, number, at


COUNTS = st.integers(0, LARGEST)


@st.composite
def counts_within(draw: st.DrawFn, width: int) -> Evidence:
    """Facts, empty, unseen and skipped IDs among `width`; some may belong to other writers."""
    counts = []
    for _ in range(4):
        counts.append(draw(st.one_of(st.just(0), st.integers(0, width))))
        width -= counts[-1]
    return Evidence(*draw(st.permutations(counts)))


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, list[tuple[str, int, list[WriterAdvance]]]]]:
    """(time, [(stream, line, advances)]) of each batch; the clock may stand or go back."""
    stands: dict[tuple[str, str], int] = {}
    epochs: dict[tuple[str, str], int] = {}
    made = []
    for _ in range(draw(st.integers(1, 6))):
        moved = []
        for name in draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True)):
            sign = -1 if name == "c" else 1
            advances = []
            for writer in draw(st.lists(st.sampled_from("uvw"), max_size=3, unique=True)):
                prev = stands.get((name, writer), 0)
                if prev == LARGEST:
                    continue
                id_ = draw(st.one_of(st.integers(prev + 1, min(prev + 9, LARGEST)), st.integers(prev + 1, LARGEST)))
                epoch = epochs.get((name, writer), 0) + draw(st.sampled_from((0, 0, 1, 1_790_000_000_000)))
                stands[name, writer], epochs[name, writer] = id_, epoch
                evidence = draw(st.one_of(st.just(Evidence(id_ - prev)), counts_within(id_ - prev)))
                advances.append(WriterAdvance(writer, epoch, sign * prev, sign * id_, *evidence.counts, 0))
            line = sign * draw(st.one_of(st.just(abs(advances[0].id)) if advances else COUNTS, COUNTS))
            moved.append((name, line, advances))
        made.append((NOW + draw(st.sampled_from((0, 0, 333, -1000, 86_400_000))), moved))
    return made


@settings(max_examples=40, deadline=None, suppress_health_check=SHARING)
@given(made=batches(), together=st.sampled_from((1, 2, 200)), newest=st.integers(1, 3))
def test_unpacking_gives_what_was_packed(
    store: Postgres,
    sql: psycopg.Connection,
    token: int,
    monkeypatch: pytest.MonkeyPatch,
    made: list[tuple[int, list[tuple[str, int, list[WriterAdvance]]]]],
    together: int,
    newest: int,
) -> None:
    """Rule 3: view, function and the chain of each writer hold every advance as it was, however it was packed."""
    monkeypatch.setattr(positions, "ADVANCES_PER_ROW", together)
    run = f"{time.monotonic_ns()}"
    expected: list[Row] = []
    chains: dict[tuple[str, str], list[WriterAdvance]] = {}
    for number, (now, moved) in enumerate(made):
        streams = [stream(f"{name}{run}", *advances, linear=line) for name, line, advances in moved]
        store.apply(batch(number, *streams, token=token, query=run, now=now))
        for name, line, advances in moved:
            for one in advances:
                expected.append(row(f"{name}{run}", one, line, number, now))
                chains.setdefault((f"{name}{run}", one.writer), []).append(one)
    found = rows(sql, f"select {COLUMNS} from tidemark.position_advances where stream like %s", f"%{run}")
    assert sorted(found) == sorted(expected)
    for name in {it[0] for it in expected}:
        of_stream = rows(sql, f"select {COLUMNS} from tidemark.advances_of(%s)", name)
        assert sorted(of_stream) == sorted(it for it in expected if it[0] == name)
    for bound in (newest, 1000):
        read = store.advances_since([(*writer, 0) for writer in chains], bound)
        assert {writer: [(it.advance.prev, it.advance.id) for it in chain] for writer, chain in read.items()} == {
            writer: [(it.prev, it.id) for it in chain[-bound:]] for writer, chain in chains.items()
        }
    told = {
        row(name, past.advance, past.linear, past.batch, past.time)
        for (name, _), chain in store.advances_since([(*writer, 0) for writer in chains], 1000).items()
        for past in chain
    }
    assert told == set(expected)


def test_chain_is_read_from_a_position_on(store: Postgres, token: int) -> None:
    """What a reader knows already is not told again; who knows all of it, or more, is told nothing."""
    for number in range(5):
        store.apply(batch(number, stream("s", advance("w", 10 * number, 10 * number + 10)), token=token))
    for known, ids in [(0, [10, 20, 30, 40, 50]), (20, [30, 40, 50]), (25, [30, 40, 50]), (50, []), (60, [])]:
        found = store.advances_since([("s", "w", known), ("s", "x", 0)], 100)
        assert [past.advance.id for past in found.get(("s", "w"), [])] == ids
        assert ("s", "x") not in found


def pages(store: Postgres, most: int) -> list[StoredPage]:
    """All pages of stream `s`, each asked for where the one before ended."""
    found: list[StoredPage] = []
    standing: dict[str, int] = defaultdict(int)
    late = 0
    while not found or found[-1].has_more:
        found.append(store.page_after("s", standing.__getitem__, late, PageBounds(100, most, 60)))
        standing |= {writer: upto for writer, (upto, _) in found[-1].chains.items()}
        late = found[-1].late[-1].number if found[-1].late else late
    return found


@pytest.mark.parametrize("most", [1, 2, 5, 7, 100])
def test_history_is_read_in_pages(store: Postgres, token: int, most: int) -> None:
    """Rule 3 page after page: every advance and every late completion comes once, in order, in pages of that size."""
    late = [LateCompletion("w0", 1, n, n + 1, 1, "skipped") for n in range(3)]
    for number in range(1, 6):
        moved = [advance(f"w{writer}", number - 1, number) for writer in range(3)]
        store.apply(batch(number, stream("s", *moved, late=late if number == 3 else []), token=token))
    found = pages(store, most)
    assert all(sum(len(chain) for _, chain in page.chains.values()) <= most for page in found)
    assert all(len(page.late) <= most for page in found)
    assert sum(len(page.late) for page in found) == 3
    for writer in range(3):
        chains = [page.chains.get(f"w{writer}", (0, []))[1] for page in found]
        assert [past.advance.id for chain in chains for past in chain] == [1, 2, 3, 4, 5]


def test_writer_whose_history_is_gone_is_named_in_a_page(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Its position comes without advances, so that readers know what they have to read again."""
    store.apply(batch(1, stream("s", advance("gone", 0, 4), advance("w", 0, 4)), token=token))
    sql.execute("delete from tidemark.packed_advances")
    store.apply(batch(2, stream("s", advance("w", 4, 5)), token=token))
    (page,) = pages(store, 100)
    assert page.chains["gone"] == (4, [])
    assert (page.chains["w"][0], [past.advance.prev for past in page.chains["w"][1]]) == (5, [4])


def test_limit_ends_the_reading(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Who asks for one advance of fifty writers makes Postgres walk along one writer's chain."""
    for number in range(1, 9):
        moved = [advance(f"w{writer}", number - 1, number) for writer in range(50)]
        store.apply(batch(number, stream("s", *moved), token=token))

    def fetched() -> int:
        sql.execute("select pg_stat_clear_snapshot()")
        return int(rows(sql, "select sum(idx_tup_fetch) from pg_stat_user_tables where relname like 'packed%%'")[0][0])

    # Only of this database: of pipelines that were killed, the server may not have noticed yet.
    ended = (
        "select count(*) from pg_stat_activity"
        " where application_name ~ 'reads|batches' and datname = current_database()"
    )

    def page(most: int) -> int:
        store.close()  # a session that ends tells what it did
        eventually(lambda: rows(sql, ended) == [(0,)])
        before = fetched()
        found = store.page_after("s", lambda _: 0, 0, PageBounds(100, most, 60))
        assert sum(len(chain) for _, chain in found.chains.values()) == min(most, 400)
        store.close()
        eventually(lambda: fetched() > before)
        return fetched() - before

    assert page(1) < page(1000) / 10


def test_reader_asks_in_plain_sql(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """A member of tidemark_reader is told why a stream stood where it stood at a time."""
    for number, (prev, id_) in enumerate([(0, 4), (4, 7), (7, 9)]):
        moved = stream("s", advance("w", prev, id_), linear=id_)
        store.apply(batch(number, moved, stream("t", advance("w", prev, id_)), token=token, now=NOW + number * 1000))
    sql.execute("set role tidemark_reader")
    asked = "where stream = 's' and time <= %s order by time desc limit 1"
    at = datetime.fromtimestamp(NOW / 1000 + 1.5, UTC)
    for source in ("position_advances", "advances_of('s')"):
        assert rows(sql, f"select linear, writer, prev, id from tidemark.{source} {asked}", at) == [(7, "w", 4, 7)]
    assert len(rows(sql, "select from tidemark.advances_of('s', since => %s)", at)) == 1


def test_days_that_are_not_asked_for_are_not_read(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """A query with a range of time reads only the partitions of those days."""
    for day in range(3):
        store.apply(batch(day, stream("s", advance("w", day, day + 1)), token=token, now=NOW + day * 86_400_000))
    query = "explain select * from tidemark.position_advances where stream = 's' and time >= %s and time < %s"
    plan = "\n".join(line for (line,) in rows(sql, query, TODAY + DAY, TODAY + DAY + timedelta(minutes=1)))
    assert "packed_advances_20260922" in plan
    assert "_20260921" not in plan
    assert "_20260923" not in plan


def test_chain_goes_on_over_a_migration(database: str) -> None:
    """A later schema is applied under a running pipeline. Its history before and after the migration is one chain."""
    migrate(database)
    later = replace(SCHEMA)
    script = (
        f"-- Works with code for schema {SCHEMA.target_version}.\n"
        "alter table tidemark.stream_positions add column later text"
    )
    vars(later)["scripts"] = {**SCHEMA.scripts, SCHEMA.target_version + 1: ("later.sql", script)}
    with (
        psycopg.connect(database, autocommit=True) as sql,
        Postgres(PostgresConfig(database)) as store,
        Lease.acquire(database, LEASE, threading.Event()) as lease,
        session_of(database, "test") as session,
    ):
        store.apply(batch(1, stream("s", advance("w", 0, 5)), token=lease.token))
        store.apply(batch(2, stream("s", advance("w", 5, 6)), token=lease.token))
        assert [it.advance.id for it in store.advances_since([("s", "w", 0)], 10)["s", "w"]] == [5, 6]
        assert later.migrate(session) == [SCHEMA.target_version + 1]
        store.check_writable()
        store.check_readable()
        store.apply(batch(3, stream("s", advance("w", 6, 8)), token=lease.token))
        store.apply(batch(4, stream("s", advance("w", 8, 10)), token=lease.token))
        chain = [(0, 5), (5, 6), (6, 8), (8, 10)]
        for newest in (3, 100):
            found = store.advances_since([("s", "w", 0)], newest)["s", "w"]
            assert [(it.advance.prev, it.advance.id) for it in found] == chain[-newest:]
        assert viewed(sql) == chain
        assert rows(sql, "select prev, id from tidemark.advances_of('s') order by id") == chain
        store.apply_retention(TODAY + 20 * DAY)
        assert viewed(sql) == []


def test_retention_and_a_batch_do_not_wait_for_each_other(store: Postgres, sql: psycopg.Connection, dsn: str) -> None:
    """Who deletes waits for the batch that holds the lease's row, and holds nothing that this batch needs."""
    waits = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with psycopg.connect(dsn) as of_batch, ThreadPoolExecutor(1) as pool:
        of_batch.execute("select token from tidemark.query_lease for key share")
        tidied = pool.submit(store.apply_retention, TODAY)
        eventually(lambda: sql.execute(waits).fetchone())
        of_batch.execute("select tidemark.make_history_day(%s)", (TODAY.date(),))
        of_batch.commit()
        tidied.result()


def test_a_stream_may_keep_its_history_longer(dsn: str, sql: psycopg.Connection, lease: Lease) -> None:
    """Gaps and advances are shown exactly as long as its policy says, also of advances that share a row with others."""
    with Postgres(PostgresConfig(dsn, Retention(history_days=2))) as store:
        for policy, days in (("*", 1), ("a*", 3), ("ab", 2)):
            store.policies.change(policy, {"history_days": days}, "ada", "audit")
        gap, end = Gap("w", 1, 20, 30, NOW), ClosedGap("w", 30, "joined")
        names = ("a", "ab", "b")
        streams = [stream(it, advance("w", 0, 9), gaps=[gap]) for it in names]
        store.apply(batch(1, *streams, token=lease.token))
        store.apply(batch(2, *(stream(it, closed=[end]) for it in names), token=lease.token))
        for days, gaps in ((1, "a ab b"), (2, "a ab"), (3, "a"), (4, "")):
            store.apply_retention(TODAY + days * DAY)
            assert rows(sql, "select coalesce(string_agg(stream, ' ' order by 1), '') from tidemark.stream_gaps") == [
                (gaps,)
            ]
            assert " ".join(it for (it,) in viewed(sql, "stream")) == gaps
            assert " ".join(it for it in names if rows(sql, "select from tidemark.advances_of(%s)", it)) == gaps
            chains = store.advances_since([(it, "w", 0) for it in names], 9)
            assert " ".join(sorted(name for name, _ in chains)) == gaps
            kept = "select coalesce(sum(cardinality(ids)), 0)::int from tidemark.packed_advances"
            assert rows(sql, kept) == [(3 if days < 4 else 0,)]
        store.policies.change("*", {"history_days": None}, "ada", "audit is over")
        store.apply_retention(TODAY + 5 * DAY)
        since = "select stream, ((%s)::date - since::date)::int from tidemark.history_since order by 1"
        assert rows(sql, since, TODAY + 5 * DAY) == [("*", 2), ("a*", 3), ("ab", 2)]


def test_history_past_its_time_is_dropped(dsn: str, sql: psycopg.Connection, lease: Lease) -> None:
    """Advances, closed gaps and batches go after their days, what is audited after more; what still counts stays."""
    late = [LateCompletion("w", 1, n, n + 1, 1, "skipped") for n in (7, 3)]
    forced = [OperatorOverride("w", 1, "SKIP", 3, 9, "ann", "stuck for days")]
    gaps = [Gap("w", 1, 20, 30, NOW), Gap("w", 1, 40, 50, NOW)]
    with Postgres(PostgresConfig(dsn, Retention(history_days=2, audit_days=5))) as store:
        held = stream("s", advance("w", 0, 9), late=late, overrides=forced, gaps=gaps)
        store.apply(batch(1, held, stream("t", advance("gone", 0, 5)), token=lease.token))
        closed = stream("s", closed=[ClosedGap("w", 30, "joined")])
        store.apply(batch(2, closed, stream("t", dropped_writers=["gone"]), token=lease.token, query="old"))
        store.apply(batch(3, token=lease.token))
        sql.execute("update tidemark.applied_batches set applied_at = %s", (TODAY,))

        def counts() -> dict[str, int]:
            tables = ("position_advances", "stream_gaps", "applied_batches", "skips", "late_completions")
            return {it: rows(sql, f"select count(*) from tidemark.{it}")[0][0] for it in (*tables, "writer_numbers")}

        before = counts()
        store.apply_retention(TODAY + 2 * DAY)
        assert counts() == before
        store.apply_retention(TODAY + 3 * DAY)
        after = before | {"position_advances": 0, "stream_gaps": 1, "applied_batches": 1, "writer_numbers": 1}
        assert counts() == after
        assert store.last_batch() == ("query", 3)
        store.apply_retention(TODAY + 6 * DAY)
        assert counts() == after | {"skips": 0, "late_completions": 1}
        assert (
            store.positions(["s"])["s"].last_late_number
            == rows(sql, "select max(number) from tidemark.late_completions")[0][0]
        )

        later = NOW + 6 * DAY // timedelta(milliseconds=1)
        store.apply(batch(4, stream("t", advance("gone", 5, 6)), token=lease.token, now=later))
        assert viewed(sql, "stream, writer, prev, id") == [("t", "gone", 5, 6)]
        assert [it.advance.id for it in store.advances_since([("t", "gone", 0)], 9)["t", "gone"]] == [6]
