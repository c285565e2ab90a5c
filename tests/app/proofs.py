"""What must hold of a site whatever happened to its pipelines. Each proof fails with the first thing that does not.

`undisturbed` is the yardstick: the core alone over all that is in Kafka, in one batch, without Spark and faults.
"""

import itertools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import redis
from confluent_kafka import Consumer, Message, TopicPartition

from tests.app.feeding import PlayFeed
from tests.app.running import PATIENCE
from tests.fix_pipeline import PARTITIONS, Site
from tests.play.published import RedisReader, ahead
from tests.streaming.builders import packed
from tests.waiting import eventually
from tidemark.app.verbs import verify
from tidemark.app.verbs.verify import RedisKeys, RedisTokens
from tidemark.common.errors import Unavailable
from tidemark.sinks.postgres.status import Audit
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Topic


class HistoryRow(NamedTuple):
    """A row of the history: `prev`, `id`, and its evidence."""

    prev: int
    id: int
    facts: int
    empty: int
    unseen: int
    skipped: int


Chains = dict[tuple[str, str], list[HistoryRow]]


def as_undisturbed(site: Site) -> None:
    """All that `settled` says, and Redis holds the very advances of Postgres."""
    settled(site)
    assert redis_history(site) == history(site)


def settled(site: Site) -> None:
    """Positions, lines, evidence and dead letters are those of an undisturbed run; the history chains up to them.

    To be called when Redis shows the truth, and nobody sends any more. Waits until all is read, and dead letters sent.
    """
    eventually(lambda: _all_read(site), what=lambda: "all that is in Kafka is read")
    wanted = undisturbed(site)
    chains = history(site)
    chained(chains)
    chained(redis_history(site))
    for stream in wanted.streams:
        name = stream.stream
        writers = {row.writer: (row.position, row.epoch) for row in stream.writers}
        rows: list[Any] = site.sql(
            "select writer, position, epoch from tidemark.stream_positions where stream = %s", name
        )
        assert {writer: (position, epoch) for writer, position, epoch in rows} == writers, name
        assert site.sql("select linear from tidemark.streams where stream = %s", name) == [(stream.linear,)]
        reached = {writer: position for writer, (position, _) in writers.items()}
        assert site.positions(name) == {"linear": stream.linear, **reached}
        for row in stream.advances:
            evidence = [sum(counts) for counts in zip(*(step[2:] for step in chains[name, row.writer]), strict=True)]
            assert evidence == [row.facts, row.empty, row.unseen, row.skipped], f"{name}/{row.writer}"
        ends = {writer: chains[name, writer][-1].id if position else 0 for writer, position in reached.items()}
        assert ends == reached, name
    verified(site)
    assert {origin for origin, _ in dead_letters(site)} == {
        Origin(bad.topic, bad.partition, offset, bad.reason)
        for bad in wanted.rejected
        for offset in memoryview(bad.offsets).cast("q").tolist()
    }


def verified(site: Site) -> None:
    """`tidemark verify --history` finds nothing."""
    with Audit(site.dsn) as audit, Redis(RedisConfig(site.redis_url)) as redis:
        report = verify.compare_replicas(audit, [RedisKeys(redis), RedisTokens(redis)], PATIENCE)
        verify.add_history(audit, report)
    assert report.is_equal, verify.to_text(report)


def _all_read(site: Site) -> bool:
    if site.sql("select 1 from tidemark.unsent_dead_letters"):
        return False
    heads = Topics(site.kafka).end_offsets({site.facts: PARTITIONS, site.control: 1})
    read: list[Any] = site.sql("select topic, partition, next from tidemark.kafka_offsets")
    return all(heads[topic, partition] == offset for topic, partition, offset in read)


def chained(chains: Chains) -> None:
    """Rule 3: no hole and no overlap, from 0 on."""
    for (stream, writer), chain in chains.items():
        for before, after in itertools.pairwise([HistoryRow(0, 0, 0, 0, 0, 0), *chain]):
            assert after.prev == before.id, f"{stream}/{writer}: {before} then {after}"


