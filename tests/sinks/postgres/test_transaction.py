"""The transaction, on a real Postgres: what it writes, and what no order of calls can make it write."""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING
from tests.sinks.given import NOW, advance, batch, stream
from tidemark.common.errors import ChainBroken, LeaseLost
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres, PostgresConfig, RememberedSetup
from tidemark.streaming.core.effects import (
    ClosedGap,
    Gap,
    LateCompletion,
    NextOffset,
    OperatorOverride,
    ShardEffects,
    WriterAdvance,
    WriterRow,
)
from tidemark.streaming.values.limits import EncodedState

LARGEST = 2**63 - 1


@pytest.fixture
def token(lease: Lease) -> int:
    return lease.token


def rows(sql: psycopg.Connection, query: str) -> list[Any]:
    return sql.execute(query.encode()).fetchall()


def positions(sql: psycopg.Connection) -> dict[tuple[str, str], int]:
    found = rows(sql, "select stream, writer, position from tidemark.stream_positions")
    return {(stream, writer): position for stream, writer, position in found}


def history(sql: psycopg.Connection, columns: str = "prev, id") -> list[Any]:
    return rows(sql, f"select {columns} from tidemark.position_advances order by abs(id)")


def test_batch_is_kept_whole(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Position, line, history, state, offsets and the batch's number are there after one call."""
    moved = advance("w", 0, 9, facts=5, empty=2, unseen=1, skipped=1)
    store.apply(batch(7, stream("s", moved, linear=8, allocated=12, state=b"\x00s"), token=token, offset=40))
    assert positions(sql) == {("s", "w"): 9}
    assert history(sql, "stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch") == [
        ("s", "w", 1, 0, 9, 5, 2, 1, 1, 8, 7)
    ]
    assert history(sql, "extract(epoch from time) * 1000") == [(NOW,)]
    assert rows(sql, "select stream, linear, head, direction, shard, state from tidemark.streams") == [
        ("s", 8, 12, 1, 0, b"\x00s")
    ]
    assert store.states() == {"s": b"\x00s"}
    assert store.offsets() == {"facts": {0: 40}}
    assert store.last_batch() == ("query", 7)


def test_retired_writers_are_written_when_they_change(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 8: their table lies apart and stays where a batch has none; read, it stands where the state ends."""
    store.apply(batch(1, stream("s", state=b"one\xc0"), stream("t", state=b"whole"), token=token))
    assert store.states() == {"s": b"one\xc0", "t": b"whole"}
    store.apply(batch(2, stream("s", state=b"two\xc0", retired_table=b"many"), token=token))
    store.apply(batch(3, stream("s", state=b"three\xc0"), token=token))
    assert store.states() == {"s": b"threemany", "t": b"whole"}
    store.replace_states({"s": EncodedState(b"", b"four\xc0", b"few")})
    assert store.states(["s"]) == {"s": b"fourfew"}
    assert store.states(["t"]) == {"t": b"whole"}


def test_repeated_batch_writes_nothing(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 2: a batch that comes again, or an older one of the same query, is recognised and changes nothing."""
    store.apply(batch(1, stream("s", advance("w", 0, 1)), token=token))
    assert not store.apply(batch(2, stream("s", advance("w", 1, 5)), token=token)).is_repeat
    for number, *move in ((2, 1, 5), (1, 0, 1)):
        assert store.apply(batch(number, stream("s", advance("w", *move)), token=token)).is_repeat
    assert history(sql) == [(0, 1), (1, 5)]
    assert not store.apply(batch(1, stream("s", advance("w", 5, 6)), token=token, query="another")).is_repeat


def test_other_token_is_refused(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 6: a batch under any token but the newest is refused, and nothing of it is kept."""
    for other in (token - 1, token + 1):
        with pytest.raises(LeaseLost) as caught:
            store.apply(batch(1, stream("s", advance("w", 0, 1)), token=other))
        assert (caught.value.own, caught.value.newest) == (other, token)
    assert positions(sql) == {}
    assert store.last_batch() is None


@settings(max_examples=60, suppress_health_check=SHARING)
@given(
    sign=st.sampled_from((1, -1)),
    ends=st.lists(st.integers(0, LARGEST), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_no_order_of_writes_moves_anything_back(
    store: Postgres, sql: psycopg.Connection, token: int, sign: int, ends: list[int], data: st.DataObject
) -> None:
    """Rules 2 and 3: whatever stale rows come in whatever order, both directions, positions and line only move on."""
    name = f"s{time.monotonic_ns()}"
    seen = 0
    for end in data.draw(st.lists(st.sampled_from(ends), min_size=1, max_size=8)):
        row = WriterRow("w", 1, sign * end, is_retired=False)
        moved = [advance("w", 0, sign * end, empty=end)] if end else []
        effects = stream(name, *moved, linear=sign * end, writers=[row])
        store.apply(batch(1, effects, token=token, query=f"{name}{time.monotonic_ns()}"))
        seen = max(seen, end)
        held = store.positions([name])[name]
        assert (held.linear, held.positions) == (sign * seen, {"w": sign * seen})
    chain = [(a.advance.prev, a.advance.id) for a in store.advances_since([(name, "w", 0)], 100).get((name, "w"), [])]
    assert [prev for prev, _ in chain] == [0, *(id_ for _, id_ in chain[:-1])][: len(chain)]
    assert not chain or chain[-1][1] == sign * seen


def test_rejoined_writer_is_cut_to_what_was_open(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 3: a writer that had left the state joins again from 0; its advance goes on where Postgres knows it."""
    store.apply(batch(1, stream("s", advance("w", 0, 100)), token=token))
    store.apply(batch(2, stream("s", dropped_writers=["w"]), token=token))
    assert store.positions(["s"])["s"].forgotten_writers == {"w"}
    applied = store.apply(batch(3, stream("s", advance("w", 0, 130, unseen=120, facts=10, epoch=2)), token=token))
    assert applied.corrected_advances == {("s", "w"): WriterAdvance("w", 2, 100, 130, 10, 0, 20, 0, 0)}
    assert history(sql, "prev, id, facts, empty, unseen, skipped") == [(0, 100, 100, 0, 0, 0), (100, 130, 10, 0, 20, 0)]
    assert store.positions(["s"])["s"].forgotten_writers == frozenset()


def test_counts_as_wide_as_ids_go_are_cut_too(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 5: of spans that were divided each count may be as wide as the range; no sum of them leaves 64 bits."""
    store.apply(batch(1, stream("s", advance("w", 0, 9)), token=token))
    widest = advance("w", 0, LARGEST, empty=LARGEST, unseen=LARGEST, skipped=LARGEST)
    store.apply(batch(2, stream("s", widest, linear=9), token=token))
    assert history(sql, "prev, id, empty, unseen, skipped")[1:] == [(9, LARGEST, LARGEST, LARGEST - 9, LARGEST)]


def test_the_retired_writers_of_a_stream_that_rests_are_forgotten(
    store: Postgres, sql: psycopg.Connection, token: int
) -> None:
    """After the time for which batches keep them; not those beyond the line, nor one that is active."""
    gone, ahead = WriterRow("gone", 1, 5, is_retired=True), WriterRow("ahead", 1, 9, is_retired=True)
    rows_of = [gone, ahead, WriterRow("active", 1, 7, is_retired=False)]
    store.apply(batch(1, stream("s", writers=rows_of, linear=7), token=token))
    then = datetime.fromtimestamp(NOW / 1000, UTC)
    store.apply_retention(then + timedelta(days=6))
    assert store.positions(["s"])["s"].forgotten_writers == frozenset()
    store.apply_retention(then + timedelta(days=8))
    assert store.positions(["s"])["s"].forgotten_writers == {"gone"}
    store.apply(batch(2, stream("s", advance("gone", 5, 8, epoch=2), linear=7, linear_prev=7), token=token))
    assert store.positions(["s"])["s"].positions == {"gone": 8, "ahead": 9, "active": 7}


def test_writer_that_rejoins_lower_stays(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rules 2 and 3: a forgotten writer that joins below its position makes no advance, and its position stands."""
    store.apply(batch(1, stream("s", advance("w", 0, -100)), token=token))
    store.apply(batch(2, stream("s", dropped_writers=["w"]), token=token))
    applied = store.apply(batch(3, stream("s", advance("w", 0, -60, empty=60, epoch=2)), token=token))
    assert applied.corrected_advances == {("s", "w"): None}
    assert applied.higher_positions == {("s", "w"): -100}
    assert history(sql) == [(0, -100)]
    assert rows(sql, "select position, epoch from tidemark.stream_positions") == [(-100, 2)]


def test_writer_that_stands_beyond_is_told_with_where(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Also where nothing of it was written; the others of its stream come out as the batch says."""
    store.apply(batch(1, stream("s", advance("w", 0, 9)), token=token))
    writer_rows = [WriterRow(name, 1, id_, is_retired=False) for name, id_ in (("v", 3), ("w", 5))]
    committed = store.apply(batch(2, stream("s", advance("v", 0, 3), writers=writer_rows), token=token))
    assert (committed.corrected_advances, committed.higher_positions) == ({}, {("s", "w"): 9})
    assert positions(sql) == {("s", "v"): 3, ("s", "w"): 9}
    assert history(sql, "writer, prev, id") == [("v", 0, 3), ("w", 0, 9)]


def test_advance_without_its_writer_is_kept(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """No batch has one; should there be one, it is in the history, and nothing stands where nobody said so."""
    store.apply(batch(1, stream("s", advance("w", 0, 9), advance("v", 0, 3), writers=[]), token=token))
    assert history(sql, "writer, prev, id") == [("v", 0, 3), ("w", 0, 9)]
    assert positions(sql) == {}


def test_batch_that_leaves_a_hole_is_refused(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 3: an advance that begins beyond what Postgres holds stops the pipeline, and nothing is kept."""
    store.apply(batch(1, stream("s", advance("w", 0, 5)), token=token))
    with pytest.raises(ChainBroken, match="has w at 5"):
        store.apply(batch(2, stream("s", advance("w", 6, 9)), token=token))
    assert store.last_batch() == ("query", 1)
    assert positions(sql) == {("s", "w"): 5}


def follow(store: Postgres, token: int, number: int, after: tuple[str, int] | None, query: str = "q") -> bool:
    """Apply a batch in which one writer moves by one; returns whether it was known."""
    effects = stream("s", advance("w", number - 1, number), linear=number)
    made = batch(number, effects, token=token, query=query)
    return store.apply(replace(made, previous_batch=after)).is_repeat


@pytest.mark.parametrize(("lost", "left"), [(3, "batch q/2"), (2, "batch q/1"), (1, "no batch")])
def test_a_batch_does_not_go_on_over_commits_that_were_lost(
    store: Postgres, sql: psycopg.Connection, token: int, lost: int, left: str
) -> None:
    """Rule 3: where the newest batches are gone from Postgres (a failover, a backup), the next one writes nothing and
    says what is there; a batch that is still there is recognised when it comes again, also out of turn."""
    for number in (1, 2, 3):
        assert not follow(store, token, number, ("q", number - 1) if number > 1 else None)
    assert follow(store, token, 3, ("q", 2))
    sql.execute("delete from tidemark.applied_batches where batch >= %s", (lost,))
    sql.execute("update tidemark.stream_positions set position = %s", (lost - 1,))
    with pytest.raises(ChainBroken, match=f"has {left}, but this batch follows batch q/3"):
        follow(store, token, 4, ("q", 3))
    assert positions(sql) == {("s", "w"): lost - 1}
    for number in range(1, lost):
        assert follow(store, token, number, ("q", number - 1))
    assert not follow(store, token, lost, ("q", lost - 1) if lost > 1 else None)


def test_the_first_batch_of_a_query_follows_what_it_was_seeded_with(store: Postgres, token: int) -> None:
    """Rule 3: commits that were lost between the seed and the first batch are noticed, and so is another query's."""
    follow(store, token, 1, None)
    for after in (None, ("q", 2), ("other", 1)):
        with pytest.raises(ChainBroken):
            follow(store, token, 2, after, query="next")
    assert not follow(store, token, 2, ("q", 1), query="next")


@pytest.mark.parametrize(("server", "ours"), [("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")])
def test_what_is_published_is_durable_whatever_the_server_says(
    dsn: str, sql: psycopg.Connection, token: int, server: str, ours: str
) -> None:
    """Rule 4: a database whose commits return before they are on the disk does so for others, not for a batch."""
    sql.execute(f"alter role current_user set synchronous_commit = {server}".encode())
    sql.execute("create table seen (how text)")
    sql.execute(
        "create function see() returns trigger language plpgsql as"
        " $$ begin insert into seen values (current_setting('synchronous_commit')); return null; end $$"
    )
    sql.execute("create trigger see after insert on tidemark.applied_batches execute function see()")
    try:
        with Postgres(PostgresConfig(dsn)) as quick:
            quick.apply(batch(1, token=token))
    finally:
        sql.execute("alter role current_user reset synchronous_commit")
    assert rows(sql, "select how from seen") == [(ours,)]


def test_epoch_and_retirement_change_without_a_move(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """A writer's row follows its epoch and its retirement where the position stays."""
    for number, (epoch, retired) in enumerate([(1, False), (1, True), (2, False)]):
        row = WriterRow("w", epoch, 5, retired)
        store.apply(batch(number, stream("s", writers=[row]), token=token))
        assert rows(sql, "select epoch, position, retired from tidemark.stream_positions") == [(epoch, 5, retired)]


def test_gaps_open_narrow_and_close(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 7: a gap keeps the time it was first seen while it narrows, and says at the end how it was closed; one that
    opens again at the same ID is another, also in the batch that closes it.
    """
    gap = Gap("w", 1, 4, 9, NOW)
    store.apply(batch(1, stream("s", gaps=[gap]), token=token))
    store.apply(batch(2, stream("s", gaps=[Gap("w", 1, 6, 9, NOW + 500)]), token=token, now=NOW + 1000))
    columns = "select low, top, extract(epoch from opened_at) * 1000, closed_by from tidemark.stream_gaps"
    assert rows(sql, columns) == [(6, 9, NOW, None)]
    store.apply(batch(3, stream("s", closed=[ClosedGap("w", 9, "joined")]), token=token, now=NOW + 2000))
    assert rows(sql, columns) == [(6, 9, NOW, "joined")]
    store.apply(batch(4, stream("s", gaps=[gap]), token=token))
    again = stream("s", gaps=[Gap("w", 2, 5, 9, NOW + 4000)], closed=[ClosedGap("w", 9, "joined")])
    store.apply(batch(5, again, token=token, now=NOW + 4000))
    assert rows(sql, columns + " order by opened_at, low") == [
        (4, 9, NOW, "joined"),
        (6, 9, NOW, "joined"),
        (5, 9, NOW + 4000, None),
    ]


def test_late_completions_and_forced_acts_are_kept(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Rule 5: late completions are numbered in their order, and an operator's act is kept with who and why."""
    late = [LateCompletion("w", 1, n, n + 1, 1, "skipped") for n in (7, 3, 5)]
    effects = stream("s", late=late, overrides=[OperatorOverride("w", 1, "SKIP", 3, 9, "ann", "stuck for days")])
    numbers = store.apply(batch(1, effects, token=token)).late_numbers["s"]
    assert numbers == sorted(numbers)
    kept = store.late_since([("s", 0)], 10)["s"]
    assert [(it.number, it.late) for it in kept] == list(zip(numbers, late, strict=True))
    assert rows(sql, "select kind, prev, id, by, why from tidemark.skips") == [("SKIP", 3, 9, "ann", "stuck for days")]
    assert store.positions(["s"])["s"].last_late_number == numbers[-1]


def test_offsets_only_rise(store: Postgres, token: int) -> None:
    """Of several shards the highest next offset of a partition counts, and a lower one is ignored."""
    shards = [
        ShardEffects(number, NOW, [], [], [NextOffset("facts", 0, offset), NextOffset("control", 0, 2)])
        for number, offset in enumerate((5, 9, 7))
    ]
    store.apply(type(batch(1))("query", 1, token, shards))
    store.apply(batch(2, token=token, offset=6))
    assert store.offsets() == {"facts": {0: 9}, "control": {0: 2}}
    store.set_offsets({"facts": {0: 3, 1: 1}})
    assert store.offsets() == {"facts": {0: 3, 1: 1}, "control": {0: 2}}


def test_batch_sends_no_notification(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """Every login can send notifications, and can fill their queue. A batch that sent one would then fail."""
    sql.execute("listen tidemark_positions")
    store.apply(batch(1, stream("a", advance("w", 0, 1)), stream("b"), token=token))
    sql.execute("notify tidemark_positions, 'end'")
    assert [it.payload for it in sql.notifies(timeout=60, stop_after=1)] == ["end"]


def test_streams_that_move_in_each_batch_stay_in_their_pages(
    store: Postgres, sql: psycopg.Connection, token: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rule 8: neither tables nor indexes grow, however often all rows are written; what each takes is printed."""
    sizes = []
    for number in range(1, 8):
        moved = [(advance("v", number - 1, number), advance("w", number - 1, number)) for _ in range(500)]
        named = (stream(f"s{at:03}", *moves, state=b"x" * 130) for at, moves in enumerate(moved))
        store.apply(batch(number, *named, token=token))
        sizes += rows(
            sql,
            "select pg_relation_size('tidemark.streams') + pg_indexes_size('tidemark.streams'),"
            " pg_relation_size('tidemark.stream_positions') + pg_indexes_size('tidemark.stream_positions')",
        )
    with capsys.disabled():
        print(f" [bytes of a stream and of a position: {[size // 500 for size in sizes[-1]]}] ", end="")  # noqa: T201
    assert sizes[1:] == sizes[1:2] * 6


def test_only_the_newest_thousand_batches_are_remembered(store: Postgres, sql: psycopg.Connection, token: int) -> None:
    """The list of applied batches is bounded, and what was dropped from it still counts as applied."""
    for number in (1, 2, 1002):
        store.apply(batch(number, token=token))
    assert rows(sql, "select batch from tidemark.applied_batches order by 1") == [(1002,)]
    assert store.apply(batch(1, token=token)).is_repeat


def test_names_may_hold_any_character(store: Postgres, token: int) -> None:
    """Quotes, braces, commas and back-slashes in names reach Postgres as they are."""
    names = ['a"b', "a{b}", "a,b", "a\\b", "NULL", "ü'~%"]
    store.apply(batch(1, *(stream(name, advance(name, 0, LARGEST, facts=1)) for name in names), token=token))
    held = store.positions(names)
    assert {name: held[name].positions for name in names} == {name: {name: LARGEST} for name in names}


def test_pipeline_remembers_shards_and_topics(store: Postgres) -> None:
    """What must not change behind the pipeline's back is kept; what is not named stays."""
    assert store.remembered_setup() == RememberedSetup(None, {})
    store.remember_setup(RememberedSetup(16, {"facts": ("id-1", 4), "control": ("id-2", 1)}))
    store.remember_setup(RememberedSetup(None, {"facts": ("id-3", 8)}))
    assert store.remembered_setup() == RememberedSetup(16, {"facts": ("id-3", 8), "control": ("id-2", 1)})


def test_ten_thousand_streams_in_one_batch(store: Postgres, token: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Rule 8: 10 000 streams with 80 000 advances are written by a handful of statements; the times are printed."""
    taken = []
    for number in (1, 2):
        effects = [
            stream(
                f"stream-{s}",
                *(advance(f"writer-{w}", 100 * (number - 1), 100 * number) for w in range(8)),
                linear=100 * number,
                state=bytes(200),
            )
            for s in range(10_000)
        ]
        began = time.monotonic()
        store.apply(batch(number, *effects, token=token))
        taken.append(round(time.monotonic() - began, 2))
    with capsys.disabled():
        print(f" [10 000 streams, 80 000 advances: first {taken[0]} s, again {taken[1]} s] ", end="")  # noqa: T201
