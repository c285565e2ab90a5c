"""The service's process is killed, or frozen, at each moment; what follows must lose nothing and double nothing."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import psycopg
import pytest

from tests.sources.writer.conftest import Make
from tests.sources.writer.judge import Judge
from tests.waiting import eventually
from tidemark.app.stack.servers import KafkaServer
from tidemark.app.writer import FenceOrder, fence_writer
from tidemark.sources.kafka import KafkaConnection

MOMENTS = [
    [("add", 3)],
    [("commit", 3)],
    [("ended", 2)],
    [("decide", 2)],
    [("pack", 1)],
    [("hear", 4)],
    [("delete", 1)],
    [("pack", 1), ("settle", 1)],
    [("pack", 1), ("deliver", 1)],
    [("pack", 1), ("deliver", 2)],
]


@contextmanager
def service(
    dsn: str, kafka: KafkaServer, topic: str, number: signal.Signals, step: str, nth: int
) -> Iterator[psutil.Popen]:
    """The process, which is ended with the block."""
    arguments = [dsn, kafka.bootstrap_servers, topic, number.name, step, str(nth)]
    command = [sys.executable, "-m", "tests.sources.writer.service", *arguments]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.parametrize("moments", MOMENTS, ids=lambda moments: "-".join(f"{step}{nth}" for step, nth in moments))
def test_killed_at_any_moment_nothing_is_lost_or_doubled(
    make: Make,
    dsn: str,
    kafka: KafkaServer,
    topic: str,
    sql: psycopg.Connection,
    judge: Judge,
    moments: list[tuple[str, int]],
) -> None:
    """After the next start positions have passed every ID, every committed fact counts once, and no start that broke
    off looks like a database that went back.
    """
    for step, nth in moments:
        with service(dsn, kafka, topic, signal.SIGKILL, step, nth) as process:
            assert process.wait(30) == -signal.SIGKILL
    with make() as writer, psycopg.connect(dsn) as connection, writer.transaction(connection) as facts:
        connection.execute("insert into orders (id) values (%s)", [facts.append("orders", {})])
    verdict = judge.agrees(sql)
    assert verdict.rejected == {}
    assert verdict.effects["orders"].timelines == []


@pytest.mark.parametrize(("step", "late"), [("decide", False), ("pack", True)])
def test_frozen_while_its_successor_takes_over_it_can_write_no_more(
    make: Make,
    dsn: str,
    kafka: KafkaServer,
    topic: str,
    sql: psycopg.Connection,
    judge: Judge,
    step: str,
    late: bool,
) -> None:
    """It stands still before or after it has read the outbox, one transaction open, which fails as fenced later.

    What it had decided it sends late, as a zombie. What it had not, it does not decide from an outbox that its
    successor has emptied.
    """
    with service(dsn, kafka, topic, signal.SIGSTOP, step, 1) as process:
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, 30)
        said: list[str] = []
        order = FenceOrder("shop-1", terminate=True, retire=False)
        fence_writer(dsn, KafkaConnection(kafka.bootstrap_servers), topic, order, said.append, lambda: 0.0)
        assert sum(line.startswith("ended open transaction: pid") for line in said) >= 1
        with make() as writer, psycopg.connect(dsn) as connection:
            with writer.transaction(connection) as facts:
                connection.execute("insert into orders (id) values (%s)", [facts.append("orders", {})])
            process.send_signal(signal.SIGCONT)
            assert process.wait(30) == 3
    verdict = judge.agrees(sql)
    assert verdict.rejected.keys() <= {"zombie"}
    told = verdict.kinds()
    fenced = next(at for at, (kind, epoch, _) in enumerate(told) if (kind, epoch) == ("JOIN", 2))
    # A heartbeat may have been on its way as it froze.
    assert any(epoch == 1 and kind != "POSITION" for kind, epoch, _ in told[fenced:]) == late
    assert verdict.effects["orders"].advances[0].epoch == 3
