"""A batch on its way to all sinks: killed between any two of them, and with any of them away."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.fix_sinks import LEASE
from tests.processes import forked
from tests.sinks.given import advance, entries, shard, stream
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import RedisServer
from tidemark.common.errors import ContentRefused, LeaseLost, Stopping
from tidemark.sinks.dead_letters import DeadLetterResult, DeadLetters, DeadLettersConfig
from tidemark.sinks.port import Batch, CommitResult, Sink
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.publisher import Publisher
from tidemark.sinks.redis.client import key
from tidemark.sinks.redis.mirror import Mirror
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.streaming.core.effects import OperatorOverride, ShardEffects

NEVER = threading.Event()
NO_POSITION = {"bootstrap.servers": "127.0.0.1:1"}  # no record is rejected here, so nothing connects
DEAD_LETTERS = DeadLettersConfig("dead", NO_POSITION, NO_POSITION)


def effects(number: int) -> list[ShardEffects]:
    """What batch `number` of every test does: two streams move by one batch's worth each."""
    return [
        shard(
            stream("s", advance("w", 10 * (number - 1), 10 * number), linear=10 * number),
            stream("back", advance("w", -5 * (number - 1), -5 * number), linear=-5 * number),
            offset=100 * number,
        )
    ]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DoomedPublisher(Publisher):
    """Is killed at the batch and moment that it is told."""

    at: tuple[int, str]

    def commit(self, batch: Batch) -> CommitResult:
        self._pass(batch, "before the commit")
        committed = super().commit(batch)
        self._pass(batch, "between the commit and Redis")
        return committed

    def publish_to_sink(self, sink: Sink, batch: Batch, committed: CommitResult) -> int:
        streams = super().publish_to_sink(sink, batch, committed)
        self._pass(batch, "between Redis and the dead letters")
        return streams

    def dead_letter(self, batch: Batch) -> DeadLetterResult:
        dead_lettered = super().dead_letter(batch)
        self._pass(batch, "after the dead letters")
        return dead_lettered

    def _pass(self, batch: Batch, moment: str) -> None:
        if self.at == (batch.number, moment):
            die()


def publish_doomed(dsn: str, redis_url: str, batch: int, moment: str) -> None:
    """A process that publishes batches until it is killed at `moment` of `batch`."""
    with (
        Postgres(PostgresConfig(dsn)) as postgres,
        Redis(RedisConfig(redis_url)) as redis,
        Lease.acquire(dsn, LEASE, NEVER) as lease,
    ):
        publisher = DoomedPublisher(postgres, [Mirror(postgres, redis, lease)], DeadLetters(DEAD_LETTERS), lease, NEVER)
        publisher.at = (batch, moment)
        for number in range(1, batch + 1):
            publisher.publish("query", number, effects(number))


@pytest.fixture
def publisher(store: Postgres, shown: Redis, lease: Lease) -> Publisher:
    return Publisher(store, [Mirror(store, shown, lease)], DeadLetters(DEAD_LETTERS), lease, NEVER)


def assert_undisturbed(store: Postgres, keys: Any, batches: int) -> None:
    """Both sinks hold exactly what a run without any fault leaves: rules 2, 3 and 4."""
    for name, unit in (("s", 10), ("back", -5)):
        ids = [unit * number for number in range(1, batches + 1)]
        chain = store.advances_since([(name, "w", 0)], 100)[name, "w"]
        assert [(it.advance.prev, it.advance.id) for it in chain] == list(zip([0, *ids], ids, strict=False))
        assert [(it["prev"], it["id"]) for it in entries(keys, name)] == [
            (str(it.advance.prev), str(it.advance.id)) for it in chain
        ]
        assert store.positions([name])[name].linear == ids[-1]
        assert keys.get(key(name, "token")) == f"m{ids[-1]}"
    assert store.offsets() == {"facts": {0: 100 * batches}}


