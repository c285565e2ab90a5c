"""The bridge beside a real Synapse, and what Tidemark makes of what it sends, held against Synapse's tables."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psycopg
import redis
from confluent_kafka import Consumer, TopicPartition
from psycopg.conninfo import make_conninfo

from tests.fix_redis import Node
from tests.fix_synapse import READER, BridgeProcess
from tests.services.synapse import NAME, Homeserver
from tests.sinks.reader.given import Pipeline
from tests.sources.relay.world import Core
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import KafkaServer
from tidemark.sinks.reader import Positions, Reader, Table
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.synapse.state import SCHEMA, state_session
from tidemark.sources.synapse.tables import STREAMS
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Open

EVENTS = "select stream_ordering, coalesce(instance_name, 'master') from events where stream_ordering > 0"


class Follower:
    """Reads one topic of one partition as it grows; `cores` are Tidemark without Spark, by stream. `took` is told each
    batch of one stream."""

    def __init__(
        self, connection: KafkaConnection, topic: str, took: Callable[[Sequence[StreamEffects]], object] = len
    ) -> None:
        self.cores = {name: Core(name) for name in STREAMS}
        self._took = took
        self.values: list[bytes] = []
        settings = {"group.id": "follower", "enable.auto.commit": "false", "fetch.wait.max.ms": "50"}
        self._consumer = Consumer({**connection.client_settings(), **settings})
        self._consumer.assign([TopicPartition(topic, 0, 0)])

    @property
    def core(self) -> Core:
        """That of `events`."""
        return self.cores["events"]

    def follow(self, seconds: float = 0.1) -> None:
        """Take what comes in that time."""
        found: dict[str, list[bytes]] = {}
        for message in self._consumer.consume(5000, seconds):
            if not message.error():
                found.setdefault((message.key() or b"").decode(), []).append(message.value() or b"")
        for stream, values in found.items():
            self.values += values
            self._took(self.cores[stream].take(values))

    def close(self) -> None:
        self._consumer.close()


@dataclass
class SynapseSite:
    """One test's world."""

    server: Homeserver
    home: Home
    variables: dict[str, str]
    follower: Follower
    sql: psycopg.Connection
    bridges: list[BridgeProcess] = field(default_factory=list)

    def bridge(self, *reported_positions: str) -> BridgeProcess:
        made = BridgeProcess(self.home, f"bridge-{len(self.bridges)}", self.variables, reported_positions)
        self.bridges.append(made)
        made.start()
        return made

    def checked(self) -> bool:
        """No event is stepped over: every one at or below the line, or its writer's position, has been told or lies
        where the stream was joined. True, or it fails."""
        self.follower.follow()
        core, joined = self.follower.core, self.floor
        for id, writer in self.rows().items():
            if id not in core.facts and id > joined:
                assert id > core.line, f"{id} of {writer} is not told, and the line is at {core.line}"
                assert id > core.positions.get(writer, 0), f"{id} of {writer} is not told: {core.positions}"
        assert not core.late, core.late_ids
        assert not core.rejected, core.rejected
        return True

    @property
    def floor(self) -> int:
        return min(self.follower.core.joined.values(), default=0)

    def rows(self) -> dict[int, str]:
        return dict(self.sql.execute(EVENTS).fetchall())

    def head(self) -> int:
        row = self.sql.execute("select last_value from events_stream_seq").fetchone()
        assert row is not None
        return int(row[0])

    def at_rest(self) -> bool:
        """Whether everything is told; checked on the way."""
        core = self.follower.core
        at = {position for writer, position in core.positions.items() if writer not in core.retired}
        return self.checked() and core.line == self.head() and at == {core.line}

    def settle(self, seconds: float = 60) -> None:
        """At rest positions are what the sequence and a client's own token say, and each event was told once. A worker
        may still write what was sent to it while it was dead, though nobody waits for that any more."""
        core = self.follower.core

        def sent_upto() -> bool:
            rows = {id: writer for id, writer in self.rows().items() if id > self.floor}
            return self.at_rest() and rows == {id: writer for id, writer in core.writers.items() if id > self.floor}

        eventually(sent_upto, seconds, lambda: f"line {core.line} of {self.head()}, {self.known()}")
        eventually(
            lambda: self.checked() and self.server.token("alice") == f"s{core.line}",
            what=lambda: self.server.token("alice"),
        )

    def await_read(self, read: Sequence[int]) -> None:
        """Each event once, those included that are written meanwhile."""
        eventually(lambda: self.checked() and read == sorted(self.rows()), 60, lambda: f"{read} of {self.rows()}")

    def wait(self, seconds: float) -> None:
        """Look on meanwhile."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.checked()

    def room_of(self, writer: str) -> str:
        """A room whose events this worker writes."""
        while True:
            room = self.server.room("alice")
            if self.sql.execute(
                "select 1 from events where room_id = %s and instance_name = %s", [room, writer]
            ).fetchone():
                return room

    def opened(self) -> list[str]:
        """Who was told to hold the stream, last."""
        found = [record for value in self.follower.values if isinstance(record := records.decode(value), Open)]
        return found[-1].transactions if found else []

    def known(self) -> str:
        logs = [self.home.log(bridge.name).read_text()[-2000:] for bridge in self.bridges]
        return f"positions {self.follower.core.positions}\n" + "\n".join(logs)

    @contextmanager
    def traffic(
        self, rooms: Sequence[str], threads: int = 2, others: Callable[[int], object] | None = None
    ) -> Iterator[list[str]]:
        """Messages into these rooms meanwhile; gives those that were acknowledged. Nobody waits long for the dead."""
        ended, sent = threading.Event(), list[str]()
        others = others or (lambda _: None)
        patience, self.server.patience = self.server.patience, 4.0

        def run(number: int) -> None:
            count = 0
            while not ended.is_set():
                count += 1
                try:
                    sent.append(self.server.send(rooms[(count * threads + number) % len(rooms)], "alice", f"m{count}"))
                    others(count)
                except httpx.HTTPError:
                    ended.wait(0.05)

        running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        try:
            yield sent
        finally:
            ended.set()
            for thread in running:
                thread.join(90)
            self.server.patience = patience


@contextmanager
def made_site(
    server: Homeserver, home: Home, kafka: KafkaServer, topic: str, database: str, channel: Node, pipeline: Pipeline
) -> Iterator[SynapseSite]:
    """`database` is where bridges remember; what they tell goes to the sinks of `pipeline`."""
    for process in [server.main, *server.workers.values()]:
        process.start()  # a test that failed may have left it dead
    # What a test has sent to a worker that it killed may take IDs in the middle of the next one.
    eventually(lambda: not server.in_hand(), 90, lambda: f"the main process has in hand: {server.in_hand()}")
    connection = KafkaConnection(kafka.bootstrap_servers)
    Topics(connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    with state_session(database) as session:
        SCHEMA.migrate(session)
    variables = {
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": topic,
        "TIDEMARK_POSTGRES_DSN": database,
        "TIDEMARK_SYNAPSE_DSN": make_conninfo(server.dsn, user=READER, password=READER),
        "TIDEMARK_SYNAPSE_REDIS_URL": channel.url,
    }
    follower = Follower(connection, topic, lambda effects: pipeline.publish(*effects))
    with psycopg.connect(server.dsn, autocommit=True) as sql:
        made = SynapseSite(server, home, variables, follower, sql)
        try:
            yield made
        finally:
            for bridge in made.bridges:
                bridge.kill()
            follower.close()


@contextmanager
def overheard(url: str) -> Iterator[list[str]]:
    """The lines that Synapse's processes send each other meanwhile, as they come."""
    lines, ended = list[str](), threading.Event()
    with redis.Redis.from_url(url) as client, client.pubsub() as received:
        received.subscribe(NAME)
        assert received.get_message(timeout=60)  # confirmed

        def run() -> None:
            while not ended.is_set():
                if message := received.get_message(timeout=0.1):
                    lines.append(message["data"].decode())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield lines
        finally:
            ended.set()
            thread.join(60)


@contextmanager
def reading(site: SynapseSite, redis_url: str, dsn: str) -> Iterator[list[int]]:
    """A consumer with the reader's library; gives the IDs of what it has read, as it goes on."""
    stopping, read = threading.Event(), list[int]()
    table = Table("events", id="stream_ordering", writer="instance_name", columns=("event_id",))

    def run() -> None:
        source = site.variables["TIDEMARK_SYNAPSE_DSN"]
        with (
            Positions(redis_url) as positions,
            Reader(positions, "events", table, name="search", source=source, effects=dsn, stopping=stopping) as reader,
        ):
            for batch in reader:
                read.extend(row["stream_ordering"] for row in batch.rows)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        try:
            yield read
        finally:
            stopping.set()
            done.result()
