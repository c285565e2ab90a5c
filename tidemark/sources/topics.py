"""Creates and describes topics, and compares topics with their state that was stored at the last start.

All records of a stream must be in one partition, and the pipeline reads each record once and in order (docs/design.md
3). So if a topic was created again, has another number of partitions or has lost unread records, the pipeline stops
until an operator accepts the change.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigEntry, ConfigResource, NewTopic, OffsetSpec, TopicDescription

from tidemark.common.errors import (
    PartitionsChanged,
    RecordsBeyondEnd,
    RecordsGone,
    TopicMissing,
    TopicReplaced,
    Unavailable,
    WrongCleanupPolicy,
)
from tidemark.common.kafka import ErrorListener, explain_kafka_error
from tidemark.common.log import get_logger
from tidemark.sources.kafka import KafkaConnection, Offsets

log = get_logger(__name__)

Acceptance = Literal["partitions", "loss", "shards"]
"""A change that an operator accepts for one start of the pipeline.

`partitions`: the topic has another partition count, so streams may have moved to other partitions. `loss`: the topic
was created again, retention removed unread records, or the brokers lost records. `shards`: the pipeline has another
number of shards, which loses nothing; this module does not check `shards`.
"""


@dataclass(frozen=True, slots=True)
class Partition:
    """The available offsets of a partition: `[earliest, end)`. The next written record gets the offset `end`."""

    earliest: int
    end: int

    def can_start_at(self, next_offset: int) -> bool:
        """Whether a reader can continue at this offset without a loss of records."""
        return self.earliest <= next_offset <= self.end


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as the brokers describe it.

    Attributes:
        name: the name of the topic.
        id: the ID of the topic. A topic that is created again has another ID.
        policy: the `cleanup.policy`.
        partitions: the partitions; the index is the partition's number.
    """

    name: str
    id: str
    policy: str
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """What must not change in a topic between two starts of the pipeline. Postgres stores the values of the last start.

    Attributes:
        id: the ID of the topic.
        partitions: the partition count.
    """

    id: str
    partitions: int


def require_unchanged(topics: Mapping[str, TopicIdentity], remembered: Mapping[str, TopicIdentity]) -> None:
    """Raise `TopicReplaced` or `PartitionsChanged` for the first topic that differs from `remembered`.

    Args:
        topics: name -> the topic now.
        remembered: name -> the topic at the last start. Each of these topics must be in `topics`.
    """
    for name, before in remembered.items():
        if topics[name].id != before.id:
            raise TopicReplaced(name, before.id, topics[name].id)
        if topics[name].partitions != before.partitions:
            raise PartitionsChanged(name, before.partitions, topics[name].partitions)


def require_policy(topics: Iterable[TopicState], policy: str = "delete") -> None:
    """Raise `WrongCleanupPolicy` for the first topic whose cleanup policy differs from `policy`.

    With another policy, Kafka would delete records that Tidemark needs.
    """
    for topic in topics:
        if topic.policy != policy:
            raise WrongCleanupPolicy(topic.name, topic.policy, policy)


def starting_offsets(
    topics: Mapping[str, TopicState],
    remembered: Mapping[str, TopicIdentity],
    stored: Mapping[str, Mapping[int, int]],
    accept: Set[Acceptance] = frozenset(),
) -> Offsets:
    """Compute the next offset to read of every partition.

    A partition starts at its oldest record if it was never read, or if its stored offset is unusable and `accept`
    contains `loss`.

    Args:
        topics: name -> the topic now.
        remembered: name -> the topic at the last start. New topics are missing.
        stored: topic -> partition -> the next offset at the last commit.
        accept: the changes that an operator accepts. The function logs such a change, and raises no error.

    Raises:
        TopicReplaced, PartitionsChanged, RecordsGone, RecordsBeyondEnd: a change that `accept` does not contain.
    """
    return {
        name: _topic_offsets(topic, remembered.get(name), stored.get(name, {}), accept)
        for name, topic in topics.items()
    }


