"""The bridge beside a real Synapse, and what Tidemark makes of what it sends, held against Synapse's tables."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psycopg
from confluent_kafka import Consumer, TopicPartition

from tests.fix_synapse import BridgeProcess
from tests.services.synapse import Homeserver
from tests.sources.relay.world import Core
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.sources.kafka import KafkaConnection
from tidemark.streaming.effects import StreamEffects

EVENTS = "select stream_ordering, coalesce(instance_name, 'master') from events where stream_ordering > 0"


class Follower:
    """Reads one topic of one partition as it grows; `core` is Tidemark without Spark. `took` is told each batch."""

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        took: Callable[[Sequence[StreamEffects]], object] = lambda _: None,
    ) -> None:
        self.core = Core("events")
        self._took = took
        self.values: list[bytes] = []
        settings = {"group.id": "follower", "enable.auto.commit": "false", "fetch.wait.max.ms": "50"}
        self._consumer = Consumer({**connection.client(), **settings})
        self._consumer.assign([TopicPartition(topic, 0, 0)])

    def follow(self, seconds: float = 0.1) -> None:
        """Take what comes in that time."""
        values = [message.value() or b"" for message in self._consumer.consume(5000, seconds) if not message.error()]
        self.values += values
        if values:
            self._took(self.core.take(values))

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

    def bridge(self, *words: str) -> BridgeProcess:
        made = BridgeProcess(self.home, f"bridge-{len(self.bridges)}", self.variables, words)
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
        return self.checked() and core.line == self.head() and {*core.positions.values()} == {core.line}

    def settle(self, seconds: float = 60) -> None:
        """At rest positions are what the sequence and a client's own token say, and each event was told once."""
        eventually(self.at_rest, seconds, lambda: f"line {self.follower.core.line} of {self.head()}, {self.known()}")
        core = self.follower.core
        assert {id: writer for id, writer in self.rows().items() if id > self.floor} == {
            id: writer for id, writer in core.writers.items() if id > self.floor
        }
        assert self.server.token("alice") == f"s{core.line}"

    def known(self) -> str:
        logs = [self.home.log(bridge.name).read_text()[-2000:] for bridge in self.bridges]
        return f"positions {self.follower.core.positions}\n" + "\n".join(logs)

    @contextmanager
    def traffic(self, rooms: Sequence[str], threads: int = 2) -> Iterator[list[str]]:
        """Messages into these rooms meanwhile; gives those that were acknowledged. Nobody waits long for the dead."""
        ended, sent = threading.Event(), list[str]()
        patience, self.server.patience = self.server.patience, 2.0

        def run(number: int) -> None:
            count = 0
            while not ended.is_set():
                count += 1
                try:
                    sent.append(self.server.send(rooms[(count * threads + number) % len(rooms)], "alice", f"m{count}"))
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
