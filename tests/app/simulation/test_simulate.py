"""`tidemark simulate` as the torture machine: real writers, readers, servers and kills, in a stack of its own."""

import re
from collections.abc import Set

import redis

from tests.fix_stack import Terminal
from tidemark.app.stack.servers import KafkaServer
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.simulator.script import Fault
from tidemark.sources.topics import TopicPlan, Topics

SECONDS = 50
CATCH_UP_SECONDS = 240.0


def test_nothing_is_missed_doubled_or_disordered_whatever_dies(terminal: Terminal) -> None:
    """Services that roll back, hang, die, stand still, join late and leave; their relay, readers, pipeline, Redis,
    Kafka and both Postgres servers killed: both readers read every fact exactly once, in order. Databases that go back
    are for `make torture`."""
    require_right(terminal, SECONDS, set(Fault) - {Fault.FAILOVER, Fault.RESTORE})


def require_right(terminal: Terminal, seconds: int, faults: Set[Fault]) -> str:
    """Play with `faults` in a stack of its own; each comes, and in the end everything was read. What it said."""
    with terminal.up():
        words = [
            "simulate",
            "--seconds",
            str(seconds),
            "--rate",
            "60",
            "--faults",
            ",".join(sorted(faults)),
            "--verify",
        ]
        done = terminal.run(*words, patience=seconds + CATCH_UP_SECONDS)
    told = done.stdout.decode()
    assert done.returncode == 0, told + done.stderr.decode()
    befell = next(line for line in told.splitlines() if line.startswith("the play is over"))
    assert {fault for fault in faults - {Fault.ROLLBACK, Fault.HANG} if f" x {fault}" not in befell} == set()
    for reader in ("vector", "linear"):
        found = re.search(rf"^{reader} +(\d+) +(\d+) +0 +0 +0 +\d+ +\d+ +\d+$", told, re.MULTILINE)
        assert found, told
        assert int(found[1]) == int(found[2]) > 100
    assert all(terminal.said(f"{server} ended") for server in ("pipeline", "redis", "kafka", "postgres"))
    return told


def test_streams_that_tidemark_knows_are_not_begun_anew(
    kafka: KafkaServer, redis_url: str, database: str, prefix: str, terminal: Terminal
) -> None:
    """IDs that begin below known positions would look like a database set back: another prefix is asked for."""
    Topics(KafkaConnection(kafka.bootstrap_servers)).create_missing([TopicPlan(prefix, 2, 3_600_000)])
    with redis.Redis.from_url(redis_url) as client:
        client.set("tidemark:{events}:linear", 7)
    done = terminal.run(
        "simulate",
        TIDEMARK_KAFKA_BOOTSTRAP_SERVERS=kafka.bootstrap_servers,
        TIDEMARK_KAFKA_FACTS_TOPIC=prefix,
        TIDEMARK_REDIS_URL=redis_url,
        TIDEMARK_POSTGRES_DSN=database,
        TIDEMARK_LOG_LEVEL="error",
    )
    assert done.returncode == 2
    assert b"Tidemark knows the stream events already" in done.stderr
    assert b"--prefix NAME" in done.stderr
    assert done.stderr.count(b"\n") == 1
