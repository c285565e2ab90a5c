"""The condition of the pipeline: the lease, the last batch, the Kafka lag, and Redis.

The positions in Postgres do not show whether they are up to date. So `tidemark status` shows this condition too.
"""

import shlex
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tidemark.app.connections import accepts_connections
from tidemark.app.output import count, duration, one_line
from tidemark.common.errors import TidemarkError, Unavailable
from tidemark.common.timestamps import timestamp
from tidemark.sinks.postgres.status import Condition, LaggingPartition
from tidemark.sinks.postgres.store import Postgres
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.sinks.redis.client import RedisAddress

TIMEOUT_SECONDS = 3.0  # for Kafka, and for Redis; a person waits for the result
MAX_LAGGING = 3  # partitions in the text; the JSON has all
MAX_QUIET_SECONDS = 60.0  # without a batch while there are unread records


@dataclass(frozen=True, slots=True)
class PipelineCondition:
    """The condition of the pipeline.

    Attributes:
        condition: the part of the condition that is stored in Postgres.
        unread_by_partition: by topic and partition, the number of unread records; negative if the end of the partition
            is below the committed offset. None if no pipeline has ever started, or if Kafka does not answer.
        kafka: the error of Kafka; None if Kafka has answered, or was not queried.
        redis: the error of Redis; None if Redis has answered, or was not queried.
        bootstrap: the address of Kafka, for the commands in messages.
    """

    condition: Condition
    unread_by_partition: Mapping[tuple[str, int], int] | None
    kafka: str | None
    redis: str | None = None
    bootstrap: str = "HOST:9092"

    @property
    def unread_records(self) -> int:
        """The number of unread records in all partitions; 0 if not known. Partitions with lost records count as 0."""
        return sum(max(0, records) for records in self.unread_by_partition.values()) if self.unread_by_partition else 0

    def problems(self) -> list[str]:
        """Messages for people about causes that prevent up-to-date positions; empty if there are none."""
        condition, problems = self.condition, list[str]()
        if condition.owner is None:
            problems.append("no pipeline has ever used this database")
        elif not condition.lease_seconds:
            problems.append(f"no pipeline is active; the last active pipeline was {condition.owner}")
        if condition.waits_for is not None:
            problems.append(f"no position moves: {condition.waits_for}")
        if self.kafka is not None:
            problems.append(f"the Kafka lag is unknown: {self.kafka}")
        if self.redis is not None:
            problems.append(f"Redis cannot be used from here, so positions may not be published: {self.redis}")
        for (topic, partition), records in sorted((self.unread_by_partition or {}).items()):
            if records < 0:
                problems.append(
                    f"the end of partition {partition} of Kafka topic {topic} is {count(-records, 'record')} below the"
                    " committed offset: records were lost"
                )
        if (
            condition.seconds_since_batch is not None
            and condition.seconds_since_batch > MAX_QUIET_SECONDS
            and self.unread_records > 0
        ):
            lag = count(self.unread_records, "record")
            problems.append(f"no batch for {duration(condition.seconds_since_batch)}, although the Kafka lag is {lag}")
        problems += [self._transaction_message(lag) for lag in condition.lagging if lag.blocked_offset is not None]
        return problems

    def _transaction_message(self, lag: LaggingPartition) -> str:
        """A message about the open Kafka transaction that blocks a partition, with Kafka's commands to find its
        producer and to abort the transaction (KIP-664)."""
        assert lag.blocked_since is not None  # stored with `blocked_offset`
        tool = f"kafka-transactions.sh --bootstrap-server {shlex.quote(self.bootstrap)}"
        spec = f"--topic {shlex.quote(lag.topic)} --partition {lag.partition}"
        return (
            f"an open Kafka transaction blocks partition {lag.partition} of {lag.topic} at offset {lag.blocked_offset}"
            f" since {timestamp(lag.blocked_since)}; {count(lag.records, 'record')} cannot be read. A stream"
            f" that only these records name is not listed. Find the producer: {tool} describe-producers {spec}. If the"
            f" producer is gone, abort the transaction: {tool} abort {spec} --start-offset {lag.blocked_offset}"
        )

    def line(self) -> str:
        """The condition in one line."""
        condition = self.condition
        owner = f"active on {condition.owner}" if condition.lease_seconds else "not running"
        batch = (
            "no batch yet"
            if condition.seconds_since_batch is None
            else f"last batch {duration(condition.seconds_since_batch)} ago"
        )
        lag = "unknown" if self.unread_by_partition is None else count(self.unread_records, "record")
        return f"pipeline: {owner}, {batch}, Kafka lag {lag}"

    def lines(self, now: datetime) -> list[str]:
        """The text of `line`, then a line for each of the `MAX_LAGGING` partitions that have had lag for the longest
        time. If there are more partitions with lag, also a line with their number."""
        lagging = sorted(self.condition.lagging, key=lambda lag: (lag.since, -lag.records))
        shown = [self.line(), *(_lag_line(lag, now) for lag in lagging[:MAX_LAGGING])]
        if len(lagging) > MAX_LAGGING:
            shown.append(f"  and {count(len(lagging) - MAX_LAGGING, 'more partition')} with lag")
        return shown

    def to_json(self) -> dict[str, Any]:
        condition = self.condition
        return {
            "owner": condition.owner,
            "lease_seconds": round(condition.lease_seconds, 1),
            "last_batch_seconds": None
            if condition.seconds_since_batch is None
            else round(condition.seconds_since_batch, 1),
            "records_waiting": None if self.unread_by_partition is None else self.unread_records,
            "lagging_partitions": [
                {
                    "topic": lag.topic,
                    "partition": lag.partition,
                    "records": lag.records,
                    "since": lag.since,
                    "blocked_offset": lag.blocked_offset,
                    "blocked_since": lag.blocked_since,
                }
                for lag in condition.lagging
            ],
            "problems": self.problems(),
        }


