"""`network.listen: "::"`: the listeners of the pods in a cluster without IPv4, and in one with both families."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from tests.helm.ipv6_pipeline import ADDRESS, NAME
from tests.helm.tools import ROOT
from tidemark.app.serving import http_health
from tidemark.app.serving.serve import open_listening_socket
from tidemark.app.settings import load
from tidemark.app.sidecar.admission import AdmissionConfig, create_protocol_factory

ONLY_IPV6 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec"
NO_IPV4_OUTSIDE = f"""
set -e
hostname {NAME}
ip link set lo up
ip -6 addr add {ADDRESS}/64 dev lo nodad
printf '127.0.0.1 localhost\\n::1 localhost\\n{ADDRESS} {NAME}\\n' >"$1/hosts"
mount --bind "$1/hosts" /etc/hosts
exec "$2" -P -m tests.helm.ipv6_pipeline "$1" "$3"
"""
"""A shell script for root: Postgres runs as another user, which a user namespace has not."""
PROGRAM = """
import socket
from tests.helm.test_ipv6 import listens
listens("::1")
try:
    socket.create_connection(("127.0.0.1", 9), timeout=5)
except ConnectionRefusedError:
    raise SystemExit("there is IPv4")
except OSError:
    print("served without IPv4")
"""


class Healthy:
    registry = CollectorRegistry()

    def liveness_problem(self, now: float) -> str | None:
        return None

    def readiness_problem(self) -> str | None:
        return None


def listens(address: str) -> None:
    """The sidecar's socket accepts, and a probe gets its answer, at `address`."""
    with closing(open_listening_socket("TIDEMARK_SIDECAR_PORT", "::", 0)) as listening:
        socket.create_connection((address, listening.getsockname()[1]), timeout=5).close()
        listening.settimeout(5)
        listening.accept()[0].close()
    host = f"[{address}]" if ":" in address else address
    with (
        http_health.serve_health("TIDEMARK_METRICS_PORT", ("::", 0), Healthy()) as port,
        urlopen(f"http://{host}:{port}/livez", timeout=5) as response,
    ):
        assert response.status == 200


def _in_namespace(command: str) -> "subprocess.CompletedProcess[str]":
    words = ["unshare", "--map-root-user", "--net", "sh", "-c", command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def test_pods_are_reached_without_ipv4() -> None:
    """In a network namespace whose only address is ::1."""
    if _in_namespace(f"{ONLY_IPV6} true").returncode:
        pytest.skip("this machine has no network namespaces or no IPv6")
    done = _in_namespace(f"{ONLY_IPV6} {sys.executable} -c '{PROGRAM}'")
    assert (done.returncode, done.stdout) == (0, "served without IPv4\n"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces in which Postgres runs as another user")
@pytest.mark.parametrize("tasks", ["local", "executors"])
def test_positions_move_without_ipv4(tmp_path: Path, tasks: str) -> None:
    """Kafka, Postgres, Redis, Spark's driver and its executors are reached at one IPv6 address."""
    tmp_path.chmod(0o755)
    # What is left running ends with the first process of the namespace.
    command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["sh", "-c", NO_IPV4_OUTSIDE, "sh", str(tmp_path), sys.executable, tasks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("positions moved without IPv4\n")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_pods_are_reached_over_both_families(address: str) -> None:
    """The address :: includes IPv4 on a dual-stack host."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    listens(address)


def test_a_trusted_proxy_is_known_by_its_ipv4_address() -> None:
    """A dual-stack socket calls it ::ffff:127.0.0.1."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")

    async def client_of(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["client"][0].encode()})

    bounds = AdmissionConfig(trusted_proxies=["127.0.0.0/8"])
    factory = create_protocol_factory(bounds)
    server = uvicorn.Server(uvicorn.Config(client_of, lifespan="off", log_config=None, http=factory))
    with closing(open_listening_socket("TIDEMARK_SIDECAR_PORT", "::", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        request = Request(url, headers={"X-Forwarded-For": "192.0.2.1"})
        try:
            with urlopen(request, timeout=30) as response:
                assert response.read() == b"192.0.2.1"
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize(("host", "shown"), [("::", "[::1]"), ("0.0.0.0", "0.0.0.0")])
def test_the_address_of_the_metrics_is_a_url(host: str, shown: str) -> None:
    """`tidemark bundle` reads the pipeline's metrics there."""
    assert load(metrics_host=host, metrics_port=9464).metrics_url == f"http://{shown}:9464/metrics"
