"""`tidemark simulate` as a fault-injection test: real writers, readers, servers and kills, in a stack of its own."""

import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest
import redis

from tests.fix_stack import Terminal
from tidemark.app.simulation.rooms import RoomsWorkload
from tidemark.app.simulation.script import Fault
from tidemark.app.simulation.streams import READERS
from tidemark.app.stack.processes import KafkaServer
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import TopicPlan, Topics

pytestmark = pytest.mark.slow

SECONDS = 50
ROOMS_SECONDS = 12
NO_PROGRESS_SECONDS = 720.0
"""More than a simulation waits for its begin and its end."""
GOING_BACK = {Fault.FAILOVER, Fault.RESTORE, Fault.RESTORE_IN_PLACE, Fault.SEQUENCE_BACK}
QUICK = RoomsWorkload.faults - GOING_BACK - {Fault.PIPELINE, Fault.KAFKA, Fault.POSTGRES_CRASH}
"""Faults of rooms after which nobody waits long for the stack."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, jars: Path, warm_jvm: None) -> Iterator[Terminal]:
    """One that is up, for several plays whose streams have other names."""
    terminal = Terminal(tmp_path_factory.mktemp("stack"), jars)
    with terminal.up():
        yield terminal


def test_nothing_is_missed_doubled_or_disordered_whatever_dies(stack: Terminal) -> None:
    """Services that roll back, hang, die, stand still, join late and leave; their relay, readers, pipeline, Redis,
    Kafka and both Postgres servers killed: every reader reads every fact exactly once, in order. Databases that go back
    are for `make chaos`."""
    require_right(stack, SECONDS, set(Fault) - GOING_BACK)


def test_rooms_are_right_whatever_dies(stack: Terminal) -> None:
    """Several processes write a chat server's rooms, one of them with `append`, and fetch history; clients sync by line
    and by vector, page through history, serve from caches, wait for their own events: no answer is wrong, and in the
    end extremities, states and timelines are as defined. All that can die does so in `make chaos-rooms`."""
    require_rooms_right(stack, ROOMS_SECONDS, QUICK)


def require_rooms_right(terminal: Terminal, seconds: int, faults: Set[Fault]) -> str:
    """Play rooms with `faults` in a stack that is up; in the end every client was answered rightly. What it said."""
    words = ["--seconds", str(seconds), "--rate", "60", "--faults", ",".join(sorted(faults)), "--prefix", "rooms_"]
    done = terminal.run("simulate", "--workload", "rooms", *words, "--verify", patience=seconds + NO_PROGRESS_SECONDS)
    output = done.stdout.decode()
    assert done.returncode == 0, output + done.stderr.decode() + _what_blocks(terminal)
    for client in ("line", "vector", "history", "caches", "own", "tables"):
        found = re.search(rf"^{client} +(\d+) +(\d+)( +0){{5}}$", output, re.MULTILINE)
        assert found, output
        assert int(found[1]) == int(found[2]) > 0
    return output


def require_injected(output: str, faults: Set[Fault]) -> None:
    """Each of them, but for those that happen inside transactions."""
    counted = next(line for line in output.splitlines() if line.startswith("the simulation is over"))
    assert {fault for fault in faults - {Fault.ROLLBACK, Fault.HANG} if f" x {fault}" not in counted} == set()


def require_right(
    terminal: Terminal, seconds: int, faults: Set[Fault], seed: str | None = None, *, aloud: bool = False
) -> str:
    """Play with `faults` in a stack that is up; each comes, and in the end everything was read. What it said."""
    rate = 60 if seconds <= 600 else 20
    words = ["--seconds", str(seconds), "--rate", str(rate), "--faults", ",".join(sorted(faults)), "--verify"]
    words += ["--seed", seed] if seed else []
    run = terminal.run_aloud if aloud else terminal.run
    done = run("simulate", *words, patience=seconds + NO_PROGRESS_SECONDS)
    output = done.stdout.decode()
    assert done.returncode == 0, output + done.stderr.decode() + _what_blocks(terminal)
    require_injected(output, faults)
    for reader in READERS:
        found = re.search(rf"^{reader} +(\d+) +(\d+) +0 +0 +0 +\d+ +\d+ +\d+$", output, re.MULTILINE)
        assert found, output
        assert int(found[1]) == int(found[2]) > 100
    assert all(terminal.said(f"{server} ended") for server in ("pipeline", "redis", "kafka", "postgres"))
    assert "Traceback" not in terminal.home.log("simulate-relay").read_text()
    return output


def _what_blocks(terminal: Terminal) -> str:
    """For a run that failed: positions, and what blocks them."""
    return "".join(terminal.run(verb).stdout.decode() for verb in ("status", "gaps"))


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
    assert b"Tidemark already has positions of the stream events" in done.stderr
    assert b"--prefix NAME" in done.stderr
    assert done.stderr.count(b"\n") == 1
