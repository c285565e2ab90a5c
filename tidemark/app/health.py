"""How the pipeline is from which positions come: the lease, the last batch, Kafka's end against what was read, Redis.

Positions stand in Postgres however dead it is, so whoever shows them says this too.
"""

import shlex
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tidemark.app.output import count, one_line
from tidemark.common.errors import TidemarkError
from tidemark.sinks.postgres.status import Condition, LaggingPartition
from tidemark.sinks.postgres.store import Postgres
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.sinks.redis.client import RedisAddress

PATIENCE = 3.0  # seconds for Kafka, and for Redis: people wait for the answer
QUIET_AFTER = 60.0  # seconds without a batch that are none of a healthy pipeline for which records wait


@dataclass(frozen=True, slots=True)
class PipelineCondition:
    """`waiting` counts records that Kafka has and nobody read, by topic and partition; below 0: it has fewer than were
    read. None where no pipeline ever started here, or Kafka does not answer: `kafka` says what it said. `redis` is what
    Redis said where it does not let us in.
    """

    condition: Condition
    waiting: Mapping[tuple[str, int], int] | None
    kafka: str | None
    redis: str | None = None
    bootstrap: str = "HOST:9092"
    """Kafka's address, for the commands that people are shown."""

    @property
    def records(self) -> int:
        return sum(self.waiting.values()) if self.waiting else 0

    def problems(self) -> list[str]:
        """For people; none where positions are as new as they can be."""
        it, found = self.condition, []
        if it.owner is None:
            found.append("no pipeline has ever run here")
        elif not it.lease:
            found.append(f"no pipeline holds the lease; the last one was {it.owner}")
        if it.waits is not None:
            found.append(f"positions are held: {it.waits}")
        if self.kafka is not None:
            found.append(f"Kafka does not tell how many records wait: {self.kafka}")
        if self.redis is not None:
            found.append(f"nothing can be published: {self.redis}")
        for (topic, partition), records in sorted((self.waiting or {}).items()):
            if records < 0:
                found.append(f"partition {partition} of {topic} ends {-records} records before what was read of it")
        if it.quiet is not None and it.quiet > QUIET_AFTER and self.records > 0:
            found.append(f"no batch was applied for {it.quiet:.0f} s, although {self.records} records wait")
        found += [self._blocked(lag) for lag in it.lagging if lag.blocked_offset is not None]
        return found

    def _blocked(self, lag: LaggingPartition) -> str:
        """An open transaction, with the commands that find its producer and abort it: those of KIP-664."""
        tool = f"kafka-transactions.sh --bootstrap-server {shlex.quote(self.bootstrap)}"
        place = f"--topic {shlex.quote(lag.topic)} --partition {lag.partition}"
        return (
            f"an open Kafka transaction blocks partition {lag.partition} of {lag.topic} at offset {lag.blocked_offset}"
            f" since {lag.blocked_since:%Y-%m-%d %H:%M:%S} UTC; {count(lag.records, 'record')} cannot be read, and"
            f" streams whose records are all there are not listed. Find its producer:"
            f" {tool} describe-producers {place}."
            f" If the producer is gone, abort the transaction: {tool} abort {place} --start-offset {lag.blocked_offset}"
        )

    def line(self) -> str:
        """All of it in one line."""
        it = self.condition
        owner = f"{it.owner} holds the lease" if it.lease else "nobody holds the lease"
        batch = "no batch yet" if it.quiet is None else f"last batch {it.quiet:.0f} s ago"
        waiting = "unknown" if self.waiting is None else str(self.records)
        return f"pipeline: {owner}, {batch}, records that wait in Kafka: {waiting}"

    def plain(self) -> dict[str, Any]:
        it = self.condition
        return {
            "owner": it.owner,
            "lease_seconds": round(it.lease, 1),
            "last_batch_seconds": None if it.quiet is None else round(it.quiet, 1),
            "records_waiting": None if self.waiting is None else self.records,
            "lagging_partitions": [
                {
                    "topic": lag.topic,
                    "partition": lag.partition,
                    "records": lag.records,
                    "since": lag.since,
                    "blocked_offset": lag.blocked_offset,
                    "blocked_since": lag.blocked_since,
                }
                for lag in it.lagging
            ],
            "problems": self.problems(),
        }


def read(
    postgres: Postgres, kafka: KafkaConnection, redis: "RedisAddress | str | None", patience: float = PATIENCE
) -> PipelineCondition:
    """Waits `patience` seconds for Kafka, and for Redis (None: known to answer).

    Raises:
        Unavailable, Refused: Postgres did not answer, or refused us. The result has the problems of Kafka and Redis.
    """
    condition = postgres.conditions.now()
    topics = {name: partitions for name, (_, partitions) in postgres.remembered().topics.items()}
    if not topics:
        return PipelineCondition(condition, None, None, _said_by(redis, patience), kafka.bootstrap)
    known = postgres.offsets()  # first, so that what is read meanwhile makes no count below 0
    try:
        ends = Topics(kafka, patience).end_offsets(topics)
    except TidemarkError as problem:
        return PipelineCondition(condition, None, one_line(problem), _said_by(redis, patience), kafka.bootstrap)
    waiting = {
        (topic, partition): ends[topic, partition] - offset
        for topic, partitions in known.items()
        for partition, offset in partitions.items()
        if (topic, partition) in ends
    }
    return PipelineCondition(condition, waiting, None, _said_by(redis, patience), kafka.bootstrap)


def _said_by(redis: "RedisAddress | str | None", patience: float) -> str | None:
    """None if Redis lets us in."""
    if redis is None:
        return None
    from tidemark.sinks.redis.publish import Redis, RedisConfig  # noqa: PLC0415 - redis-py is slow to import

    try:
        with Redis(RedisConfig(redis, timeout=patience)) as sink:
            sink.check()
    except TidemarkError as problem:
        return one_line(problem)
    return None


def of(settings: "Settings", postgres: Postgres) -> PipelineCondition:
    """`read` with the servers that the settings name."""
    return read(postgres, settings.kafka, None if _answers_ping(settings) else settings.redis)


def _answers_ping(settings: "Settings") -> bool:
    """Whether a single Redis server answers PING.

    A short form without redis-py, whose import takes a third of the time of `tidemark status`. If anything is unusual
    the answer is False, and redis-py is asked, which also knows what to say of a problem.
    """
    url = urlsplit(settings.redis_url.get_secret_value())
    if url.scheme not in ("redis", "rediss") or url.query or not url.hostname:
        return False
    user, password = unquote(url.username or ""), settings.secret("redis_password") or unquote(url.password or "")
    login = [_command("AUTH", *([user] if user else []), password)] if password else []
    calls = [*login, _command("PING")]
    try:
        with socket.create_connection((url.hostname, url.port or 6379), PATIENCE) as plain:
            connection = plain
            if url.scheme == "rediss":
                context = ssl.create_default_context(cafile=settings.redis_ca_file)
                connection = context.wrap_socket(plain, server_hostname=url.hostname)
            connection.sendall(b"".join(calls))
            answers = connection.makefile("rb")
            return [answers.readline() for _ in calls][-1] == b"+PONG\r\n"
    except (OSError, ValueError):
        return False


def _command(*words: str) -> bytes:
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
