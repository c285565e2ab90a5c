"""What every sink must keep (`sinks.port`): monotone, idempotent, fenced, isolated, refilled. A new
sink is one more subject.

Postgres keeps the first three itself, against a query that brings again what another one has committed.
"""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AdminClient

from tests.sinks.given import NOW, advance, batch, entries, stream
from tests.sinks.sqlite import SqliteSink
from tests.sinks.test_publisher import DEAD_LETTERS, NEVER, effects
from tests.waiting import eventually
from tidemark.common.errors import LeaseLost
from tidemark.common.kafka import ErrorListener, PartitionReader
from tidemark.sinks.background import Maintenance, MaintenanceConfig
from tidemark.sinks.dead_letters import DeadLetters
from tidemark.sinks.port import Batch, CommitResult, Fence, Sink
from tidemark.sinks.positions_topic import PositionsTopic, PositionsTopicConfig
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.publisher import Publisher
from tidemark.sinks.redis.client import STREAMS_KEY, key
from tidemark.sinks.redis.mirror import Mirror
from tidemark.sinks.redis.publish import Redis
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics, positions_plan
from tidemark.streaming.core.effects import LateCompletion, StreamEffects

NAMES = ("s", "back", "far")


@dataclass
class GivenFence:
    token: int

    def check(self) -> None:
        """Never knows of a newer owner: the sink has to find out."""


class Publishes(Protocol):
    def publish(self, batch: Batch, committed: CommitResult) -> object: ...


class Subject(Protocol):
    """Where positions are shown: `positions` has each stream's line and writers, `everything` what readers see."""

    def sink(self, fence: Fence) -> Publishes: ...
    def positions(self) -> dict[str, tuple[int, dict[str, int]]]: ...
    def everything(self) -> object: ...


class SinkSubject(Subject, Protocol):
    """A sink, how it can lose what it holds, and how one stream of it can be made impossible and possible again."""

    def sink(self, fence: Fence) -> Sink: ...
    def lose_all(self) -> None: ...
    def spoil(self, stream: str) -> None: ...
    def mend(self, stream: str) -> None: ...


class InPostgres:
    def __init__(self, store: Postgres, sql: Any) -> None:
        self._store = store
        self._sql = sql

    def sink(self, fence: Fence) -> Publishes:
        return _Again(self._store, fence)

    def positions(self) -> dict[str, tuple[int, dict[str, int]]]:
        return {name: (it.linear, it.positions) for name, it in self._store.positions(self._store.streams()).items()}

    def everything(self) -> object:
        query = "select stream, writer, prev, id, facts, empty, unseen, skipped from tidemark.position_advances"
        return self.positions(), self._sql.execute(f"{query} order by stream, writer, abs(id)").fetchall()


@dataclass
class _Again:
    """Another query brings the same."""

    store: Postgres
    fence: Fence

    def publish(self, batch: Batch, committed: CommitResult) -> object:
        return self.store.apply(replace(batch, query="another", token=self.fence.token))


class InRedis:
    def __init__(self, store: Postgres, redis: Redis, keys: Any) -> None:
        self._store = store
        self._redis = redis
        self._keys = keys

    def sink(self, fence: Fence) -> Sink:
        return Mirror(self._store, self._redis, fence)

    def positions(self) -> dict[str, tuple[int, dict[str, int]]]:
        held = self._redis.snapshots(sorted(self._keys.smembers(STREAMS_KEY)))
        return {name: (it.linear or 0, it.positions) for name, it in held.items()}

    def everything(self) -> object:
        lists = {name: sorted(map(str, entries(self._keys, name))) for name in self.positions()}
        return self.positions(), lists, {name: self._keys.get(key(name, "token")) for name in lists}

    def lose_all(self) -> None:
        self._keys.flushall()

    def spoil(self, stream: str) -> None:
        self._keys.delete(key(stream, "positions"))
        self._keys.rpush(key(stream, "positions"), "not ours")

    def mend(self, stream: str) -> None:
        self._keys.delete(key(stream, "positions"))


class InSqlite:
    def __init__(self, store: Postgres, path: Path) -> None:
        self._store = store
        self._path = path

    def sink(self, fence: Fence) -> Sink:
        return SqliteSink(self._store, self._path, fence)

    def positions(self) -> dict[str, tuple[int, dict[str, int]]]:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as database:
            database.execute("begin")  # both tables as of one moment; a refill may be making them
            if not database.execute("select 1 from sqlite_master where name = 'positions'").fetchone():
                return {}
            found: dict[str, tuple[int, dict[str, int]]] = {
                name: (linear, {}) for name, linear in database.execute("select stream, linear from lines")
            }
            for name, writer, position in database.execute("select stream, writer, position from positions"):
                found[name][1][writer] = position
        return found

    def everything(self) -> object:
        return self.positions()

    def lose_all(self) -> None:
        self._path.unlink()

    def spoil(self, stream: str) -> None:
        with closing(sqlite3.connect(self._path)) as database:
            database.execute(
                "create trigger spoilt before insert on positions"
                f" when new.stream = '{stream}' begin select raise(abort, 'not ours'); end"
            )

    def mend(self, stream: str) -> None:
        with closing(sqlite3.connect(self._path)) as database:
            database.execute("drop trigger spoilt")