def redis_history(site: Site) -> Chains:
    """Redis's advances by stream and writer, in their order."""
    chains: Chains = {}
    with redis.Redis.from_url(site.redis_url, decode_responses=True) as client:
        for stream in client.smembers("tidemark:streams"):
            entries: Any = client.xrange(f"tidemark:{{{stream}}}:advances")
            for _, entry in entries:
                if entry["kind"] == "POSITION":
                    chain = chains.setdefault((stream, entry["writer"]), [])
                    chain.append(HistoryRow(*(int(entry[name]) for name in HistoryRow._fields)))
    return chains


def history(site: Site) -> Chains:
    """Postgres's advances by stream and writer, from 0 outwards."""
    chains: Chains = {}
    rows: list[Any] = site.sql(
        "select stream, writer, prev, id, facts, empty, unseen, skipped from tidemark.position_advances"
        " order by stream, writer, abs(id)"
    )
    for stream, writer, *advanced in rows:
        chains.setdefault((stream, writer), []).append(HistoryRow(*advanced))
    return chains


def _place(site: Site, record: Message) -> tuple[Topic, int]:
    return Topic.FACTS if record.topic() == site.facts else Topic.CONTROL, record.partition()


def undisturbed(site: Site) -> ShardEffects:
    """What one batch over everything in Kafka comes to; streams are in the order of their names."""
    records = [*read(site.kafka, site.facts, PARTITIONS), *read(site.kafka, site.control, 1)]
    packets = packed(
        (
            (record.offset(), record.timestamp()[1], _place(site, record), record.key(), record.value())
            for record in records
        ),
        site.facts,
        site.control,
    )
    return apply_batch(0, States(), packets, 0, Bounds())


def read(kafka: KafkaConnection, topic: str, partitions: int) -> Iterator[Message]:
    """All records of a topic, partition by partition."""
    consumer = Consumer({**kafka.client_settings(), "group.id": "proofs", "enable.auto.commit": "false"})
    try:
        for (_, partition), head in Topics(kafka).end_offsets({topic: partitions}).items():
            consumer.assign([TopicPartition(topic, partition, 0)])
            following = 0
            while following < head:
                for message in consumer.consume(1000, timeout=1.0):
                    assert message.error() is None, message.error()
                    following = message.offset() + 1
                    yield message
    finally:
        consumer.close()


class Origin(NamedTuple):
    """Where a dead letter came from, by its headers."""

    topic: str
    partition: int
    offset: int
    reason: str


def dead_letters(site: Site) -> Iterator[tuple[Origin, Message]]:
    for letter in read(site.kafka, site.dead_letters, 1):
        headers = dict(letter.headers() or ())
        yield (
            Origin(
                headers["topic"].decode(),
                int(headers["partition"]),
                int(headers["offset"]),
                headers["reason"].decode(),
            ),
            letter,
        )


class RedisWatcher:
    """A reader who looks at Redis all the time and remembers every step back and every claim before it was true.

    A Redis that is away or was emptied claims nothing. A thread of its own, while it is used as a context manager.
    """

    def __init__(self, site: Site, play: PlayFeed) -> None:
        self.looks = 0
        self.wrong: list[str] = []
        self._reader = RedisReader(site.redis_url)
        self._play = play
        self._best: dict[tuple[str, str], int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def __enter__(self) -> "RedisWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        with self._play.truth() as streams:
            names = [stream.name for stream in streams]
        while not self._closing.wait(0.02):
            try:
                seen = self._reader.read(names)
            except Unavailable:
                continue
            self.looks += 1
            with self._play.truth() as streams:
                self.wrong += ahead(streams, seen)
            for stream, found in seen.items():
                for what, position in found.line_and_positions().items():
                    if position is not None:
                        self._compare(stream, what, position)

    def _compare(self, stream: str, what: str, position: int) -> None:
        best = self._best.setdefault((stream, what), position)
        if abs(position) < abs(best):
            self.wrong.append(f"{stream}: {what} went back from {best} to {position}")
        self._best[stream, what] = max(best, position, key=abs)
