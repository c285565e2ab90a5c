"""The start of reading: compares the topics as they are now with what was stored about them. Pure; no Kafka here.

A stream is in one partition, in one order, and nothing is read twice or skipped (docs/design.md 3). So a topic that was
created again, repartitioned, or truncated stops the pipeline, until an operator accepts the loss.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from tidemark.common.errors import PartitionsChanged, RecordsBeyondEnd, RecordsGone, TopicCompacted, TopicReplaced
from tidemark.common.log import get_logger
from tidemark.sources.kafka import Offsets

log = get_logger(__name__)

Acceptance = Literal["partitions", "loss", "shards"]
"""What an operator gives up for one start. `partitions`: the partition count changed, and streams may have moved.
`loss`: records went before they were read. `shards`: the count of shards changed; costs nothing, and is not of here."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The offsets that a partition holds now: `[earliest, end)`."""

    earliest: int
    end: int

    def holds(self, next_offset: int) -> bool:
        return self.earliest <= next_offset <= self.end


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as the brokers describe it; `partitions[i]` is partition `i`."""

    name: str
    id: str
    policy: str
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class RememberedTopic:
    """What must not change of a topic: its ID and partition count, as Postgres has them from the last start."""

    id: str
    partitions: int


def require_same(found: Mapping[str, RememberedTopic], remembered: Mapping[str, RememberedTopic]) -> None:
    """Raises `TopicReplaced` or `PartitionsChanged` for the first topic that is not as `remembered`."""
    for name, before in remembered.items():
        if found[name].id != before.id:
            raise TopicReplaced(name, before.id, found[name].id)
        if found[name].partitions != before.partitions:
            raise PartitionsChanged(name, before.partitions, found[name].partitions)


def require_uncompacted(topics: Mapping[str, TopicState]) -> None:
    """Raises `TopicCompacted` for the first topic whose clean-up would destroy records by their key."""
    for topic in topics.values():
        if topic.policy != "delete":
            raise TopicCompacted(topic.name, topic.policy)


def starting_offsets(
    topics: Mapping[str, TopicState],
    remembered: Mapping[str, RememberedTopic],
    stored: Mapping[str, Mapping[int, int]],
    accept: Set[Acceptance] = frozenset(),
) -> Offsets:
    """The next offset to read of every partition of `topics`; a partition never read starts at its oldest record.

    `stored` has the next offsets that the last commit left. Raises `TopicReplaced`, `PartitionsChanged`,
    `RecordsGone` or `RecordsBeyondEnd`, unless `accept` contains what allows it; the loss is then logged.
    """
    return {
        name: _topic_offsets(topic, remembered.get(name), stored.get(name, {}), accept)
        for name, topic in topics.items()
    }


def _topic_offsets(
    topic: TopicState, before: RememberedTopic | None, stored: Mapping[int, int], accept: Set[Acceptance]
) -> dict[int, int]:
    if before is not None and before.id != topic.id:
        if "loss" not in accept:
            raise TopicReplaced(topic.name, before.id, topic.id)
        log.warning(
            "the topic was created again: it is read from its beginning, and unread records of the old topic are lost",
            topic=topic.name,
            stored=dict(stored),
        )
        return {number: partition.earliest for number, partition in enumerate(topic.partitions)}
    if before is not None and before.partitions != len(topic.partitions):
        if "partitions" not in accept:
            raise PartitionsChanged(topic.name, before.partitions, len(topic.partitions))
        log.warning(
            "the partition count changed: streams that moved have lost their order, and their gaps stay open",
            topic=topic.name,
            was=before.partitions,
            now=len(topic.partitions),
        )
    return {
        number: _partition_offset(topic.name, number, partition, stored.get(number), accept)
        for number, partition in enumerate(topic.partitions)
    }


def _partition_offset(
    topic: str, number: int, partition: Partition, wanted: int | None, accept: Set[Acceptance]
) -> int:
    if wanted is None:
        return partition.earliest
    if partition.holds(wanted):
        return wanted
    if "loss" not in accept:
        if wanted > partition.end:
            raise RecordsBeyondEnd(topic, number, wanted, partition.end)
        raise RecordsGone(topic, number, wanted, partition.earliest)
    log.warning(
        "records went before they were read: the partition is read from its oldest record",
        topic=topic,
        partition=number,
        wanted=wanted,
        earliest=partition.earliest,
        end=partition.end,
        lost=max(partition.earliest - wanted, 0),
    )
    return partition.earliest