class InKafka:
    def __init__(self, store: Postgres, connection: KafkaConnection, topic: str) -> None:
        self._store = store
        self._topics = Topics(connection)
        self._connection = connection
        self._topic = topic
        self._make()

    def _make(self) -> None:
        self._topics.create_missing([positions_plan(self._topic)])

    def sink(self, fence: Fence) -> Sink:
        config = PositionsTopicConfig(
            self._topic, self._connection.client_settings(), self._connection.producer_settings()
        )
        return PositionsTopic(self._store, config, Topics(self._connection), fence)

    def records(self) -> list[tuple[str, bytes | None]]:
        """Every record, as a consumer with `read_committed` gets them. No position of a stream ever goes back."""
        errors = ErrorListener("")
        reader = PartitionReader(self._connection.client_settings(), errors, 30, "read_committed")
        with closing(reader):
            found = list(takewhile(lambda it: it is not None, reader.read(self._topic, 0, 0)))
        pairs = [(it.key().decode(), it.value()) for it in found if it is not None]
        ours = [json.loads(value) for _, value in pairs if value and value != NOT_OURS]
        for name in {it["stream"] for it in ours}:
            linear = [abs(it["linear"]) for it in ours if it["stream"] == name]
            assert linear == sorted(linear)
        return pairs

    def positions(self) -> dict[str, tuple[int, dict[str, int]]]:
        found: dict[str, tuple[int, dict[str, int]]] = {}
        for name, value in self.records():
            found.pop(name, None)
            if value and value != NOT_OURS:
                record = json.loads(value)
                found[name] = record["linear"], record["vector"]
        return found

    def everything(self) -> object:
        return self.positions()

    def lose_all(self) -> None:
        admin = AdminClient(self._connection.client_settings())
        admin.delete_topics([self._topic], operation_timeout=60)[self._topic].result()
        eventually(lambda: self._describes_nothing(admin))
        self._make()

    def _describes_nothing(self, admin: AdminClient) -> bool:
        described = admin.describe_topics(TopicCollection([self._topic]))[self._topic]
        return described.exception() is not None

    def spoil(self, stream: str) -> None:
        self._produce(stream, NOT_OURS)

    def mend(self, stream: str) -> None:
        self._produce(stream, None)

    def _produce(self, stream: str, value: bytes | None) -> None:
        producer = Producer(self._connection.producer_settings())
        producer.produce(self._topic, key=stream.encode(), value=value)
        assert producer.flush(60) == 0


NOT_OURS = b"not ours"
SINKS = ["redis", "sqlite", "kafka"]


@pytest.fixture(params=["postgres", *SINKS])
def place(
    request: pytest.FixtureRequest,
    store: Postgres,
    shown: Redis,
    sql: Any,
    keys: Any,
    connection: KafkaConnection,
    prefix: str,
    tmp_path: Path,
) -> Any:
    made: dict[str, Callable[[], Subject]] = {
        "postgres": lambda: InPostgres(store, sql),
        "redis": lambda: InRedis(store, shown, keys),
        "sqlite": lambda: InSqlite(store, tmp_path / "positions.db"),
        "kafka": lambda: InKafka(store, connection, f"{prefix}.positions"),
    }
    return made[request.param]()


