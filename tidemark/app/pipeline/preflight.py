"""Checks before the query starts: the topics exist, have the right configuration, and match the database."""

import uuid
from collections.abc import Set
from dataclasses import dataclass

from tidemark.app.settings import Settings
from tidemark.common.errors import ShardsChanged
from tidemark.common.log import get_logger
from tidemark.sinks.postgres.store import Postgres, RememberedSetup
from tidemark.sources.kafka import Offsets
from tidemark.sources.topics import (
    Acceptance,
    TopicIdentity,
    Topics,
    TopicState,
    positions_plan,
    require_policy,
    starting_offsets,
    topic_plans,
)
from tidemark.streaming.core import codec
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.engine.query import pack_by_shard
from tidemark.streaming.values.limits import Policies

log = get_logger(__name__)


def check_topics(settings: Settings, topics: Topics) -> dict[str, TopicState]:
    """Check the topics, and return them by name. Creates missing topics if `kafka_create_topics` is set.

    Raises:
        TopicMissing: a topic does not exist.
        WrongCleanupPolicy: a topic has the wrong cleanup policy.
        Unavailable: the brokers do not answer.
    """
    planned = topic_plans(
        settings.kafka_facts_topic,
        settings.kafka_control_topic,
        settings.kafka_dead_letters_topic,
        settings.kafka_partitions,
    )
    positions = [] if settings.kafka_positions_topic is None else [positions_plan(settings.kafka_positions_topic)]
    if settings.kafka_create_topics:
        for name in topics.create_missing([*planned, *positions]):
            log.info("Created a Kafka topic", topic=name)
    states = topics.describe(plan.name for plan in planned)
    require_policy(states.values())
    compacted = topics.describe(plan.name for plan in positions)
    require_policy(compacted.values(), "compact")
    return states | compacted


@dataclass(frozen=True, slots=True)
class Seed:
    """The start of a query: the batch that its first batch follows, and the states of the streams.

    Attributes:
        query: the name of the query. Each query has a new name.
        previous_batch: query and number of the last batch that Postgres has applied; None if it has applied no batch.
        states: shard -> packed states of the shard's streams (`streaming.engine.query.pack_by_shard`).
    """

    query: str
    previous_batch: tuple[str, int] | None
    states: dict[int, bytes]

    def batch_before(self, batch: int) -> tuple[str, int] | None:
        """The query and number of the batch that must be applied before `batch`; None if there is no such batch."""
        return (self.query, batch - 1) if batch > 0 else self.previous_batch


@dataclass(frozen=True, slots=True)
class QueryStart:
    """The data that a query needs at its start. `prepare` loads them.

    Attributes:
        seed: the name of the query, the last applied batch, and the states of the streams.
        offsets: the next offsets to read.
        lag: the number of unread records in Kafka.
        topics: topic name -> identity of each topic to read.
        states: the states of the seed, by stream.
        policies: the policies of the streams.
    """

    seed: Seed
    offsets: Offsets
    lag: int
    topics: dict[str, TopicIdentity]
    states: ShardedStates
    policies: Policies


def prepare(settings: Settings, postgres: Postgres, topics: Topics, accept: Set[Acceptance]) -> QueryStart:
    """Check the topics and the database, store the setup in Postgres, and load the start of the query.

    Only the process with the lease may call this function.

    Args:
        settings: the settings of the pipeline.
        postgres: Tidemark's database.
        topics: queries Kafka.
        accept: the differences that the operator accepts. Each accepted difference is recorded in Postgres, so that the
            next start does not need the acceptance again.

    Raises:
        Stop: a difference is not accepted, or a topic or the database is not suitable.
        Unavailable: Kafka or Postgres does not answer.
    """
    topic_states = check_topics(settings, topics)
    read = {name: topic_states[name] for name in (settings.kafka_facts_topic, settings.kafka_control_topic)}
    remembered = postgres.remembered_setup()
    offsets = starting_offsets(
        read,
        {name: TopicIdentity(id_, count) for name, (id_, count) in remembered.topics.items()},
        postgres.offsets(),
        accept,
    )
    if remembered.shard_count not in {None, settings.shards} and "shards" not in accept:
        raise ShardsChanged(remembered.shard_count, settings.shards)
    if accept:
        _record_acceptance(postgres, offsets, accept)
    postgres.remember_setup(
        RememberedSetup(settings.shards, {topic.name: (topic.id, len(topic.partitions)) for topic in read.values()})
    )
    postgres.set_late_numbers_ahead()
    states = pack_by_shard(postgres.states(), settings.shards)
    return QueryStart(
        Seed(uuid.uuid4().hex, postgres.last_batch(), states),
        offsets,
        sum(topic.partitions[number].end - at for name, topic in read.items() for number, at in offsets[name].items()),
        {name: TopicIdentity(topic.id, len(topic.partitions)) for name, topic in read.items()},
        ShardedStates(settings.shards, states),
        Policies(postgres.policies.read(), settings.policy_defaults),
    )


def _record_acceptance(postgres: Postgres, offsets: Offsets, accept: Set[Acceptance]) -> None:
    """Change the stored states and offsets in Postgres, so that the next start finds no difference."""
    if accept & {"partitions", "loss"}:
        deferred = [
            (name, item) for name, stored in postgres.states().items() for item in codec.deferred_ranges(stored)
        ]
        postgres.give_up_requeues(deferred, f"an operator accepted {', '.join(sorted(accept))}")
    if "partitions" in accept:
        # A stream may be in another partition now. Its next record determines the partition.
        postgres.replace_states({stream: codec.forget_home(stored) for stream, stored in postgres.states().items()})
    if "loss" in accept:
        # The lost records may have been facts, so the next ranges that writers settle must not count as empty
        # (docs/design.md, rule 1).
        postgres.replace_states({stream: codec.mark_uncertain(stored) for stream, stored in postgres.states().items()})
        postgres.set_offsets(offsets)
