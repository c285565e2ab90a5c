"""A login with few rights attacks databases and metrics ports, and neither services nor readers notice."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.app.attacked import Timed, attacked, check, ended
from tests.app.running import PATIENCE, Running
from tests.fix_pipeline import Site
from tests.waiting import eventually
from tidemark.app.relay import migrate
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import LOOPBACK, SidecarProcess, free_port
from tidemark.common.environment import child_environment
from tidemark.sources.relay.queries import COMMON_CUT, LOCK_KEY_BASE

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SECONDS = 10.0
PAUSE = 0.1  # seconds between two facts, and between two probes
ROW = "x" * 700_000
APPEND = "select tidemark.append('large', variadic (select array_agg(to_jsonb(%s::text)) from generate_series(1, %s)))"


@dataclass(frozen=True)
class Service:
    """A service that appends facts, and waits until the sidecar has answered that each position is reached."""

    site: Site
    pipeline: Running
    sidecar: SidecarProcess
    relay_port: int
    appended: list[int] = field(default_factory=list)

    def measure(self, seconds: float) -> Timed:
        """Append facts for so long. The times of `snapshots` are from the commit of a fact to the sidecar's answer."""
        timed, over = Timed(), threading.Event()
        probing = threading.Thread(target=self._probe, args=(timed, over))
        probing.start()
        with psycopg.connect(self.site.dsn, autocommit=True) as sql, httpx.Client(base_url=self.sidecar.url) as reader:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                row = sql.execute("select tidemark.append('orders', '1')").fetchone()
                assert row is not None
                self.appended.append(row[0])
                began = time.monotonic()
                answer = reader.get(f"/v1/streams/orders/wait?token=m{row[0]}&timeout=60", timeout=60)
                timed.snapshots.append(time.monotonic() - began)
                if answer.status_code != HTTPStatus.OK:
                    timed.failed.append(f"fact {row[0]}: {answer.text}")
                over.wait(PAUSE)
        over.set()
        probing.join()
        return timed

    def _probe(self, timed: Timed, over: threading.Event) -> None:
        ports = (self.pipeline.metrics_port, self.relay_port, self.sidecar.port)
        while not over.wait(PAUSE):
            for url in (f"http://{LOOPBACK}:{port}/{probe}" for port in ports for probe in ("livez", "readyz")):
                began = time.monotonic()
                try:
                    if (status := httpx.get(url, timeout=30).status_code) != HTTPStatus.OK:
                        timed.failed.append(f"{url}: {status}")
                except httpx.HTTPError as problem:
                    timed.failed.append(f"{url}: {problem!r}")
                timed.probes.append(time.monotonic() - began)


@pytest.fixture
def service(site: Site) -> Iterator[Service]:
    """A service with a pipeline, a relay and a sidecar, each a process of its own, which have counted a first fact."""
    migrate(site.dsn, ["orders", "large"], "forward", lambda _: None)
    pipeline, port = site.start(), free_port()
    settings = {name: text for name, text in site.variables.items() if name != "TIDEMARK_LOG_LEVEL"}
    relay = [sys.executable, "-m", "tidemark", "relay", "--metrics", f"{LOOPBACK}:{port}"]
    http = free_port()
    sidecar = SidecarProcess(Home(site.home), http, settings | {"TIDEMARK_SIDECAR_PORT": str(http)})
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(relay, env=child_environment(settings)))
        stack.callback(process.terminate)
        pipeline.ready()
        sidecar.start()
        stack.callback(sidecar.stop)
        made = Service(site, pipeline, sidecar, port)
        made.measure(1)
        eventually(lambda: httpx.get(f"{sidecar.url}/v1/streams/orders").status_code == HTTPStatus.OK, PATIENCE)
        yield made


@contextmanager
def login(service: Service, rights: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of a login that has CONNECT, as everybody has, and `rights`."""
    name = f"attacker_{service.site.database}"
    service.site.sql(f"create role {name} login password 'secret' {rights}")
    try:
        address = make_conninfo(service.site.dsn, user=name, password="secret")
        with psycopg.connect(address, autocommit=True) as connection:
            yield connection
    finally:
        service.site.sql(f"drop role {name}")


@contextmanager
def locks(service: Service) -> Iterator[None]:
    """Hold every advisory lock but those that SECURITY.md names."""
    with login(service, "") as other, other.transaction():
        other.execute("select pg_current_xact_id()")
        other.execute("select pg_advisory_lock(hashtextextended('tidemark.history', 0))")
        for number in (1, 2):
            other.execute("select pg_advisory_xact_lock_shared(%s, hashtext(''))", [LOCK_KEY_BASE + number])
            other.execute("select pg_advisory_xact_lock(%s, hashtext(%s))", [LOCK_KEY_BASE + number, COMMON_CUT])
        yield


@contextmanager
def large_facts(service: Service) -> Iterator[None]:
    """Append facts of 130 rows of 700 kB without end, which are refused, and one fact of almost 16 MiB."""
    over, refused = threading.Event(), list[str]()
    with login(service, "in role tidemark_append") as other:
        other.execute(APPEND, [ROW, 23])

        def attack() -> None:
            while not over.wait(PAUSE):
                try:
                    other.execute(APPEND, [ROW, 130])
                except psycopg.errors.ProgramLimitExceeded as problem:
                    refused.append(str(problem))

        attacking = threading.Thread(target=attack)
        attacking.start()
        try:
            yield
        finally:
            over.set()
            attacking.join()
    assert len(refused) > 1
    assert "a fact may have 16777216" in refused[0]
    with httpx.Client(base_url=service.sidecar.url) as reader:
        eventually(lambda: reader.get("/v1/streams/large").json().get("linear") == 1)


@contextmanager
def metrics_ports(service: Service) -> Iterator[None]:
    """Scrapes without end, and requests that never end, at the metrics ports of the pipeline and the relay."""
    with ExitStack() as attacks:
        processes = []
        for port in (service.relay_port, service.pipeline.metrics_port):
            at = SidecarProcess(service.sidecar.home, port, {})
            processes.append(attacks.enter_context(attacked(at, port, "scrapes", "half_open")))
        yield
        for process in processes:
            assert ended(process)["scrapes"]["200"] > 0


@pytest.mark.parametrize("attack", [locks, large_facts, metrics_ports])
def test_facts_and_probes_go_on(service: Service, attack: Callable[[Service], Any]) -> None:
    """From the commit of a fact to a reader's answer; each fact is counted once."""
    before = service.measure(SECONDS)
    with attack(service):
        check(before, service.measure(SECONDS))
    ((facts,),) = service.site.sql("select sum(facts)::bigint from tidemark.position_advances where stream = 'orders'")
    assert facts == len(service.appended)
    eventually(lambda: service.site.sql("select count(*) from tidemark.append_outbox") == [(0,)])