def _lag_line(lag: LaggingPartition, now: datetime) -> str:
    age = duration((now - lag.since).total_seconds())
    where = f"  partition {lag.partition} of {lag.topic}"
    if not lag.records:
        return f"{where}: Kafka has not answered for {age}"
    return f"{where}: lag {count(lag.records, 'record')}, the oldest has been unread for {age}"


def read_condition(
    postgres: Postgres,
    kafka: KafkaConnection,
    redis: "RedisAddress | str | None",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> PipelineCondition:
    """Read the condition of the pipeline from Postgres, Kafka and Redis. Errors of Kafka and Redis are part of the
    result.

    Args:
        postgres: Tidemark's database.
        kafka: the connection to Kafka.
        redis: the address of Redis; None: do not query Redis, because it is known to answer.
        timeout_seconds: the longest wait for Kafka, in each of up to two attempts, and for Redis.

    Raises:
        Unavailable, Refused: Postgres did not answer, or refused the session.
    """
    condition = postgres.conditions.current()
    topics = {name: partitions for name, (_, partitions) in postgres.remembered_setup().topics.items()}
    if not topics:
        return PipelineCondition(condition, None, None, _redis_error(redis, timeout_seconds), kafka.bootstrap)
    committed = postgres.offsets()  # before the end offsets, so that the lag is not negative
    began = time.monotonic()
    try:
        ends = _end_offsets(kafka, topics, timeout_seconds)
    except TidemarkError as problem:
        error = f"{one_line(problem)} (waited {duration(time.monotonic() - began)})"
        return PipelineCondition(condition, None, error, _redis_error(redis, timeout_seconds), kafka.bootstrap)
    unread_by_partition = {
        (topic, partition): ends[topic, partition] - offset
        for topic, partitions in committed.items()
        for partition, offset in partitions.items()
        if (topic, partition) in ends
    }
    return PipelineCondition(
        condition, unread_by_partition, None, _redis_error(redis, timeout_seconds), kafka.bootstrap
    )


def _end_offsets(
    kafka: KafkaConnection, topics: Mapping[str, int], timeout_seconds: float
) -> dict[tuple[str, int], int]:
    """Read the end offsets of `topics` (name -> number of partitions): (topic, partition) -> offset. If Kafka accepts
    connections but does not answer in time, as on a busy machine, tries once more."""
    try:
        return Topics(kafka, timeout_seconds).end_offsets(topics)
    except Unavailable:
        if not accepts_connections(kafka.bootstrap):
            raise
    return Topics(kafka, timeout_seconds).end_offsets(topics)


def _redis_error(redis: "RedisAddress | str | None", timeout_seconds: float) -> str | None:
    """Connect to Redis and check it. Returns the error, or None. If `redis` is None, does nothing."""
    if redis is None:
        return None
    from tidemark.sinks.redis.publish import Redis, RedisConfig  # noqa: PLC0415 - redis-py is slow to import

    try:
        with Redis(RedisConfig(redis, timeout=timeout_seconds)) as sink:
            sink.check()
    except TidemarkError as problem:
        return one_line(problem)
    return None


def read_configured_condition(settings: "Settings", postgres: Postgres) -> PipelineCondition:
    """Read the condition of the pipeline from the servers in the settings. Raises the errors of `read_condition`."""
    return read_condition(postgres, settings.kafka, None if _answers_ping(settings) else settings.redis)


def _answers_ping(settings: "Settings") -> bool:
    """Whether Redis answers PING. False also for an address that only redis-py supports, such as a Sentinel.

    This function avoids the import of redis-py, which takes a third of the time of `tidemark status`. If it returns
    False, the caller uses redis-py, whose error explains the problem.
    """
    url = urlsplit(settings.redis_url.get_secret_value())
    if url.scheme not in ("redis", "rediss") or url.query or not url.hostname:
        return False
    user, password = unquote(url.username or ""), settings.secret("redis_password") or unquote(url.password or "")
    login = [_command("AUTH", *([user] if user else []), password)] if password else []
    calls = [*login, _command("PING")]
    try:
        with socket.create_connection((url.hostname, url.port or 6379), TIMEOUT_SECONDS) as unencrypted:
            connection = unencrypted
            if url.scheme == "rediss":
                context = ssl.create_default_context(cafile=settings.redis_ca_file)
                connection = context.wrap_socket(unencrypted, server_hostname=url.hostname)
            connection.sendall(b"".join(calls))
            answers = connection.makefile("rb")
            return [answers.readline() for _ in calls][-1] == b"+PONG\r\n"
    except (OSError, ValueError):
        return False


def _command(*words: str) -> bytes:
    """Encode a command of Redis (RESP)."""
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
