import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psycopg
import pytest

from tests.fix_sinks import LEASE
from tests.processes import forked
from tests.sinks.given import batch, lines
from tests.waiting import eventually
from tidemark.app.stack.postgres import PostgresServer
from tidemark.common.errors import LeaseLost, Stopping
from tidemark.sinks.postgres.lease import Lease, LeaseConfig, next_token
from tidemark.sinks.postgres.store import Postgres, PostgresConfig

NEVER = threading.Event()


def hold(dsn: str, owner: str, report: str, ttl: float) -> None:
    """A process that takes the lease, says so, and keeps it until it is killed."""
    with Lease.acquire(dsn, LeaseConfig(owner, ttl, grace_seconds=0.3, poll_seconds=0.05), NEVER) as lease:
        with Path(report).open("a") as file:
            file.write(f'["{owner}", {lease.token}]\n')
        time.sleep(600)


@pytest.fixture
def processes() -> Iterator[list[BaseProcess]]:
    started: list[BaseProcess] = []
    yield started
    for process in started:
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def test_token_rises_with_every_owner(dsn: str) -> None:
    """Rule 6: a released lease is taken at once, under a higher token."""
    patient = LeaseConfig("owner", ttl_seconds=60.0, grace_seconds=60.0)
    with Lease.acquire(dsn, patient, NEVER) as first:
        pass
    began = time.monotonic()
    with Lease.acquire(dsn, patient, NEVER) as second:
        assert second.token > first.token
    assert time.monotonic() - began < 5


def test_who_gives_it_up_publishes_no_more_and_leaves_it_to_the_next(dsn: str) -> None:
    """Rule 6: nobody else has it yet, and what still waits to publish under it stops; the next need not wait."""
    patient = LeaseConfig("owner", ttl_seconds=60.0, grace_seconds=60.0)
    with Lease.acquire(dsn, patient, NEVER) as first:
        first.check()
        first.give_up()
        with pytest.raises(LeaseLost, match=f"this process gave up the lease with token {first.token}"):
            first.check()
    began = time.monotonic()
    with Lease.acquire(dsn, patient, NEVER):
        assert time.monotonic() - began < 5


def test_waiter_stops_when_told(dsn: str, lease: Lease) -> None:
    """Waiting for the lease ends promptly when the process is to end."""
    stopping = threading.Event()
    threading.Timer(0.3, stopping.set).start()
    began = time.monotonic()
    with pytest.raises(Stopping):
        Lease.acquire(dsn, LEASE, stopping)
    assert time.monotonic() - began < 5


def test_renewed_lease_outlives_its_time(dsn: str) -> None:
    """An owner that renews is not replaced, however often its time to live passes."""
    config = LeaseConfig("owner", ttl_seconds=1.5, grace_seconds=1.5, poll_seconds=0.05)
    stopping = threading.Event()
    threading.Timer(4.0, stopping.set).start()
    with Lease.acquire(dsn, config, NEVER) as lease:
        with pytest.raises(Stopping):
            Lease.acquire(dsn, config, stopping)
        lease.check()


def test_killed_owner_is_replaced_before_its_time(dsn: str, tmp_path: Path, processes: list[BaseProcess]) -> None:
    """Rule 6: two processes race for the lease; after kill -9 the other has it, long before the lease expires."""
    report = tmp_path / "owners"
    for owner in ("a", "b"):
        processes.append(forked.Process(target=hold, args=(dsn, owner, str(report), 60.0)))
        processes[-1].start()
    eventually(lambda: len(lines(report)) == 1, 30)
    time.sleep(1.0)
    ((first, token),) = lines(report)
    killed = processes[0 if first == "a" else 1].pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: len(lines(report)) == 2)
    ((_, _), (second, newer)) = lines(report)
    assert second == ("b" if first == "a" else "a")
    assert newer > token


def test_frozen_owner_is_replaced_and_refused(
    dsn: str, tmp_path: Path, processes: list[BaseProcess], store: Postgres
) -> None:
    """Rule 6: an owner that neither renews nor dies loses the lease in time, and its batches are refused."""
    report = tmp_path / "owners"
    processes.append(forked.Process(target=hold, args=(dsn, "frozen", str(report), 1.0)))
    processes[0].start()
    eventually(lambda: len(lines(report)) == 1, 30)
    assert processes[0].pid is not None
    os.kill(processes[0].pid, signal.SIGSTOP)
    token = lines(report)[0][1]
    with Lease.acquire(dsn, LEASE, NEVER) as lease:
        assert lease.token > token
        with pytest.raises(LeaseLost) as caught:
            store.apply(batch(1, token=token))
        assert (caught.value.own, caught.value.newest) == (token, lease.token)


