"""What a relay does in one go is bounded, so that one that is killed every few seconds still makes progress."""

from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

import psycopg
import pytest
from structlog.testing import capture_logs

from tests.fix_servers import Unsynced, _started
from tests.sources.relay.judge import Judge
from tests.sources.relay.running import Run, append, settled
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import free_port
from tidemark.common.errors import Unavailable
from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay import decider as deciding
from tidemark.sources.relay import epochs, relay, sequences
from tidemark.sources.relay.decider import Decider
from tidemark.sources.relay.queries import ROWS_AT_ONCE, SCHEMA, session_of
from tidemark.sources.relay.relay import MAX_UNACKNOWLEDGED_BYTES
from tidemark.sources.transactions import read_server_history
from tidemark.streaming.wire.records import Join

T = TypeVar("T")
STREAMS = [f"stream-{number}" for number in range(7)]


@pytest.fixture
def many(sql: psycopg.Connection) -> psycopg.Connection:
    for name in STREAMS:
        sql.execute("select tidemark.create_stream(%s)", [name])
    return sql


def append_to_all(sql: psycopg.Connection) -> None:
    for name in STREAMS:
        sql.execute("select tidemark.append(%s, '1')", [name])


def test_a_round_reads_some_streams_and_the_next_round_the_others(
    many: psycopg.Connection, ready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the first ones have something new each time: nobody is passed over for ever."""
    monkeypatch.setattr(deciding, "STREAMS_PER_ROUND", 3)
    with session_of(ready, "test") as session, session.use() as connection:
        told = epochs.begin(
            connection, read_server_history(connection, session.where, "tidemark.append_outbox"), "shop"
        )
        epochs.store_acknowledged(connection, told)
        decider = Decider(connection, told)
        reached = Counter[str]()
        for _ in range(3):
            append_to_all(many)
            decided = _taken(decider.run_round(1_000_000))
            assert 1 <= len(decided) <= 3
            for each in decided:
                reached[each.stream_epoch.stream.name] += 1
                decider.note_acknowledged(each)
        assert reached.keys() == {*STREAMS}
        for most in (3, 3, 1, 0):
            before = _floors(many)
            _taken(decider.raise_floors(3))
            assert len([it for it in _floors(many).items() if it not in before.items()]) == most


def test_a_large_transaction_leaves_other_streams_their_turn(many: psycopg.Connection, ready: str) -> None:
    """Facts that other streams commit after it are decided in the same round as its first piece, and in each round
    between its pieces."""
    with session_of(ready, "test") as session, session.use() as connection:
        told = epochs.begin(
            connection, read_server_history(connection, session.where, "tidemark.append_outbox"), "shop"
        )
        epochs.store_acknowledged(connection, told)
        decider = Decider(connection, told)
        append(many, 3 * ROWS_AT_ONCE)
        pieces = 0
        while pieces < 3:
            append_to_all(many)
            facts = Counter[str]()
            for decision in _taken(decider.run_round(MAX_UNACKNOWLEDGED_BYTES)):
                facts[decision.stream_epoch.stream.name] += len(decision.facts)
                decider.note_acknowledged(decision)
            assert facts.pop("orders") <= ROWS_AT_ONCE
            assert facts == dict.fromkeys(STREAMS, 1)
            pieces += 1
            _taken(decider.raise_floors())
        assert not decider.has_backlog


def test_joins_that_kafka_has_are_kept(
    many: psycopg.Connection, run: Run, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that ends while it joins leaves the next one only the rest."""
    monkeypatch.setattr(relay, "_JOINED_AT_ONCE", 2)
    append_to_all(many)
    real, sent = RecordProducer.send, list[str]()

    def send(self: RecordProducer, stream: str, value: bytes) -> None:
        sent.append(stream)
        if len(sent) == 6:
            raise Unavailable("Kafka", "here", "no")
        real(self, stream, value)

    with capture_logs() as logs:
        monkeypatch.setattr(RecordProducer, "send", send)
        run()
        eventually(lambda: settled(many))
    joined = Counter(it.stream for it in judge.verdict().records if isinstance(it, Join))
    assert joined.keys() == {*STREAMS, "orders"}
    assert sorted(joined.values()) == [1] * 7 + [2]
    assert any(it["event"] == "Cannot send facts; they stay in the database; trying again" for it in logs)


def _floors(sql: psycopg.Connection) -> dict[int, int]:
    return dict(sql.execute("select number, floor from tidemark.append_progress").fetchall())


def _taken(steps: Generator[str, None, T]) -> T:
    """What the steps return, all of them taken."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            value: T = over.value
            return value


class FewLocks(Unsynced):
    """A server whose lock table has room for some hundred locks."""

    def command(self) -> Sequence[str]:
        return [*super().command(), "-c", "max_locks_per_transaction=10", "-c", "max_connections=20"]


@pytest.mark.postgres
def test_a_relay_of_many_streams_takes_few_locks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a lock table that one statement over all its sequences would overflow."""
    with (
        _started(FewLocks(Home(tmp_path), free_port())) as server,
        session_of(server.dsn("postgres"), "test") as session,
    ):
        SCHEMA.migrate(session)
        with session.use() as connection:
            made = b"for at in 1..5000 loop perform tidemark.create_stream('s' || at); commit; end loop"
            connection.execute(b"do $$ begin " + made + b"; end $$")
            monkeypatch.setattr(sequences, "_prepared", WeakSet())
            whole = sequences._SNAPSHOTS.replace(b"limit 1000", b"limit 10000")
            with monkeypatch.context() as patched:
                patched.setattr(sequences, "_SNAPSHOTS", whole)
                with pytest.raises(psycopg.errors.OutOfMemory):
                    sequences.read_snapshots(connection)
            connection.execute("deallocate all")
            monkeypatch.setattr(sequences, "_prepared", WeakSet())
            assert len(sequences.read_snapshots(connection)) == 5000
