"""`tidemark sidecar` as a process of its own, started as the local stack starts it."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.app.lines import given as lines
from tests.app.sidecar.given import At, moved
from tests.sinks.reader.given import Pipeline
from tidemark.app.connections import host_port
from tidemark.app.settings import child_environment
from tidemark.app.stack.home import Home
from tidemark.app.stack.server import free_port
from tidemark.app.stack.servers import SidecarProcess


@pytest.fixture
def variables(redis_url: str, dsn: str, tmp_path: Path) -> Mapping[str, str]:
    return {
        "TIDEMARK_HOME": str(tmp_path),
        "TIDEMARK_REDIS_URL": redis_url,
        "TIDEMARK_POSTGRES_DSN": dsn,
        "TIDEMARK_SIDECAR_PORT": str(free_port()),
        "TIDEMARK_SIDECAR_TCP": f"127.0.0.1:{free_port()}",
    }


def test_process_serves_until_it_is_told_to_end(
    pipeline: Pipeline, variables: Mapping[str, str], tmp_path: Path
) -> None:
    """It is ready, answers, over HTTP and in lines, and ends with 0 at SIGTERM."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    server = SidecarProcess(Home(tmp_path), int(variables["TIDEMARK_SIDECAR_PORT"]), variables)
    server.start()
    try:
        with urlopen(f"{server.url}/v1/streams/s") as answer:
            assert b'"token":"m7"' in answer.read()
        with lines.client(host_port(variables["TIDEMARK_SIDECAR_TCP"]), "REPLICATE") as one:
            assert one.said() == "POSITION s w 7 7"
    finally:
        server.stop()
    assert server.returncode == 0, server.log_tail()


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("TIDEMARK_SIDECAR_TOKENS", "/nowhere/tokens", b"TIDEMARK_SIDECAR_TOKENS: cannot read /nowhere/tokens"),
        ("TIDEMARK_SIDECAR_TCP", "192.0.2.1:1", b"TIDEMARK_SIDECAR_TCP: cannot listen on 192.0.2.1:1"),
        ("TIDEMARK_SIDECAR_HOST", "192.0.2.1", b"TIDEMARK_SIDECAR_PORT: cannot listen on 192.0.2.1"),
    ],
)
def test_what_a_person_must_decide_is_one_line(
    variables: Mapping[str, str], changed: str, value: str, said: bytes
) -> None:
    """A wrong setting ends it at once with exit code 2 and one line that names it."""
    environment = child_environment({**variables, changed: value})
    done = subprocess.run(
        [sys.executable, "-m", "tidemark.app.cli", "sidecar"],
        env=environment,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count(b"\n") == 1