def _topic_offsets(
    topic: TopicState, before: TopicIdentity | None, stored: Mapping[int, int], accept: Set[Acceptance]
) -> dict[int, int]:
    if before is not None and before.id != topic.id:
        if "loss" not in accept:
            raise TopicReplaced(topic.name, before.id, topic.id)
        log.warning(
            "the topic was created again and is read from its beginning; unread records of the old topic are lost",
            topic=topic.name,
            stored=dict(stored),
        )
        return {number: partition.earliest for number, partition in enumerate(topic.partitions)}
    if before is not None and before.partitions != len(topic.partitions):
        if "partitions" not in accept:
            raise PartitionsChanged(topic.name, before.partitions, len(topic.partitions))
        log.warning(
            "The partition count changed: records of a stream whose key is now in another partition may be read out of"
            " order. If this leaves a gap, the gap is open until its writer joins again; `tidemark gaps` shows gaps",
            topic=topic.name,
            was=before.partitions,
            now=len(topic.partitions),
        )
    return {
        number: _partition_offset(topic.name, number, partition, stored.get(number), accept)
        for number, partition in enumerate(topic.partitions)
    }


def _partition_offset(
    topic: str, number: int, partition: Partition, wanted_offset: int | None, accept: Set[Acceptance]
) -> int:
    if wanted_offset is None:
        return partition.earliest
    if partition.can_start_at(wanted_offset):
        return wanted_offset
    if "loss" not in accept:
        if wanted_offset > partition.end:
            raise RecordsBeyondEnd(topic, number, wanted_offset, partition.end)
        raise RecordsGone(topic, number, wanted_offset, partition.earliest)
    log.warning(
        "the next offset is outside the partition, because records were lost: reading starts at the oldest record",
        topic=topic,
        partition=number,
        wanted=wanted_offset,
        earliest=partition.earliest,
        end=partition.end,
        lost=max(partition.earliest - wanted_offset, 0),
    )
    return partition.earliest


