"""`tidemark sidecar` as a process of its own, started as the local stack starts it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import httpx
import pytest

from tests.app.lines import given as lines
from tests.app.sidecar.given import At, moved
from tests.fix_servers import deaf
from tests.fix_tls import Authority
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.connections import parse_host_port
from tidemark.app.serving.tls_listener import client_tls_context
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import LOOPBACK, RedisServer, SidecarProcess, free_port
from tidemark.common.environment import child_environment


@pytest.fixture
def variables(redis_url: str, dsn: str, tmp_path: Path) -> Mapping[str, str]:
    return {
        "TIDEMARK_HOME": str(tmp_path),
        "TIDEMARK_REDIS_URL": redis_url,
        "TIDEMARK_POSTGRES_DSN": dsn,
        "TIDEMARK_SIDECAR_PORT": str(free_port()),
        "TIDEMARK_LINES_LISTEN": f"127.0.0.1:{free_port()}",
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
        with lines.client(parse_host_port(variables["TIDEMARK_LINES_LISTEN"]), "REPLICATE") as one:
            assert one.said() == "POSITION s w 7 7"
    finally:
        server.stop()
    assert server.returncode == 0, server.log_tail()


def test_clients_are_told_when_it_stops(pipeline: Pipeline, variables: Mapping[str, str], tmp_path: Path) -> None:
    """Event streams end as whole answers do, a wait is answered, and line clients hear why; nobody new is taken."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    server = SidecarProcess(Home(tmp_path), int(variables["TIDEMARK_SIDECAR_PORT"]), variables)
    server.start()
    address = parse_host_port(variables["TIDEMARK_LINES_LISTEN"])
    try:
        with (
            httpx.Client(base_url=server.url, timeout=60) as client,
            ThreadPoolExecutor(1) as other,
            client.stream("GET", "/v1/events") as events,
            client.stream("GET", "/v1/watch") as watch,
            lines.client(address, "REPLICATE") as one,
        ):
            told, seen = events.iter_text(), watch.iter_text()
            assert "snapshot" in next(it for it in told if "event" in it)
            assert next(seen)
            assert one.said() == "POSITION s w 7 7"
            waiting = other.submit(client.get, "/v1/streams/s/wait?token=m8")
            eventually(lambda: 'in_flight{operation="wait"} 1.0' in client.get("/metrics").text)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGTERM)
            assert "".join(told).endswith(": this sidecar is stopping\n\n")
            assert "".join(seen).endswith(": this sidecar is stopping\n\n")
            assert waiting.result().status_code == 503
            assert waiting.result().json()["type"] == "urn:tidemark:problem:stopping"
            assert (one.said(), one.line()) == ("ERROR server stopping", None)
            with pytest.raises(httpx.ConnectError):
                client.get("/livez")
        while pid := server.pid:  # whoever says it again and again makes it end no other way
            os.kill(pid, signal.SIGTERM)
    finally:
        server.stop()
    assert server.returncode == 0, server.log_tail()
    assert "without waiting" not in server.log_tail()


