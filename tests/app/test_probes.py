"""Scrapes and probes of the pipeline's process, over a real socket."""

from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tidemark.app import metrics, probes
from tidemark.app.settings import Settings
from tidemark.streaming.errors import BadSetting

NOW = 1_000_000.0


@pytest.fixture
def url() -> Iterator[str]:
    with probes.served(Settings(metrics_port=0), now=lambda: NOW) as port:
        yield f"http://127.0.0.1:{port}"
    metrics.READY.set(0)
    metrics.HEARTBEAT.set(0)


def status(url: str) -> int:
    try:
        with urlopen(url, timeout=5) as response:
            return int(response.status)
    except HTTPError as error:
        error.close()
        return error.code


def test_one_that_waits_is_alive_and_not_ready(url: str) -> None:
    """Before its query runs a pipeline waits for servers or the lease: to be left alone, and not to be relied on."""
    assert [status(f"{url}/livez"), status(f"{url}/readyz")] == [200, 503]


def test_one_whose_query_runs_is_ready(url: str) -> None:
    """The loop went round a moment ago and says that the query runs."""
    metrics.READY.set(1)
    metrics.HEARTBEAT.set(NOW - 1)
    assert [status(f"{url}/livez"), status(f"{url}/readyz")] == [200, 200]


def test_one_whose_loop_stands_still_is_not_alive(url: str) -> None:
    """A heartbeat that is older than 15 s while the query is said to run: the process hangs."""
    metrics.READY.set(1)
    metrics.HEARTBEAT.set(NOW - probes.STALE_SECONDS)
    assert status(f"{url}/livez") == 503


def test_every_other_path_is_the_scrape(url: str) -> None:
    """Prometheus finds the metrics at /metrics."""
    with urlopen(f"{url}/metrics", timeout=5) as response:
        assert b"\ntidemark_pipeline_ready 0.0" in response.read()


def test_a_port_in_use_stops_the_start(url: str) -> None:
    """A person must choose another port: one line says which one was wanted."""
    port = int(url.rpartition(":")[2])
    with pytest.raises(BadSetting, match=f"TIDEMARK_METRICS_PORT.*{port}"), probes.served(Settings(metrics_port=port)):
        pass