_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The settings with which a missing topic is created. `Topics` does not compare an existing topic with them.

    Attributes:
        name: the name of the topic.
        partitions: the number of partitions.
        retention_ms: how long records are kept, in ms; None for a compacted topic.
    """

    name: str
    partitions: int
    retention_ms: int | None = None

    def settings(self) -> dict[str, str]:
        """The topic's configuration in Kafka's names."""
        if self.retention_ms is None:
            return {"cleanup.policy": "compact", "segment.ms": str(_DAY_MS // 24)}
        return {"cleanup.policy": "delete", "retention.ms": str(self.retention_ms)}


def positions_plan(name: str) -> TopicPlan:
    """The plan of the topic of positions: one partition, compacted. Segments last one hour, so that compaction keeps
    the topic small: the pipeline reads the whole topic at its start."""
    return TopicPlan(name, 1)


def topic_plans(facts: str, control: str, dead_letters: str, partitions: int) -> tuple[TopicPlan, TopicPlan, TopicPlan]:
    """The plans of the topics of facts, of control records and of dead letters.

    Args:
        facts: the name of the topic of facts.
        control: the name of the topic of control records.
        dead_letters: the name of the topic of dead letters.
        partitions: the number of partitions of the topic of facts. This number must not change later.
    """
    return (
        # 7 days: if an outage of the pipeline is shorter, no records are lost.
        TopicPlan(facts, partitions, 7 * _DAY_MS),
        # One partition, because overrides are rare and must stay in order. 30 days, for audits.
        TopicPlan(control, 1, 30 * _DAY_MS),
        # 30 days, so that a person has time to examine dead letters.
        TopicPlan(dead_letters, 1, 30 * _DAY_MS),
    )


@dataclass(frozen=True, slots=True)
class TopicDetails:
    """The properties of a topic, and the operations that this user may perform.

    Attributes:
        partitions: the number of partitions.
        replicas: the smallest number of replicas of a partition.
        settings: the topic's configuration: name -> value; empty if not requested.
        operations: the operations that this user may perform, such as READ.
    """

    partitions: int
    replicas: int
    settings: Mapping[str, str]
    operations: frozenset[str]


class Topics:
    """Queries and creates topics over one connection. Not thread-safe.

    Every method sends one or more requests, and blocks until they are answered. Every method raises `Unavailable` if
    the brokers do not answer a request within `timeout` seconds, and `Refused` if they refuse a request.
    """

    def __init__(self, connection: KafkaConnection, timeout: float = 10.0) -> None:
        self._connection = connection
        self._where = connection.bootstrap
        self._timeout = timeout
        self._errors = ErrorListener(connection.bootstrap)
        self._admin = self._connect()

    def _connect(self) -> AdminClient:
        try:
            return AdminClient({**self._connection.client_settings(), "error_cb": self._errors})
        except KafkaException as error:
            raise explain_kafka_error(error.args[0], self._where) from error

    def create_missing(self, wanted_topics: Iterable[TopicPlan]) -> list[str]:
        """Create the missing topics, with the brokers' default replication factor, and wait until they are usable.

        Raises `Unavailable` or `TopicMissing` if a new topic is not usable after `timeout` seconds.

        Returns:
            The names of the topics that this call created. A topic that another process created at the same moment is
            left out.
        """
        # Check first: a user without the right to create topics may still use existing ones.
        missing = {plan.name: plan for plan in wanted_topics if not self._exists(plan.name)}
        if not missing:
            return []
        topics = [
            NewTopic(plan.name, num_partitions=plan.partitions, replication_factor=-1, config=plan.settings())
            for plan in missing.values()
        ]
        answers = self._send_request(
            lambda timeout: self._admin.create_topics(topics, request_timeout=timeout),
            # Another process has created the topic, or the broker that answered `_exists` did not have the topic yet.
            expected_code=KafkaError.TOPIC_ALREADY_EXISTS,
        )
        self._wait_for_leaders(missing)
        return [name for name in missing if not isinstance(answers[name], KafkaError)]

    def describe(self, names: Iterable[str]) -> dict[str, TopicState]:
        """Query the topics: name -> topic, in the order of `names`. Raises `TopicMissing` for the first missing
        topic."""
        names = list(names)
        if not names:  # the client refuses a request without topics
            return {}
        descriptions = self._descriptions(names)
        policies = self._policies(names)
        partitions = [
            TopicPartition(name, partition.id) for name in names for partition in descriptions[name].partitions
        ]
        earliest = self._offsets(partitions, OffsetSpec.earliest())
        end = self._offsets(partitions, OffsetSpec.latest())
        return {
            name: TopicState(
                name,
                str(descriptions[name].topic_id),
                policies[name],
                tuple(
                    Partition(earliest[name, number], end[name, number])
                    for number in range(len(descriptions[name].partitions))
                ),
            )
            for name in names
        }

    def identities(self, names: Iterable[str]) -> dict[str, TopicIdentity]:
        """Query the IDs and partition counts of the topics, in one request: name -> topic.

        Raises `TopicMissing` for the first missing topic.
        """
        topics = self._descriptions(list(names))
        return {name: TopicIdentity(str(topic.topic_id), len(topic.partitions)) for name, topic in topics.items()}

    def end_offsets(self, partition_counts: Mapping[str, int]) -> dict[tuple[str, int], int]:
        """Query the end offsets: (topic, partition) -> the offset that the next written record will get.

        Args:
            partition_counts: topic -> the number of its partitions.
        """
        partitions = [
            TopicPartition(name, number) for name, count in partition_counts.items() for number in range(count)
        ]
        return self._offsets(partitions, OffsetSpec.latest())

    def details(self, name: str, *, with_settings: bool) -> TopicDetails:
        """Query the details of a topic.

        Args:
            name: the name of the topic.
            with_settings: whether to query the configuration, for which the user needs the right DESCRIBE_CONFIGS.

        Raises:
            TopicMissing: the topic does not exist.
        """
        topic = self._descriptions([name], include_operations=True)[name]
        entries = self._configs([name])[name] if with_settings else {}
        operations = frozenset(operation.name for operation in topic.authorized_operations or ())
        replicas = min((len(partition.replicas) for partition in topic.partitions), default=0)
        values = {key: str(entry.value) for key, entry in entries.items()}
        return TopicDetails(len(topic.partitions), replicas, values, operations)

    def max_message_bytes(self, name: str) -> int:
        """Query the topic's `max.message.bytes`, the limit for one batch of records. Raises `TopicMissing`."""
        self._descriptions([name])
        return int(self._configs([name])[name]["max.message.bytes"].value)

    def stable_offsets(self, partition_counts: Mapping[str, int]) -> dict[tuple[str, int], int]:
        """Query the last stable offsets: (topic, partition) -> offset.

        The last stable offset is the first offset of the oldest open Kafka transaction, or the end offset if no
        transaction is open. A reader with `read_committed` gets no record at or above this offset.

        Args:
            partition_counts: topic -> the number of its partitions.
        """
        partitions = [
            TopicPartition(name, number) for name, count in partition_counts.items() for number in range(count)
        ]
        return self._offsets(partitions, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)

    def _exists(self, name: str) -> bool:
        try:
            self._descriptions([name])
        except TopicMissing:
            return False
        return True

    def _wait_for_leaders(self, names: Iterable[str]) -> None:
        """Wait for the brokers' answers to requests about the new topics. After the creation, this may take a moment.

        Raises `TopicMissing` or `Unavailable` if the brokers do not answer within the time limit.
        """
        deadline = time.monotonic() + self._timeout
        for name in names:
            while True:
                try:
                    self.end_offsets({name: len(self._descriptions([name])[name].partitions)})
                    break
                except (TopicMissing, Unavailable):
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)

    def _descriptions(self, names: list[str], *, include_operations: bool = False) -> dict[str, TopicDescription]:
        answers = self._send_request(
            lambda timeout: self._admin.describe_topics(
                TopicCollection(names), include_authorized_operations=include_operations, request_timeout=timeout
            ),
            expected_code=KafkaError.UNKNOWN_TOPIC_OR_PART,
        )
        for name in names:
            if isinstance(answers[name], KafkaError):
                raise TopicMissing(name)
        return answers

    def _policies(self, names: list[str]) -> dict[str, str]:
        return {name: entries["cleanup.policy"].value for name, entries in self._configs(names).items()}

    def _configs(self, names: list[str]) -> dict[str, dict[str, ConfigEntry]]:
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        answers = self._send_request(lambda timeout: self._admin.describe_configs(resources, request_timeout=timeout))
        return {resource.name: entries for resource, entries in answers.items()}

    def _offsets(
        self,
        partitions: list[TopicPartition],
        spec: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[tuple[str, int], int]:
        request = dict.fromkeys(partitions, spec)
        answers = self._send_request(
            lambda timeout: self._admin.list_offsets(request, isolation_level=isolation, request_timeout=timeout)
        )
        offsets = {(partition.topic, partition.partition): answer.offset for partition, answer in answers.items()}
        if min(offsets.values(), default=0) < 0:  # librdkafka's answer if a broker is unavailable
            self._admin = self._connect()
            raise Unavailable(
                "Kafka", self._where, "it returned no offset of a partition, because a broker is unavailable"
            )
        return offsets

    def _send_request(
        self, request: Callable[[float], Mapping[Any, Any]], expected_code: int | None = None
    ) -> dict[Any, Any]:
        """Send a request, and wait for all answers: key of the request -> answer.

        An error with the code `expected_code` is returned as an answer. Other errors are raised.
        """
        try:
            return self._wait_for_answers(request, expected_code)
        except Unavailable:
            # Make a new client: after an outage of the brokers, the old one uses outdated metadata for minutes.
            self._admin = self._connect()
            raise

    def _wait_for_answers(
        self, request: Callable[[float], Mapping[Any, Any]], expected_code: int | None
    ) -> dict[Any, Any]:
        self._errors.forget()
        try:
            futures = request(self._timeout)
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error
        answers: dict[Any, Any] = {}
        for key, future in futures.items():
            while not future.done():
                self._admin.poll(0.02)
                self._errors.raise_refusal()
            self._admin.poll(0)
            try:
                answers[key] = future.result()
            except KafkaException as error:
                if error.args[0].code() != expected_code:
                    raise self._errors.explain(error.args[0]) from error
                answers[key] = error.args[0]
        return answers