@pytest.mark.parametrize(
    "moment",
    [
        "before the commit",
        "between the commit and Redis",
        "between Redis and the dead letters",
        "after the dead letters",
    ],
)
def test_killed_process_leaves_no_trace(dsn: str, redis_url: str, store: Postgres, keys: Any, moment: str) -> None:
    """Rules 2, 3 and 4: after kill -9 at each moment of a batch, the next process, whose query goes on after what
    Postgres has, ends where an undisturbed one does.
    """
    process = forked.Process(target=publish_doomed, args=(dsn, redis_url, 2, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    if moment == "before the commit":
        assert keys.get(key("s", "linear")) == "10"
    last = store.last_batch()
    assert last is not None
    with Redis(RedisConfig(redis_url)) as redis, Lease.acquire(dsn, LEASE, NEVER) as lease:
        publisher = Publisher(store, [Mirror(store, redis, lease)], DeadLetters(DEAD_LETTERS), lease, NEVER)
        for number in range(last[1] + 1, 5):
            assert not publisher.publish("another query", number, effects(number)).is_repeat
    assert_undisturbed(store, keys, 4)


@pytest.fixture
def during() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Run something in a thread while the test does something else."""
    threads: list[threading.Thread] = []

    def run(work: Callable[[], object]) -> threading.Thread:
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return threads[-1]

    yield run
    for thread in threads:
        thread.join()


def test_postgres_that_dies_is_waited_for(
    publisher: Publisher,
    postgres: PostgresServer,
    dsn: str,
    keys: Any,
    during: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    """Postgres killed in the middle of batches: they wait, go on by themselves, and nothing is lost or doubled."""
    publisher.publish("query", 1, effects(1))
    postgres.kill()
    waiting = during(lambda: [publisher.publish("query", number, effects(number)) for number in (2, 3)])
    time.sleep(0.5)
    assert waiting.is_alive()
    postgres.start()
    waiting.join(60)
    with Postgres(PostgresConfig(dsn)) as fresh:
        assert_undisturbed(fresh, keys, 3)


def test_redis_that_dies_is_waited_for(
    publisher: Publisher,
    redis_server: RedisServer,
    store: Postgres,
    keys: Any,
    during: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    """Redis killed in the middle of batches: they wait after their commit, and go on by themselves."""
    publisher.publish("query", 1, effects(1))
    redis_server.kill()
    waiting = during(lambda: [publisher.publish("query", number, effects(number)) for number in (2, 3)])
    time.sleep(0.5)
    assert store.last_batch() == ("query", 2)
    redis_server.start()
    waiting.join(60)
    assert_undisturbed(store, keys, 3)


@pytest.mark.parametrize("by_whom", ["psycopg", "a constraint", "a trigger"])
def test_content_that_postgres_refuses_is_no_outage(
    publisher: Publisher, store: Postgres, sql: Any, keys: Any, by_whom: str
) -> None:
    """Rule 5: it is refused some times, and not for ever; nothing of the batch is there, and the next one goes on."""
    if by_whom == "a constraint":
        sql.execute("alter table tidemark.skips add constraint odd check (why <> 'odd')")
    elif by_whom == "a trigger":
        sql.execute("create function odd() returns trigger language plpgsql as $$ begin raise 'odd'; end $$")
        sql.execute(
            "create constraint trigger odd after insert on tidemark.skips deferrable initially deferred"
            " for each row when (new.why = 'odd') execute function odd()"
        )
    publisher.publish("query", 1, effects(1))
    forced = [OperatorOverride("w", 1, "SKIP", 20, 21, "ann", "o\0d" if by_whom == "psycopg" else "odd")]
    (good,) = effects(2)
    bad = shard(*good.streams, stream("odd", advance("w", 0, 1), linear=1, overrides=forced), offset=200)
    with pytest.raises(ContentRefused, match="NUL" if by_whom == "psycopg" else "odd"):
        publisher.publish("query", 2, [bad], ("query", 1))
    assert store.last_batch() == ("query", 1)
    token = publisher._lease.token
    assert store.find_refusal(Batch("query", 2, token, [bad]))
    assert store.find_refusal(Batch("query", 2, token, [good])) is None
    assert store.last_batch() == ("query", 1)
    for number in (2, 3):
        publisher.publish("query", number, effects(number), ("query", number - 1))
    assert_undisturbed(store, keys, 3)


def test_waiting_ends_when_told_to_stop(store: Postgres, lease: Lease) -> None:
    """A process that is to end does not wait for a sink that is away."""
    stopping = threading.Event()
    with Redis(RedisConfig("redis://127.0.0.1:1")) as away:
        publisher = Publisher(store, [Mirror(store, away, lease)], DeadLetters(DEAD_LETTERS), lease, stopping)
        threading.Timer(0.5, stopping.set).start()
        began = time.monotonic()
        with pytest.raises(Stopping):
            publisher.publish("query", 1, effects(1))
    assert time.monotonic() - began < 5
    assert store.last_batch() == ("query", 1)


def test_loser_of_a_split_brain_publishes_nothing(dsn: str, store: Postgres, shown: Redis, sql: Any, keys: Any) -> None:
    """Rule 6: two owners that both believe in their lease; only the newer one gets a batch into any sink."""
    with Lease.acquire(dsn, LeaseConfig("old", ttl_seconds=60), NEVER) as old:
        older = Publisher(store, [Mirror(store, shown, old)], DeadLetters(DEAD_LETTERS), old, NEVER)
        older.publish("query", 1, effects(1))
        sql.execute("update tidemark.query_lease set expires_at = now() - interval '1 second'")
        with Lease.acquire(dsn, replace(LEASE, owner="new"), NEVER) as new:
            newer = Publisher(store, [Mirror(store, shown, new)], DeadLetters(DEAD_LETTERS), new, NEVER)
            newer.publish("query", 2, effects(2))
            with pytest.raises(LeaseLost):
                older.publish("query", 3, effects(3))
            assert old.lost.is_set()
            newer.publish("query", 3, effects(3))
    assert_undisturbed(store, keys, 3)
