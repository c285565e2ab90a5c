"""Scrapes and probes over a real socket: of the pipeline's process, and of a relay's."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.registry import Collector

from tests.waiting import eventually
from tidemark.app import relay
from tidemark.app.connections import local_host_names
from tidemark.app.pipeline import metrics
from tidemark.app.serving import http_health
from tidemark.common.errors import BadSetting
from tidemark.sources.relay.relay import RelayMetrics

NOW = 1_000_000.0
ANYWHERE = ("127.0.0.1", 0)


@pytest.fixture
def health() -> Iterator[metrics.PipelineHealth]:
    yield metrics.PipelineHealth()
    metrics.READY.set(0)
    metrics.HEARTBEAT.set(0)


@pytest.fixture
def relaying() -> RelayMetrics:
    return RelayMetrics(CollectorRegistry())


@pytest.fixture
def url(health: metrics.PipelineHealth) -> Iterator[str]:
    with http_health.serve_health("TIDEMARK_METRICS_PORT", ANYWHERE, health, now=lambda: NOW) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def relay_url(relaying: RelayMetrics) -> Iterator[str]:
    with http_health.serve_health(
        "--metrics", ANYWHERE, relay.LoopHealth(relaying, "the database"), now=lambda: NOW
    ) as port:
        yield f"http://127.0.0.1:{port}"


def asked(url: str) -> tuple[int, str]:
    try:
        with urlopen(url, timeout=60) as response:
            return int(response.status), response.read().decode().strip()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()


def states(url: str) -> list[int]:
    return [asked(f"{url}/{probe}")[0] for probe in ("livez", "readyz")]


def test_one_that_waits_is_alive_and_says_for_what(url: str, health: metrics.PipelineHealth) -> None:
    """Before its query runs a pipeline waits for servers or the lease: to be left alone, and not to be relied on."""
    assert states(url) == [200, 503]
    health.set_state("no executor has come")
    assert asked(f"{url}/readyz") == (503, "no executor has come")


def test_one_whose_query_runs_is_ready(url: str, health: metrics.PipelineHealth) -> None:
    """The loop went round a moment ago and says that the next batch can run."""
    health.set_state(None)
    metrics.HEARTBEAT.set(NOW - 1)
    assert states(url) == [200, 200]


def test_one_whose_loop_stands_still_is_not_alive(url: str, health: metrics.PipelineHealth) -> None:
    """A heartbeat that is older than 15 s while the query is said to run: the process hangs."""
    health.set_state(None)
    metrics.HEARTBEAT.set(NOW - metrics.STALE_SECONDS)
    assert states(url) == [503, 200]


def test_every_other_path_is_the_scrape(url: str, health: metrics.PipelineHealth) -> None:
    """Prometheus finds the metrics at /metrics."""
    health.set_state("no executor has come")
    assert "\ntidemark_pipeline_ready 0.0" in asked(f"{url}/metrics")[1]


def test_scrapes_without_end_take_a_part_of_the_time(relaying: RelayMetrics) -> None:
    """Metrics may be many. The process rests after it wrote them, and probes do not wait."""
    written: list[float] = []

    class SlowCollector(Collector):
        def collect(self) -> list[Metric]:
            if over is not None:
                written.append(time.monotonic())
                time.sleep(0.05)
            return []

    over: threading.Event | None = None
    relaying.registry.register(SlowCollector())
    with http_health.serve_health("--metrics", ANYWHERE, relay.LoopHealth(relaying, "it"), now=lambda: NOW) as port:
        url, over = f"http://127.0.0.1:{port}", threading.Event()

        def flood() -> None:
            while not over.is_set():
                with suppress(OSError):
                    asked(f"{url}/metrics")

        clients = [threading.Thread(target=flood) for _ in range(8)]
        began = time.monotonic()
        for client in clients:
            client.start()
        assert 503 in states(url)
        time.sleep(1)
        passed, count = time.monotonic() - began, len(written)
        over.set()
        for client in clients:
            client.join()
    assert 1 <= count <= passed / (0.05 * (1 + http_health.PAUSE_FACTOR)) + 2


def test_a_port_in_use_stops_the_start(url: str, health: metrics.PipelineHealth) -> None:
    """A person must choose another port: one line says which one was wanted."""
    taken = ("127.0.0.1", int(url.rpartition(":")[2]))
    wrong = pytest.raises(BadSetting, match=f"TIDEMARK_METRICS_PORT.*{taken[1]}")
    with wrong, http_health.serve_health("TIDEMARK_METRICS_PORT", taken, health):
        pass


def test_a_relay_that_waits_for_a_server_is_alive_and_not_ready(relay_url: str) -> None:
    """Kafka and the database may come in any order, and whenever they like."""
    assert states(relay_url) == [200, 503]


@pytest.mark.parametrize("state", ["active", "standby"])
def test_a_relay_that_works_or_waits_for_its_turn_is_ready(relay_url: str, relaying: RelayMetrics, state: str) -> None:
    """The relay of a new release has its turn only when the old one ends, which waits until the new one is ready."""
    getattr(relaying, state).set(1)
    relaying.heartbeat.set(NOW - 1)
    assert states(relay_url) == [200, 200]


def test_a_relay_whose_loop_stands_still_is_not_alive(relay_url: str, relaying: RelayMetrics) -> None:
    """A minute without a round, while it should relay: the process hangs."""
    relaying.active.set(1)
    relaying.heartbeat.set(NOW - relay.STALE_SECONDS)
    assert states(relay_url) == [503, 200]


QUICK = http_health.HealthServerConfig(max_connections=8, request_timeout_seconds=1.0, answer_timeout_seconds=2.0)


@pytest.fixture
def bounded(health: metrics.PipelineHealth) -> Iterator[str]:
    with http_health.serve_health("TIDEMARK_METRICS_PORT", ANYWHERE, health, limits=QUICK) as port:
        yield f"http://127.0.0.1:{port}"


def connected(url: str, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60, source_address=(source, 0))
    made.sendall(sent)
    return made


def answering() -> int:
    """How many connections have a thread; what else runs in this process is none of this."""
    return sum("process_request" in thread.name for thread in threading.enumerate())


def is_ended(it: socket.socket) -> bool:
    """Whether the server ended it; what it said is thrown away."""
    it.setblocking(False)
    try:
        while it.recv(1 << 16):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /li", b"GET /metrics HTTP/1.1\r\nhost: x\r\n"])
def test_half_open_connections_take_few_threads_and_keep_no_probe_out(url: str, sent: bytes) -> None:
    """Four hundred that say nothing, or half of something: each newcomer ends the oldest one of them."""
    with ExitStack() as crowd:
        for _ in range(400):
            crowd.enter_context(connected(url, sent, source="127.0.0.2"))
        early = connected(url)  # of another address than the crowd
        crowd.callback(early.close)
        for _ in range(40):
            crowd.enter_context(connected(url, sent, source="127.0.0.2"))
        assert states(url) == [200, 503]
        assert not is_ended(early)
        eventually(lambda: answering() <= http_health.HealthServerConfig().max_connections)


def test_request_that_does_not_come_is_not_waited_for(bounded: str) -> None:
    """Neither one that says nothing nor one that says a little every now and then."""
    with connected(bounded) as silent, connected(bounded, b"GET /livez") as slow:
        eventually(lambda: is_ended(silent))
        eventually(lambda: is_ended(slow))


def test_client_that_reads_nothing_is_cut(bounded: str, health: metrics.PipelineHealth) -> None:
    """Its answer, which is longer than what the system keeps for it, holds a thread for a while and no longer."""
    gauge = Gauge("long", "An answer of some MiB.", ["of"], registry=health.registry)
    for number in range(1000):
        gauge.labels(f"{number:010000}").set(1)
    try:
        with ExitStack() as crowd:
            for _ in range(QUICK.max_connections):
                crowd.enter_context(connected(bounded, b"GET /metrics HTTP/1.1\r\n\r\n"))
            assert asked(f"{bounded}/livez") == (200, "ok")
            eventually(lambda: not answering())
    finally:
        health.registry.unregister(gauge)


def test_head_without_end_fills_no_memory(url: str) -> None:
    """What comes behind the bound is not read."""
    before = psutil.Process().memory_info().rss
    with connected(url, b"GET /livez HTTP/1.1\r\n") as it:
        with suppress(OSError):
            for _ in range(500):
                it.sendall(b"a: " + b"b" * 65_000 + b"\r\n")
        eventually(lambda: is_ended(it))
    assert psutil.Process().memory_info().rss - before < 10_000_000


@pytest.mark.parametrize(
    ("host", "is_checked"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("example.org", False),
    ],
)
def test_host_names_are_checked_if_only_this_machine_reaches_the_server(host: str, *, is_checked: bool) -> None:
    allowed = local_host_names(host)
    assert bool(allowed) is is_checked
    assert not is_checked or {host, "localhost", "127.0.0.1", "::1"} <= {*allowed}


def test_metrics_on_this_machine_are_not_for_other_sites(url: str) -> None:
    """A page whose name leads to 127.0.0.1 reads none of them; probes are asked by any name."""
    port = url.rpartition(":")[2]
    for host, path, status in (
        (f"localhost:{port}", "/metrics", b"200"),
        (f"[::1]:{port}", "/metrics", b"200"),
        ("elsewhere.example", "/metrics", b"421"),
        ("elsewhere.example", "/livez", b"200"),
    ):
        with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as it:
            it.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            assert it.makefile("rb").readline().split()[1] == status, (host, path)
