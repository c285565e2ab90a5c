"""`tidemark verify` on real servers: what differs is named, and what was only a moment is not."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from tests.app.sidecar.given import sidecar
from tests.sinks.reader.given import Pipeline
from tests.streaming.builders import STREAM, Shard, join, position, rdata, void
from tests.terminals import shown_on_a_terminal
from tidemark.app.cli import main
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.verbs import verify
from tidemark.app.verbs.verify import RedisKeys, RedisTokens, Replica, ReplicaPositions, Sidecar
from tidemark.sinks.postgres.status import Audit
from tidemark.sinks.redis.client import STREAMS_KEY, key
from tidemark.sinks.redis.publish import Redis


@pytest.fixture
def audit(dsn: str) -> Iterator[Audit]:
    with Audit(dsn) as audit:
        yield audit


@pytest.fixture
def fed(pipeline: Pipeline) -> Shard:
    """Two writers, one of which owes 4; the line is at 3. As the query and the sinks make it of records."""
    shard = Shard()
    pipeline.publish(shard.feed(join("a", 0), join("b", 0)))
    pipeline.publish(shard.feed(rdata("a", 1, 0, epoch=1), void("a", 1, 2, epoch=1), rdata("b", 3, 0, epoch=1)))
    pipeline.publish(shard.feed(position("a", 2, 3, epoch=1), rdata("b", 6, 5, epoch=1), position("a", 3, 9, epoch=1)))
    pipeline.publish(shard.feed(rdata("b", 8, 6, epoch=1)))
    return shard


def told(audit: Audit, redis: Redis, *more: Replica) -> list[str]:
    copies: Sequence[Replica] = [RedisKeys(redis), RedisTokens(redis), *more]
    report = verify.compare_replicas(audit, copies, 0.0)
    verify.add_history(audit, report)
    assert report.is_equal == (verify.to_text(report).count("\n") == 0)
    return verify.to_text(report).splitlines()


@pytest.mark.usefixtures("fed")
def test_copies_that_are_alike_have_no_difference(audit: Audit, shown: Redis, dsn: str, redis_url: str) -> None:
    """Rows, state, keys, token, a sidecar and the history of a stream with a gap."""
    with sidecar(ReadSideConfig(redis_url, dsn)) as client:
        url = str(client.base_url)
        assert told(audit, shown, Sidecar(url, None, None)) == [
            "0 differences in 1 stream of Postgres, the query's state, redis, redis's token,"
            f" sidecar {url}; 3 advances without a hole"
        ]


@pytest.mark.usefixtures("fed")
def test_redis_that_lacks_and_redis_that_is_ahead_are_told_apart(audit: Audit, shown: Redis, keys: Any) -> None:
    """Each with what to do; the token is a copy of its own."""
    keys.hset(key(STREAM, "positions"), "a", 2)
    keys.set(key(STREAM, "linear"), 7)
    keys.set(key(STREAM, "token"), "m1")
    lines = told(audit, shown)
    assert "events: linear is 1 in redis's token and 3 in Postgres: behind" in lines
    keys.delete(key(STREAM, "token"), STREAMS_KEY)
    lines = told(audit, shown)
    assert "events: name is nothing in redis and events in Postgres: behind" in lines
    assert "events: linear is 7 in redis and 3 in Postgres: ahead" in lines
    assert "events: position of a is 2 in redis and 9 in Postgres: behind" in lines
    assert "events: linear is nothing in redis's token and 3 in Postgres: behind" in lines
    assert sum(line.startswith("    ") for line in lines) == 3


@pytest.mark.usefixtures("fed")
def test_streams_and_values_that_are_not_ours_are_named(audit: Audit, shown: Redis, keys: Any) -> None:
    """A stream that Postgres does not know, and keys that hold something else; the other copies are compared."""
    keys.sadd(STREAMS_KEY, "foreign")
    keys.set(key(STREAM, "linear"), "seven")
    lines = told(audit, shown)
    assert "foreign: in redis, not in Postgres" in lines
    problem = "events: redis cannot be read: its keys contain a value that is not a number"
    assert any(line.startswith(problem) for line in lines)
    keys.delete(key(STREAM, "linear"))
    keys.set(key(STREAM, "token"), b"\xff")
    assert any(line.startswith("events: redis's token cannot be read: ") for line in told(audit, shown))


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("update tidemark.streams set linear = 5", "linear is 3 in the query's state and 5 in Postgres"),
        (
            "update tidemark.stream_positions set position = 12 where writer = 'a'",
            "position of a is 9 in the query's state and 12 in Postgres",
        ),
        (
            "update tidemark.stream_positions set retired = true where writer = 'a'",
            "status of a is active in the query's state and retired in Postgres",
        ),
        ("delete from tidemark.stream_gaps", "the gap of b up to 5 is open in the query's state, not in Postgres"),
        ("delete from tidemark.stream_positions", "position of b is 3 in the query's state and nothing in Postgres"),
    ],
)
@pytest.mark.usefixtures("fed")
def test_rows_that_somebody_wrote_differ_from_the_state(
    audit: Audit, shown: Redis, sql: psycopg.Connection, statement: str, said: str
) -> None:
    """The state is of the same transaction as the rows."""
    sql.execute(statement.encode())
    assert f"events: {said}: differs" in told(audit, shown)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "delete from tidemark.packed_advances where batch = 2",
            "the history of a has a hole: no advance from 0 to 2",
        ),
        (
            "delete from tidemark.packed_advances where batch = 3",
            "the history of a has a hole: no advance from 2 to 9",
        ),
        (
            "insert into tidemark.packed_advances select * from tidemark.packed_advances where batch = 2",
            "the history of a has an overlap: after 2, the next advance begins at 0",
        ),
        (
            "update tidemark.packed_advances set ahead = array[-3, 0] where batch = 2",
            "the history of a has a step back: from 5 to 3",
        ),
        (
            "update tidemark.stream_positions set position = 2 where writer = 'a'",
            "the history of a has a step back: from 9 to 2",
        ),
    ],
)
@pytest.mark.usefixtures("fed")
def test_a_history_that_does_not_join_is_named(
    audit: Audit, shown: Redis, sql: psycopg.Connection, statement: str, said: str
) -> None:
    """A hole at its beginning, within and at its end; an overlap; a step back."""
    sql.execute(statement.encode())
    assert f"events: {said}" in told(audit, shown)


@pytest.mark.usefixtures("fed")
def test_a_history_that_is_checked_in_parts_has_the_same_faults(audit: Audit, sql: psycopg.Connection) -> None:
    """Each writer is in one part, also one without a stored advance."""
    sql.execute("delete from tidemark.packed_advances where batch = 2")
    sql.execute("insert into tidemark.stream_positions select 'new', 'c', 1, 5, false, false, now(), 9e18::bigint")
    whole = audit.history_faults(None, 10)
    assert {fault.writer for fault in whole} >= {"a", "b"}
    parts = list[int]()
    for number in (2, 3, 7):
        assert audit.history_faults(None, 10, number, lambda: parts.append(1)) == whole
    assert audit.history_faults(None, 1, 2) == whole[:1]
    assert len(parts) == 12


VERIFY = "from tidemark.app.cli import main; main(['verify', '--history'])"


@pytest.mark.usefixtures("fed")
def test_a_terminal_shows_how_much_of_the_history_is_checked(dsn: str, redis_url: str) -> None:
    """The bar has the rate of advances and the remaining time."""
    settings = {"TIDEMARK_POSTGRES_DSN": dsn, "TIDEMARK_REDIS_URL": redis_url}
    shown = shown_on_a_terminal(VERIFY, environment=settings)
    assert "checking the history" in shown
    assert "3/3" in shown
    assert "advances/s" in shown
    assert "3 advances without a hole" in shown


class Catching:
    """A copy that is one reading late, and then right."""

    name = "redis"

    def __init__(self, redis: Redis) -> None:
        self._right = RedisKeys(redis)
        self.looks = 0

    def names(self) -> set[str]:
        return set()

    def read(self, streams: Sequence[str]) -> dict[str, ReplicaPositions]:
        self.looks += 1
        return self._right.read(streams) if self.looks > 1 else dict.fromkeys(streams, ReplicaPositions(None))


@pytest.mark.usefixtures("fed")
def test_a_copy_that_catches_up_in_time_is_no_difference(audit: Audit, shown: Redis) -> None:
    """What was published a moment ago is on its way; without patience it is told."""
    assert verify.compare_replicas(audit, [Catching(shown)], 60.0).is_equal
    assert not verify.compare_replicas(audit, [Catching(shown)], 0.0).is_equal


@pytest.mark.usefixtures("fed")
def test_the_command_ends_with_1_and_tells_programs_all(dsn: str, redis_url: str, keys: Any) -> None:
    """Of a sidecar that is away too; 0 where all is alike."""
    settings = {"TIDEMARK_POSTGRES_DSN": dsn, "TIDEMARK_REDIS_URL": redis_url}
    well = CliRunner().invoke(main, ["verify", "--history", "--json"], env=settings)
    assert well.exit_code == 0
    assert json.loads(well.output)["advances"] == 3
    keys.set(key(STREAM, "linear"), 2)
    words = ["verify", "--patience=0", "--json", "--sidecar", "http://127.0.0.1:1"]
    done = CliRunner().invoke(main, words, env=settings)
    assert done.exit_code == 1
    found = {it["copy"]: it for it in json.loads(done.output)["differences"]}
    assert found["redis"] == {
        "copy": "redis",
        "stream": STREAM,
        "writer": None,
        "what": "linear",
        "found": 2,
        "postgres": 3,
        "verdict": "behind",
    }
    assert found["sidecar http://127.0.0.1:1"]["verdict"] == "away"
    assert CliRunner().invoke(main, ["verify", "--sidecar", "here"], env=settings).exit_code == 2
