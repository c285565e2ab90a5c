"""`tidemark follow`: published positions in a database of readers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
import redis

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.follow_positions import PositionFollower
from tidemark.app.relay import migrate
from tidemark.sinks.reader_database import install, reader_session
from tidemark.sinks.redis.client import RedisAddress
from tidemark.streaming.core.effects import LateCompletion


@pytest.fixture
def readers(database: str) -> Iterator[psycopg.Connection]:
    """A database of readers with an append stream `s`, too."""
    migrate(database, ["s"], "forward", say=lambda _: None)
    with reader_session(database, "test") as session:
        install(session)
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def other_stream(readers: psycopg.Connection) -> psycopg.Connection:
    """The same without the stream."""
    readers.execute("delete from tidemark.append_streams")
    return readers


@contextmanager
def following(redis_url: str, database: str) -> Iterator[PositionFollower]:
    halt, failures = threading.Event(), list[BaseException]()
    follower = PositionFollower(RedisAddress(redis_url), database, halt)

    def run() -> None:
        try:
            follower.run()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield follower
    finally:
        halt.set()
        thread.join(20)
        if failures:
            raise failures[0]


def late_fact(prev: int, id_: int) -> LateCompletion:
    return LateCompletion(writer="web", epoch=1, prev=prev, id=id_, facts=1, why="regressed")


def token(readers: psycopg.Connection) -> str | None:
    row = readers.execute("select token from tidemark_reader.positions where stream = 's'").fetchone()
    return row[0] if row else None


def is_at(readers: psycopg.Connection, expected: str) -> Callable[[], bool]:
    return lambda: token(readers) == expected


def test_positions_follow_redis(
    redis_url: str, pipeline: Pipeline, database: str, other_stream: psycopg.Connection
) -> None:
    """Also after Redis lost everything and has less for a while."""
    readers = other_stream
    pipeline.move("web", 0, 5)
    with following(redis_url, database):
        eventually(is_at(readers, "m5"))
        pipeline.move("web", 5, 9, linear=7)
        eventually(is_at(readers, "m7~web.9"))
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
            client.set("tidemark:{s}:linear", 3)
            client.sadd("tidemark:streams", "s")
            client.publish("tidemark:{s}", "POSITION s web 0 3")
        eventually(lambda: readers.execute("select 1").fetchone() is not None)
        assert token(readers) == "m7~web.9"


def test_late_facts_are_handed_out_once(
    redis_url: str, pipeline: Pipeline, database: str, other_stream: psycopg.Connection
) -> None:
    readers = other_stream
    pipeline.move("web", 0, 9)
    taking = "select low, high, late from tidemark_reader.take('s', 'mailer')"
    with following(redis_url, database):
        eventually(is_at(readers, "m9"))
        assert readers.execute(taking).fetchall() == [(0, 9, [])]
        pipeline.publish(stream("s", advance("web", 9, 10), linear=10, late=[late_fact(3, 4)]))
        eventually(is_at(readers, "m10"))
        assert readers.execute(taking).fetchall() == [(9, 10, [4])]
    pipeline.publish(stream("s", advance("web", 10, 11), linear=11, late=[late_fact(4, 5), late_fact(5, 6)]))
    with following(redis_url, database):
        eventually(is_at(readers, "m11"))
        assert readers.execute(taking).fetchall() == [(10, 11, [5, 6])]
        assert readers.execute(taking).fetchall() == []


def test_a_stream_with_writers_here_is_left_to_its_transactions(
    redis_url: str, pipeline: Pipeline, database: str, readers: psycopg.Connection
) -> None:
    readers.execute("update tidemark.append_progress set writer = 'shop'")
    pipeline.move("shop", 0, 9)
    with following(redis_url, database) as follower:
        eventually(lambda: follower.is_ours("s"))
        assert token(readers) is None


def test_a_stream_with_writers_elsewhere_is_moved_by_what_is_published(
    redis_url: str, pipeline: Pipeline, database: str, readers: psycopg.Connection
) -> None:
    """Also if they are found only later."""
    readers.execute("update tidemark.append_progress set writer = 'shop'")
    readers.execute("select tidemark_reader.publish('database', array['s'], array[4])")
    with following(redis_url, database) as follower:
        eventually(lambda: follower.is_ours("s"))
        pipeline.move("elsewhere", 0, 9)
        eventually(is_at(readers, "m9"))
        assert not follower.is_ours("s")
