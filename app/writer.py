"""`tidemark writer`: prepare a service's database, and do for a dead writer what its own restart would do."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import FOR_EVER, RecordProducer
from tidemark.sources.topics import Topics
from tidemark.sources.writer import Stream, fence, sequences
from tidemark.sources.writer.database import SCHEMA, session_of
from tidemark.sources.writer.fence import Holder
from tidemark.streaming.direction import DirectionName
from tidemark.streaming.postgres_session import Connection

KAFKA_SECONDS = 30.0

Say = Callable[[str], None]


def migrate(dsn: str, names: Sequence[str], direction: DirectionName, say: Say) -> None:
    """Bring the writer's schema up to date; make the sequences that are missing and check those that are there.

    Raises `SequenceUnfit` for the first that breaks a rule, `SchemaMismatch` where the schema is newer.
    """
    with session_of(dsn, "tidemark writer migrate") as session:
        applied = SCHEMA.migrate(session)
        say(f"applied {', '.join(map(str, applied))}" if applied else "the writer's schema is up to date")
        with session.use() as connection:
            for stream in _streams(names, direction):
                if sequences.inspect(connection, stream.sequence) is None:
                    sequences.create(connection, stream.sequence, stream.towards)
                    say(f"made sequence {stream.sequence}")
                sequences.require(connection, [stream])


def plan(dsn: str, names: Sequence[str], direction: DirectionName, say: Say) -> None:
    """Say what `migrate` would do; changes nothing, raises the same."""
    with session_of(dsn, "tidemark writer migrate --dry-run") as session, session.use() as connection:
        pending = SCHEMA.pending(connection)
        say(f"would apply {', '.join(map(str, pending))}" if pending else "the writer's schema is up to date")
        for stream in _streams(names, direction):
            if sequences.inspect(connection, stream.sequence) is None:
                say(f"would make sequence {stream.sequence}")
            else:
                sequences.require(connection, [stream])
                say(f"sequence {stream.sequence} is fit")


def _streams(names: Sequence[str], direction: DirectionName) -> list[Stream]:
    return [Stream(name, name, direction) for name in names]


def report(dsn: str, instance: str, say: Say) -> None:
    """Say what `fence` would find; changes nothing. Raises `UnknownWriter`."""
    with session_of(dsn, "tidemark writer fence --dry-run") as session:
        with session.use() as connection:
            SCHEMA.check(connection)
        found = fence.plan(session, instance)
    say(f"{instance} is in epoch {found.epoch}")
    for holder in found.holders:
        say(f"open transaction: {holder}")
    if not found.holders:
        say("no open transaction")
    for stream, allocated in found.allocated.items():
        say(f"{stream}: {_counted(found.leftovers.get(stream, 0), 'row')} in the outbox, would join at {allocated}")


@dataclass(frozen=True, slots=True)
class FenceOrder:
    """What an operator asked for."""

    instance: str
    terminate: bool
    retire: bool


def fence_writer(
    dsn: str,
    kafka: KafkaConnection,
    topic: str,
    order: FenceOrder,
    say: Say,
    clock: Callable[[], float] = time.time,
) -> None:
    """End the writer's epoch: wait for its transactions (or end them), tell what it left, join in its name.

    Raises `UnknownWriter`, and `Unavailable` where Kafka or Postgres does not answer: then run it again.
    """
    Topics(kafka).describe([topic])
    instance = order.instance
    with session_of(dsn, f"tidemark writer fence {instance}") as session:
        with session.use() as connection:
            SCHEMA.check(connection)
        before = fence.plan(session, instance)
        with session.use() as connection:
            streams = fence.registered(connection, instance)
        stuck = _EndsHolders(say) if order.terminate else _NamesHolders(say)
        begun = fence.raise_epoch(session, instance, streams, clock(), stuck)
        say(f"{instance} was in epoch {before.epoch}, which is over; now {begun.epoch}")
        producer = RecordProducer(kafka, topic, give_up_after=FOR_EVER)
        joined = fence.settle(session, producer, instance, begun, streams, KAFKA_SECONDS)
    for stream, start in joined.starts.items():
        say(
            f"{stream}: told {_counted(joined.leftovers.get(stream, 0), 'fact')} from the outbox,"
            f" everything up to {streams[stream][1].signed(start)} is settled"
        )
    if order.retire:
        fence.retire(producer, instance, begun.epoch, streams, joined.starts, KAFKA_SECONDS)
        say(f"{instance} is retired: it holds no linear position back any more")


class _NamesHolders:
    """Names each transaction that is waited for, once."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._named: set[int | None] = set()

    def __call__(self, connection: Connection, holders: list[Holder]) -> None:
        for holder in holders:
            if holder.pid not in self._named:
                self._named.add(holder.pid)
                self._say(f"waiting for open transaction: {holder} (--terminate ends it)")


class _EndsHolders:
    """Ends what is waited for, naming it."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def __call__(self, connection: Connection, holders: list[Holder]) -> None:
        for holder in holders:
            if holder.pid is not None:
                connection.execute("select pg_terminate_backend(%s)", [holder.pid])
            self._say(f"{'ended' if holder.pid is not None else 'cannot end'} open transaction: {holder}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
