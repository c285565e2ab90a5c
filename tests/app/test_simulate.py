"""`tidemark simulate` on a real broker and a real Redis, which this test fills itself: no pipeline here."""

import math
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import redis
from confluent_kafka import Consumer, TopicPartition

from app.simulate import Script, Stage, StreamTaken, play, report
from app.stack.kafka import Kafka
from app.verification import PositionsDiffer, RedisReader, Verifier
from sources.kafka import KafkaConnection
from sources.simulator.cast import Cast
from sources.simulator.simulation import Simulation
from sources.simulator.stream import SimulatedStream
from sources.topics import TopicPlan, Topics
from streaming.errors import Unavailable
from streaming.wire import Record, decode

CAST = Cast(streams=3, writers=2, rate=500.0)


@pytest.fixture
def stage(kafka: Kafka, redis_url: str, prefix: str, tmp_path: Path) -> Stage:
    connection = KafkaConnection(kafka.bootstrap_servers)
    Topics(connection).create_missing([TopicPlan(prefix, 2, 3_600_000)])
    return Stage(connection, prefix, redis_url, tmp_path / "simulator.json")


@pytest.fixture
def store(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def unwatched(_: Simulation, __: float) -> None:
    pass


def publish(store: redis.Redis, streams: list[SimulatedStream]) -> None:
    for stream in streams:
        store.set(f"tidemark:{{{stream.name}}}:linear", stream.linear())
        for writer, position in stream.positions().items():
            store.hset(f"tidemark:{{{stream.name}}}:positions", writer, position)


def in_kafka(stage: Stage) -> Iterator[Record]:
    """All records of the stage's topic, partition by partition."""
    consumer = Consumer({**stage.kafka.client(), "group.id": "test", "enable.auto.commit": "false"})
    for (topic, partition), head in Topics(stage.kafka).heads({stage.topic: 2}).items():
        consumer.assign([TopicPartition(topic, partition, 0)])
        for message in consumer.consume(head, timeout=20):
            yield decode(message.value())
    consumer.close()


def test_a_play_is_in_kafka_record_by_record_when_it_returns(stage: Stage) -> None:
    """Each stream's records stand in the topic in the order in which they happened, none missing."""
    simulation = play(stage, Script(CAST, 1, 1.0), Event(), unwatched)
    records = list(in_kafka(stage))
    counts = simulation.sent()
    assert len(records) == counts.total() - counts["duplicate"] - counts["zombie"]
    for stream in simulation.streams():
        assert stream.linear() == stream.direction * stream.last != 0


def test_a_second_play_begins_behind_the_first(stage: Stage) -> None:
    """On the same topic no ID is given twice, and every writer's epoch is higher than before."""
    first = play(stage, Script(CAST, 1, 0.5), Event(), unwatched)
    second = play(stage, Script(CAST, 1, 0.5), Event(), unwatched)
    for before, after in zip(first.streams(), second.streams(), strict=True):
        assert after.last > before.last
        assert all(after.writers[name].epoch > before.writers[name].epoch for name in CAST.writer_names())


def test_a_stopped_play_is_drained_like_one_that_ended(stage: Stage) -> None:
    """Ctrl-C leaves no gap behind."""
    stopping = Event()
    stopping.set()
    simulation = play(stage, Script(CAST, 1, math.inf), stopping, unwatched)
    assert not simulation.held()
    assert not simulation.down()


def test_streams_that_tidemark_knows_are_not_begun_anew(stage: Stage, store: redis.Redis) -> None:
    """Without its ledger a play cannot know which IDs were given: it names the way out."""
    store.set("tidemark:{events}:linear", 7)
    with pytest.raises(StreamTaken, match="--prefix"):
        play(stage, Script(CAST, 1, 0.1), Event(), unwatched)
    play(stage, Script(Cast(streams=1, prefix="mine-"), 1, 0.1), Event(), unwatched)


def drained() -> Simulation:
    simulation = Simulation(1, CAST)
    simulation.step(2.0)
    simulation.drain()
    return simulation


def test_verification_passes_where_redis_has_the_truth(redis_url: str, store: redis.Redis) -> None:
    """All positions and lines, of streams that count up and of one that counts down."""
    streams = drained().streams()
    publish(store, streams)
    Verifier(RedisReader(redis_url)).conclude(streams, seconds=0)


def test_verification_names_what_differs(redis_url: str, store: redis.Redis) -> None:
    """One writer short of the truth: the stream, the writer and both numbers are in the error."""
    streams = drained().streams()
    publish(store, streams)
    store.hset("tidemark:{backfill}:positions", "writer-1", -3)
    true = streams[1].positions()["writer-1"]
    with pytest.raises(PositionsDiffer, match=rf"backfill: Redis has writer-1 at -3, .* at {true}$"):
        Verifier(RedisReader(redis_url)).conclude(streams, seconds=0)


def test_verification_remembers_what_was_published_too_early(redis_url: str, store: redis.Redis) -> None:
    """Rule 4, published <= true: being right in the end does not excuse having been ahead."""
    simulation = Simulation(1, CAST)
    simulation.step(1.0)
    verifier = Verifier(RedisReader(redis_url))
    publish(store, simulation.streams())
    verifier.sample(simulation.streams())
    events = simulation.streams()[0]
    store.set("tidemark:{events}:linear", events.linear() + 1)
    verifier.sample(simulation.streams())
    simulation.drain()
    publish(store, simulation.streams())
    with pytest.raises(PositionsDiffer, match=r"events: Redis has linear at .* beyond its true"):
        verifier.conclude(simulation.streams(), seconds=0)


def test_a_redis_that_is_away_is_no_difference() -> None:
    """A sample is left out; the end says that Redis did not answer."""
    streams = drained().streams()
    verifier = Verifier(RedisReader("redis://127.0.0.1:1/0"))
    verifier.sample(streams)
    with pytest.raises(Unavailable):
        verifier.conclude(streams, seconds=0)


def test_the_report_says_who_holds_what() -> None:
    """Hanging transactions and crashed writers stand behind the streams' lines."""
    simulation = Simulation(3, Cast(streams=1, writers=2, rate=200.0))
    now = 0.0
    while not (simulation.held() and simulation.down()):
        now += 0.1
        simulation.step(now)
    held, crashed = simulation.held()[0], simulation.down()[0]
    line = report(simulation, now)
    assert f"events {simulation.streams()[0].linear()}" in line
    assert f"events: {held.writer} holds {held.id} for " in line
    assert f"events: {crashed.name} has crashed" in line