class Commits:
    """Batches that Postgres has, in the order of their numbers."""

    def __init__(self, store: Postgres, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._number = 0

    def __call__(self, *streams: StreamEffects) -> tuple[Batch, CommitResult]:
        self._number += 1
        made = batch(self._number, *streams, token=self._lease.token, now=NOW + self._number)
        return made, self._store.apply(made)

    def again(self, made: Batch) -> tuple[Batch, CommitResult]:
        return made, self._store.apply(made)


@pytest.fixture
def commit(store: Postgres, lease: Lease) -> Commits:
    return Commits(store, lease)


def steps() -> Iterator[tuple[StreamEffects, ...]]:
    """Three batches of three streams: one forward with two writers, one backward, one at the end of 63 bits."""
    yield (
        stream("s", advance("w", 0, 3), advance("v", 0, 4), linear=3),
        stream("back", advance("w", 0, -2), linear=-2),
        stream("far", advance("w", 0, 2**62), linear=2**62),
    )
    yield (
        stream("s", advance("w", 3, 9), linear=4, linear_prev=3),
        stream("back", advance("w", -2, -30), linear=-30, linear_prev=-2),
    )
    yield (
        stream("s", advance("v", 4, 10, empty=6), linear=9, linear_prev=4, late=[LateCompletion("w", 1, 1, 2, 1, "x")]),
        stream("far", advance("w", 2**62, 2**63 - 1), linear=2**63 - 1, linear_prev=2**62),
    )


END = {
    "s": (9, {"w": 9, "v": 10}),
    "back": (-30, {"w": -30}),
    "far": (2**63 - 1, {"w": 2**63 - 1}),
}


def test_it_shows_what_was_committed(place: Subject, commit: Commits, lease: Lease) -> None:
    """Batch after batch, forward and backward, to the last ID there is."""
    sink = place.sink(lease)
    for step in steps():
        sink.publish(*commit(*step))
    assert place.positions() == END


@pytest.mark.parametrize("order", [(2, 0), (1, 2, 0, 1), (2, 1, 0)], ids=str)
def test_monotone(place: Subject, commit: Commits, lease: Lease, order: tuple[int, ...]) -> None:
    """Rule 2: what comes late, again or out of order moves nothing back."""
    sink = place.sink(lease)
    made = [commit(*step) for step in steps()]
    for each in made:
        sink.publish(*each)
    for number in order:
        sink.publish(*made[number])
        assert place.positions() == END


def test_idempotent(place: Subject, commit: Commits, lease: Lease) -> None:
    """Rule 3: a batch that is repeated, by its process or by the next one, adds nothing to what readers see."""
    sink = place.sink(lease)
    for step in steps():
        made, committed = commit(*step)
        sink.publish(made, committed)
        before = place.everything()
        sink.publish(made, committed)
        assert place.everything() == before
        place.sink(lease).publish(*commit.again(made))
        assert place.everything() == before


def test_fenced(place: Subject, commit: Commits, lease: Lease, sql: Any) -> None:
    """Rule 6: once a newer owner has published, the older one changes nothing any more."""
    first, second, third = steps()
    older = place.sink(lease)
    older.publish(*commit(*first))
    made = [commit(*second), commit(*third)]
    sql.execute("update tidemark.query_lease set token = token + 1")
    newer = place.sink(GivenFence(lease.token + 1))
    newer.publish(*made[0])
    before = place.everything()
    with pytest.raises(LeaseLost):
        older.publish(*made[1])
    assert place.everything() == before
    newer.publish(*made[1])
    assert place.positions() == END


@pytest.fixture(params=SINKS)
def copy(
    request: pytest.FixtureRequest,
    store: Postgres,
    shown: Redis,
    keys: Any,
    connection: KafkaConnection,
    prefix: str,
    tmp_path: Path,
) -> Any:
    made: dict[str, Callable[[], SinkSubject]] = {
        "redis": lambda: InRedis(store, shown, keys),
        "sqlite": lambda: InSqlite(store, tmp_path / "positions.db"),
        "kafka": lambda: InKafka(store, connection, f"{prefix}.positions"),
    }
    return made[request.param]()


def test_refilled(copy: SinkSubject, commit: Commits, lease: Lease) -> None:
    """Rule 4: whatever is lost comes back out of Postgres, and what is whole is left alone."""
    sink = copy.sink(lease)
    sink.check()
    for step in steps():
        sink.publish(*commit(*step))
    before = copy.everything()
    copy.lose_all()
    assert sink.refill().stream_count == len(NAMES)
    assert copy.everything() == before
    assert sink.refill().stream_count == 0


def test_what_was_found_is_told_as_it_was_before_it_was_mended(
    copy: SinkSubject, commit: Commits, lease: Lease
) -> None:
    """Where both stand, of each stream that is shown: so that people see how far copies are apart."""
    sink = copy.sink(lease)
    assert sink.compared_positions() == {}
    first, *later = steps()
    sink.publish(*commit(*first))
    shown = {name: line for name, (line, _) in copy.positions().items()}
    for step in later:
        commit(*step)
    sink.refill()
    true = {name: line for name, (line, _) in copy.positions().items()}
    assert sink.compared_positions() == {name: (true[name], shown[name]) for name in shown}
    assert true != shown
    sink.refill()
    assert sink.compared_positions() == {name: (line, line) for name, line in true.items()}


def test_a_loss_is_noticed(copy: SinkSubject, commit: Commits, lease: Lease) -> None:
    """Rule 4: a sink that cannot know whether it is whole says so, once; and again after every loss."""
    sink = copy.sink(lease)
    assert sink.check_for_loss()
    assert not sink.check_for_loss()
    sink.publish(*commit(*next(steps())))
    assert not sink.check_for_loss()
    copy.lose_all()
    assert sink.check_for_loss()
    assert not sink.check_for_loss()
    assert copy.sink(lease).check_for_loss()


def test_half_of_a_stream_is_never_shown(copy: SinkSubject, commit: Commits, lease: Lease) -> None:
    """Rule 4: a batch that comes after a loss, or after batches that were committed by a process that died before it
    showed them, brings with it what is missing."""
    first, second, third = steps()
    sink = copy.sink(lease)
    sink.publish(*commit(*first))
    copy.lose_all()
    sink.publish(*commit(*second))
    assert copy.positions()["s"] == (4, {"w": 9, "v": 4})
    commit(*third)
    copy.sink(lease).publish(*commit(stream("s", advance("w", 9, 11), linear=9, linear_prev=9)))
    assert copy.positions() == END | {"s": (9, {"w": 11, "v": 10})}


def test_a_refill_is_fenced(copy: SinkSubject, commit: Commits, lease: Lease) -> None:
    """Rule 6: who was replaced does not write what it read before."""
    older, newer = copy.sink(lease), copy.sink(GivenFence(lease.token + 1))
    first, second, _ = steps()
    older.publish(*commit(*first))
    newer.publish(*commit(*second))
    commit(stream("s", advance("w", 9, 11), linear=4, linear_prev=4))
    with pytest.raises(LeaseLost):
        older.refill()
    assert copy.positions()["s"] == (4, {"w": 9, "v": 4})


def test_a_stream_that_cannot_be_shown_holds_no_other_up(copy: SinkSubject, commit: Commits, lease: Lease) -> None:
    """The fault of one stream is named and is that stream's alone, also for the next process; what it lacks comes with
    the refill after it was mended."""
    first, second, third = steps()
    sink = copy.sink(lease)
    sink.publish(*commit(*first))
    copy.spoil("s")
    sink.publish(*commit(*second))
    assert sink.faults().keys() == {"s"}
    sink.publish(*commit(*third))
    sink.refill()
    restarted = copy.sink(lease)
    restarted.refill()
    assert restarted.faults().keys() == {"s"}
    copy.mend("s")
    sink.refill()
    assert sink.faults() == {}
    assert copy.positions() == END


def test_a_fence_far_above_the_lease_is_known_at_once(copy: SinkSubject, commit: Commits, lease: Lease) -> None:
    """Rule 6: who meets fences of owners that its database knows nothing of learns of the highest at the first try, not
    of the lowest: the next token passes all of them."""
    first, second, _ = steps()
    made = [commit(*first), commit(*second)]
    copy.sink(GivenFence(lease.token + 5)).publish(*made[0])
    copy.sink(GivenFence(lease.token + 1000)).publish(*made[1])
    with pytest.raises(LeaseLost) as caught:
        copy.sink(lease).publish(*commit(stream("far", advance("w", 2**62, 2**63 - 1), linear=2**63 - 1)))
    assert caught.value.newest == lease.token + 1000


def test_a_forgotten_writer_is_forgotten(copy: SinkSubject, commit: Commits, lease: Lease) -> None:
    """A writer that left the state leaves the sink, and where it joins again it stands where Postgres has it."""
    sink = copy.sink(lease)
    sink.publish(*commit(stream("s", advance("w", 0, 100), linear=100)))
    sink.publish(*commit(stream("s", dropped_writers=["w"], linear=100, linear_prev=100)))
    assert copy.positions() == {"s": (100, {})}
    sink.publish(*commit(stream("s", advance("w", 0, 60, empty=60, epoch=2), linear=100, linear_prev=100)))
    assert copy.positions() == {"s": (100, {"w": 100})}


def test_a_third_sink_is_one_line(store: Postgres, shown: Redis, keys: Any, lease: Lease, tmp_path: Path) -> None:
    """The publisher and its maintenance take any sinks: one line in `app.pipeline.supervisor`."""
    path = tmp_path / "positions.db"
    sinks: list[Sink] = [
        Mirror(store, shown, lease),
        SqliteSink(store, path, lease),
    ]
    publisher = Publisher(store, sinks, DeadLetters(DEAD_LETTERS), lease, NEVER)
    in_sqlite, in_redis = InSqlite(store, path), InRedis(store, shown, keys)
    with Maintenance(sinks, store, lease, MaintenanceConfig(poll_seconds=0.05)):
        published = [publisher.publish("query", number, effects(number)) for number in (1, 2)]
        assert set(published[-1].seconds) == {"postgres", "redis", "sqlite", "dead_letters"}
        assert in_sqlite.positions() == in_redis.positions() == {"s": (20, {"w": 20}), "back": (-10, {"w": -10})}
        path.unlink()
        keys.flushall()
        eventually(lambda: path.exists() and in_sqlite.positions() == in_redis.positions() and in_redis.positions())
    assert {thread.name for thread in threading.enumerate()}.isdisjoint({"maintenance"})