def test_transaction_that_hangs_does_not_keep_the_lease(dsn: str) -> None:
    """Rule 6: a frozen owner in the middle of a batch is ended by its successor, and its batch is rolled back."""
    config = LeaseConfig("owner", ttl_seconds=0.5, grace_seconds=0.2, poll_seconds=0.05)
    frozen = Lease.acquire(dsn, config, NEVER)  # not entered: nothing renews it
    with psycopg.connect(dsn) as hung:
        hung.execute("select token from tidemark.query_lease for key share")
        hung.execute("select set_config('application_name', %s, true)", (f"tidemark token {frozen.token}",))
        began = time.monotonic()
        with Lease.acquire(dsn, config, NEVER) as lease:
            assert lease.token > frozen.token
        assert time.monotonic() - began < 10
        with pytest.raises(psycopg.OperationalError):
            hung.execute("select 1")
    frozen.close()


def test_batch_in_flight_delays_a_takeover(dsn: str, sql: psycopg.Connection) -> None:
    """Rule 6: nobody takes the lease over between a batch's check of its token and its commit."""
    with Lease.acquire(dsn, LEASE, NEVER):
        pass
    taken: list[float] = []

    def take() -> None:
        with Lease.acquire(dsn, LEASE, NEVER):
            taken.append(time.monotonic())

    with sql.transaction():
        sql.execute("select token from tidemark.query_lease for key share")
        waiter = threading.Thread(target=take)
        waiter.start()
        time.sleep(0.5)
        assert not taken
        committed = time.monotonic()
    waiter.join()
    assert taken[0] >= committed


def test_owner_learns_that_it_lost(dsn: str, sql: psycopg.Connection) -> None:
    """Rule 6: once somebody raised the token, the owner's next check raises."""
    with Lease.acquire(dsn, LeaseConfig("owner", ttl_seconds=0.3), NEVER) as lease:
        lease.check()
        sql.execute("update tidemark.query_lease set token = token + 5")
        eventually(lease.lost.is_set)
        with pytest.raises(LeaseLost, match=f"the newest token is {lease.token + 5}"):
            lease.check()


def test_lease_survives_a_restart_of_postgres(dsn: str, postgres: PostgresServer) -> None:
    """An owner whose session broke takes it up again under the same token, as nobody else was quicker."""
    with Lease.acquire(dsn, LeaseConfig("owner", ttl_seconds=0.6, grace_seconds=5.0), NEVER) as lease:
        postgres.kill()
        postgres.start()

        def held_again() -> bool:
            with psycopg.connect(dsn) as connection:
                row = connection.execute(
                    "select count(*) from pg_locks where locktype = 'advisory'"
                    " and database = (select oid from pg_database where datname = current_database())"
                ).fetchone()
            return row == (1,)

        eventually(held_again)
        lease.check()
        with psycopg.connect(dsn) as connection:
            assert connection.execute("select token from tidemark.query_lease").fetchone() == (lease.token,)


@pytest.mark.parametrize("last", [0, 2**60], ids=["the clock leads", "the clock is behind"])
def test_a_failover_gives_no_token_out_twice(dsn: str, postgres: PostgresServer, last: int) -> None:
    """Rule 6: two copies of a database, of which one has lost the other's newest owner, have different owners: either
    refuses the batches of the other's."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("update tidemark.query_lease set token = %s", (last,))
    name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
    copy = postgres.dsn(f"{name}_copy")
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"create database {name}_copy template {name}".encode())
    try:
        with Lease.acquire(dsn, LEASE, NEVER) as one, Lease.acquire(copy, LEASE, NEVER) as other:
            for here, token in ((dsn, other.token), (copy, one.token)):
                with Postgres(PostgresConfig(here)) as store, pytest.raises(LeaseLost):
                    store.apply(batch(1, token=token))
    finally:
        with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"drop database {name}_copy with (force)".encode())


def test_tokens_rise_whatever_the_clock_says() -> None:
    """Rule 6: a clock that was set back, or stands, gives no lower token and none that was given before."""
    token = 0
    for clock in (1_790_000_000, 1_790_000_000, 1_000_000_000, 0, 1_790_000_001):
        higher = next_token(token, clock)
        assert max(token, clock * 2**20) < higher < 2**53
        token = higher
    assert len({next_token(7, 0) for _ in range(20)}) > 1


def test_a_fence_that_no_owner_here_has_left_is_passed_at_once(dsn: str, lease: Lease) -> None:
    """Rule 6: an owner that a sink refused takes the lease again at once, above all that the sink has seen."""
    above = lease.token + 10**12
    lease.note_lost(above)
    lease.close()
    with Lease.acquire(dsn, LeaseConfig("next", ttl_seconds=60.0, grace_seconds=60.0), NEVER, above) as following:
        assert following.token > above
