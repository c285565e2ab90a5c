"""The checks before the query: topics are there and fit; topics, database and what is remembered agree.

Topics that are missing are made where that is wanted.
"""

import uuid
from collections.abc import Set
from dataclasses import dataclass

from tidemark.app.settings import Settings
from tidemark.common.errors import ShardsChanged
from tidemark.common.log import get_logger
from tidemark.sinks.postgres.store import Postgres, RememberedSetup
from tidemark.sources.kafka import Offsets
from tidemark.sources.topic_checks import Acceptance, RememberedTopic, TopicState, require_uncompacted, starting_offsets
from tidemark.sources.topics import Topics, plans
from tidemark.streaming.core import codec as state
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.engine.query import by_shard
from tidemark.streaming.values.policies import Policies

log = get_logger(__name__)


def ready(settings: Settings, topics: Topics) -> dict[str, TopicState]:
    """The topics as they are, by name; `kafka_create_topics` decides whether one that is missing is made.

    Raises `TopicMissing`, `TopicCompacted`, and `Unavailable` where the brokers do not answer.
    """
    wanted = plans(
        settings.kafka_facts_topic,
        settings.kafka_control_topic,
        settings.kafka_dead_letters_topic,
        settings.kafka_partitions,
    )
    if settings.kafka_create_topics:
        for name in topics.create_missing(wanted):
            log.info("Made a topic", topic=name)
    found = topics.describe(plan.name for plan in wanted)
    require_uncompacted(found)
    return found


@dataclass(frozen=True, slots=True)
class Seed:
    """What a line of batches begins with: its name, the batch that Postgres applied last (lineage and number, None
    where none ever was), and the states as of `streaming.engine.query.by_shard`.
    """

    lineage: str
    after: tuple[str, int] | None
    states: dict[int, bytes]

    def before(self, batch: int) -> tuple[str, int] | None:
        """The batch that is applied before `batch` of this line."""
        return (self.lineage, batch - 1) if batch > 0 else self.after


@dataclass(frozen=True, slots=True)
class Start:
    """What the query begins with, all of it from Postgres. `offsets` are the next to read of the `topics`; `states` are
    those of the seed.
    """

    seed: Seed
    offsets: Offsets
    topics: dict[str, RememberedTopic]
    states: ShardedStates
    policies: Policies


def prepare(settings: Settings, postgres: Postgres, topics: Topics, accept: Set[Acceptance]) -> Start:
    """Check everything that can be wrong at a start, then read from where to go on.

    To be called under the lease. Raises the Stop that names the first disagreement, but for those that `accept` gives
    up: what they cost is written to Postgres first, so that the next start needs no acceptance.
    """
    found = ready(settings, topics)
    read = {name: found[name] for name in (settings.kafka_facts_topic, settings.kafka_control_topic)}
    remembered = postgres.remembered()
    offsets = starting_offsets(
        read,
        {name: RememberedTopic(id_, count) for name, (id_, count) in remembered.topics.items()},
        postgres.offsets(),
        accept,
    )
    if remembered.shards not in {None, settings.shards} and "shards" not in accept:
        raise ShardsChanged(remembered.shards, settings.shards)
    if accept:
        _give_up(postgres, offsets, accept)
    postgres.remember(
        RememberedSetup(settings.shards, {topic.name: (topic.id, len(topic.partitions)) for topic in read.values()})
    )
    postgres.set_late_numbers_ahead()
    states = by_shard(postgres.states(), settings.shards)
    return Start(
        Seed(uuid.uuid4().hex, postgres.last_batch(), states),
        offsets,
        {name: RememberedTopic(topic.id, len(topic.partitions)) for name, topic in read.items()},
        ShardedStates(settings.shards, states),
        Policies(postgres.policies.given(), settings.policy_defaults),
    )


def _give_up(postgres: Postgres, offsets: Offsets, accept: Set[Acceptance]) -> None:
    if accept & {"partitions", "loss"}:
        deferred = [(name, it) for name, stored in postgres.states().items() for it in state.deferred(stored)]
        postgres.give_up_requeues(deferred, f"an operator accepted {', '.join(sorted(accept))}")
    if "partitions" in accept:
        # Each stream may live in another partition now: the first record after this says which.
        postgres.replace_states({stream: state.without_home(stored) for stream, stored in postgres.states().items()})
    if "loss" in accept:
        # The lost records may have been facts: what the writers settle next was not proven empty
        # (docs/design.md, rule 1).
        postgres.replace_states(
            {stream: state.marked_uncertain(stored) for stream, stored in postgres.states().items()}
        )
        postgres.set_offsets(offsets)