def test_it_ends_whatever_hangs(
    pipeline: Pipeline,
    variables: Mapping[str, str],
    tmp_path: Path,
    postgres: PostgresServer,
    redis_server: RedisServer,
) -> None:
    """Requests are held by servers that take connections and never answer: SIGTERM is obeyed, with 0, all the same."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    spoken = {**variables, "TIDEMARK_LINES_REDIS_CHANNEL": "example.org"}
    server = SidecarProcess(Home(tmp_path), int(variables["TIDEMARK_SIDECAR_PORT"]), spoken)
    server.start()
    try:
        with (
            httpx.Client(base_url=server.url, timeout=60) as client,
            client.stream("GET", "/v1/events") as events,
            lines.client(parse_host_port(variables["TIDEMARK_LINES_LISTEN"]), "REPLICATE") as one,
        ):
            assert next(events.iter_text())
            assert one.said() == "POSITION s w 7 7"
            with deaf(postgres), deaf(redis_server):
                assert client.get("/readyz").json()["problems"]
                server.stop(seconds=30)
                assert server.returncode == 0, server.log_tail()
    finally:
        server.stop()


class EncryptedSidecar(SidecarProcess):
    authority: Authority

    @property
    def url(self) -> str:
        return f"https://{LOOPBACK}:{self.port}"

    def answers(self) -> bool:
        try:
            return self.told("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def told(self, path: str) -> httpx.Response:
        """On a connection of its own."""
        return httpx.get(self.url + path, verify=client_tls_context(self.authority.ca_file))

    def serial(self, address: tuple[str, int]) -> str:
        """Of the certificate that is shown there."""
        with (
            socket.create_connection(address, timeout=60) as raw,
            client_tls_context(self.authority.ca_file).wrap_socket(raw, server_hostname=LOOPBACK) as encrypted,
        ):
            return str((encrypted.getpeercert() or {})["serialNumber"])


def test_it_serves_with_tls_and_takes_up_another_certificate(
    pipeline: Pipeline, variables: Mapping[str, str], tmp_path: Path, authority: Authority
) -> None:
    """HTTP and lines, by certificates that rotate while clients are connected; its end is in order all the same."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    pem = authority.issue(LOOPBACK)
    certificate, key = (Path(shutil.copy(path, tmp_path)) for path in (pem.certificate, pem.key))
    files = {"TIDEMARK_SIDECAR_CERTIFICATE_FILE": str(certificate), "TIDEMARK_SIDECAR_KEY_FILE": str(key)}
    server = EncryptedSidecar(Home(tmp_path), int(variables["TIDEMARK_SIDECAR_PORT"]), {**variables, **files})
    server.authority = authority
    server.start()
    both = [(LOOPBACK, server.port), parse_host_port(variables["TIDEMARK_LINES_LISTEN"])]
    try:
        assert server.told("/v1/streams/s").json()["token"] == "m7"
        with (
            httpx.Client(base_url=server.url, timeout=60, verify=client_tls_context(authority.ca_file)) as client,
            client.stream("GET", "/v1/events") as events,
        ):
            told = events.iter_text()
            assert "snapshot" in next(it for it in told if "event" in it)
            before = server.serial(both[0])
            renewed = authority.issue(LOOPBACK)
            shutil.copy(renewed.certificate, certificate)
            shutil.copy(renewed.key, key)
            for address in both:
                eventually(lambda address=address: server.serial(address) != before)  # type: ignore[misc]
            pipeline.publish(moved("s", 8, w=At(7, 8)))
            assert "advance" in next(it for it in told if "event" in it)
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(server.url.replace("https", "http") + "/livez")
            with socket.create_connection(both[0]):  # a handshake that never comes does not hold up the end
                server.stop()
                assert "".join(told).endswith(": this sidecar is stopping\n\n")
    finally:
        server.stop()
    assert server.returncode == 0, server.log_tail()
    assert "without waiting" not in server.log_tail()


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        (
            "TIDEMARK_SIDECAR_TOKENS_FILE",
            "/nowhere/tokens",
            b"TIDEMARK_SIDECAR_TOKENS_FILE: cannot read /nowhere/tokens",
        ),
        ("TIDEMARK_LINES_LISTEN", "192.0.2.1:1", b"TIDEMARK_LINES_LISTEN: cannot listen on 192.0.2.1:1"),
        ("TIDEMARK_SIDECAR_HOST", "192.0.2.1", b"TIDEMARK_SIDECAR_PORT: cannot listen on 192.0.2.1"),
        ("TIDEMARK_SIDECAR_CERTIFICATE_FILE", "/nowhere/crt", b"TIDEMARK_SIDECAR_KEY_FILE is not set"),
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
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if b"[info " not in line]
    assert said in line
