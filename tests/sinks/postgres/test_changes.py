"""What Postgres took in since a mark: too much rather than too little, whatever clocks do."""

import threading
from datetime import UTC, datetime

import pytest

from tests.fix_sinks import LEASE
from tests.sinks.given import NOW, advance, batch, stream
from tidemark.sinks.postgres.history import DurableMark, FullChanges
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.retention import Retention
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.core.effects import LateCompletion

MINUTE = 60_000


def move(store: Postgres, number: int, lease: Lease, now: int, *names: str) -> None:
    moved = [stream(name, advance("w", number - 1, number), linear=number) for name in names]
    store.apply(batch(number, *moved, token=lease.token, query=f"of {lease.token}", now=now))


def mark(store: Postgres) -> DurableMark:
    return store.changes_since(None, None).mark


def ids(found: FullChanges | None) -> dict[str, list[int]]:
    assert found is not None
    return {name: sorted(it.advance.id for it in past) for name, past in found.advances.items()}


def test_only_what_came_since_is_told(store: Postgres, lease: Lease) -> None:
    """Streams that stood still cost nothing; the batch of the mark itself may come again."""
    move(store, 1, lease, NOW, "s", "t")
    move(store, 2, lease, NOW + 1000, "s")
    before = mark(store)
    move(store, 3, lease, NOW + 2000, "s")
    found = store.changes_since(before, None)
    assert {name: dict(it.positions) for name, it in found.streams.items()} == {"s": {"w": 3}}
    assert set(store.changes_since(None, ["t"]).streams) == {"t"}
    assert ids(store.full_changes_since(before, 100, 60)) == {"s": [2, 3]}


def test_pipeline_whose_clock_is_behind_hides_nothing(store: Postgres, dsn: str) -> None:
    """What a successor committed after the mark, by an earlier clock, is told all the same."""
    with Lease.acquire(dsn, LEASE, threading.Event()) as lease:
        move(store, 1, lease, NOW - 2 * MINUTE, "s")
        move(store, 2, lease, NOW, "s")
    before = mark(store)
    with Lease.acquire(dsn, LEASE, threading.Event()) as successor:
        move(store, 3, successor, NOW - MINUTE // 2, "s", "t")
    assert ids(store.full_changes_since(before, 100, 60))["s"] == [2, 3]
    assert set(store.changes_since(before, None).streams) == {"s", "t"}


def test_late_completions_since(store: Postgres, lease: Lease) -> None:
    """They are told in the order of their numbers."""
    move(store, 1, lease, NOW, "s")
    before = mark(store)
    late = [LateCompletion("w", 1, n, n + 1, 1, "skipped") for n in (7, 3)]
    store.apply(batch(2, stream("s", late=late, linear=1), token=lease.token, now=NOW + 1))
    found = store.full_changes_since(before, 100, 60)
    assert found is not None
    assert [it.late.prev for it in found.late["s"]] == [7, 3]


@pytest.mark.parametrize("time", [0, NOW - 10 * MINUTE, NOW + 10 * MINUTE])
def test_what_is_not_kept_is_not_guessed(store: Postgres, lease: Lease, time: int) -> None:
    """Neither before the history begins, nor after all that this database holds."""
    move(store, 1, lease, NOW, "s")
    assert store.full_changes_since(DurableMark(1, time), 100, 60) is None


def test_too_much_is_not_told(store: Postgres, lease: Lease) -> None:
    """More than was asked for gives none of it."""
    move(store, 1, lease, NOW, "s")
    before = mark(store)
    for number in range(2, 6):
        move(store, number, lease, NOW + number, "s")
    assert store.full_changes_since(before, 4, 60) is None
    assert ids(store.full_changes_since(before, 5, 60)) == {"s": [1, 2, 3, 4, 5]}


def test_dropped_history_is_not_guessed(store: Postgres, lease: Lease, dsn: str) -> None:
    """Where the history was dropped, streams are told and moves are not."""
    move(store, 1, lease, NOW, "s")
    before = mark(store)
    with Postgres(PostgresConfig(dsn, Retention(history_days=1))) as tidy:
        tidy.apply_retention(datetime.now(UTC))
    assert store.full_changes_since(before, 100, 60) is None
