"""How the pipeline is, asked of a real Postgres."""

from datetime import UTC, datetime

import pytest

from tests.sinks.given import NOW, advance, batch, rejected, stream
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.status import MAX_LATE_COUNT, ConditionReader
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core.effects import LateCompletion


@pytest.fixture
def conditions(store: Postgres) -> ConditionReader:
    return store.conditions


def moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def test_nothing_is_known_before_the_first_start(conditions: ConditionReader) -> None:
    """No owner, no batch and no dead letter is an answer, not an error."""
    found = conditions.current()
    assert (found.owner, found.lease_seconds, found.seconds_since_batch, found.dead_letters) == (None, 0.0, None, [])
    assert conditions.late(["s"]) == {}


def test_owner_and_last_batch(conditions: ConditionReader, store: Postgres, lease: Lease) -> None:
    """Who holds the lease and for how long it lives; after its release it is over, and the owner still has a name."""
    store.apply(batch(1, token=lease.token))
    found = conditions.current()
    assert found.owner == "test"
    assert found.lease_seconds > 0
    assert found.seconds_since_batch is not None
    assert found.seconds_since_batch < 60
    lease.close()
    assert (conditions.current().owner, conditions.current().lease_seconds) == ("test", 0.0)


def test_rejected_records_are_counted_once(conditions: ConditionReader, store: Postgres, lease: Lease) -> None:
    """Rule 5: by reason, over all batches; a batch that comes again counts nothing."""
    letters = [rejected("facts", "zombie", range(2)), rejected("facts", "zombie", range(5, 6), partition=1)]
    store.apply(batch(1, token=lease.token, rejected=letters))
    last = batch(2, token=lease.token, rejected=[rejected("facts", "conflict", [9]), *letters], now=NOW + 5)
    store.apply(last)
    assert store.apply(last).is_repeat
    assert [(it.reason, it.records, it.newest) for it in conditions.current().dead_letters] == [
        ("zombie", 6, moment(NOW + 5)),
        ("conflict", 1, moment(NOW + 5)),
    ]


def test_late_completions_are_counted_up_to_a_bound(conditions: ConditionReader, store: Postgres, lease: Lease) -> None:
    """Of the streams that are asked for, and never more of one stream than people want to know."""
    late = [LateCompletion("w", 1, id, id + 1, 1, "skipped") for id in range(MAX_LATE_COUNT + 5)]
    streams = [stream("s", advance("w", 0, 999), late=late), stream("t", advance("w", 0, 9), late=late[:1])]
    store.apply(batch(1, *streams, token=lease.token))
    assert {name: it.count for name, it in conditions.late(["s", "t", "u"]).items()} == {"s": MAX_LATE_COUNT, "t": 1}
    assert conditions.late(["t"])["t"].newest == moment(NOW)


def test_streams_that_a_sink_cannot_show_are_noted_with_their_time(
    conditions: ConditionReader, store: Postgres
) -> None:
    """Each is there from when it was first noted until it is not noted again, with the newest text."""
    store.note_faults({("redis", "a"): "one", ("redis", "b"): "two"})
    first = conditions.faults()
    assert [(it.sink, it.stream, it.problem) for it in first] == [("redis", "a", "one"), ("redis", "b", "two")]
    store.note_faults({("redis", "a"): "other", ("else", "b"): "three"})
    assert [(it.sink, it.stream, it.problem) for it in conditions.faults()] == [
        ("else", "b", "three"),
        ("redis", "a", "other"),
    ]
    assert conditions.faults()[1].since == first[0].since
    store.note_faults({})
    assert conditions.faults() == []
