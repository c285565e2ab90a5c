"""`tidemark listen` as a person runs it, and nc's way: a socket and nothing else."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from tests.app.lines.given import NO_POSITION, Address, LineClient, served
from tests.fix_tls import Authority
from tests.sinks.reader.given import Pipeline
from tidemark.app.lines import client
from tidemark.app.lines.server import LineServerConfig
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.serving.tls_listener import Certificate, ListenerConfig
from tidemark.app.stack.processes import LOOPBACK
from tidemark.common.environment import child_environment
from tidemark.streaming.wire.line_protocol import (
    Command,
    ErrorCommand,
    PositionCommand,
    RdataCommand,
    RelayedCommand,
    ReplicateCommand,
    ServerCommand,
)


@contextmanager
def listening(address: Address, *words: str, ca_file: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """`tidemark listen` by its installed script.

    `python -m` may end by the signal although Ctrl-C was handled: CPython does so if the KeyboardInterrupt was raised
    inside `exec`, which every import of a dataclass calls.
    """
    script = Path(sysconfig.get_path("scripts"), "tidemark")
    process = subprocess.Popen(
        [script, "listen", f"{address[0]}:{address[1]}", *words],
        env=child_environment({} if ca_file is None else {"TIDEMARK_SIDECAR_CA_FILE": str(ca_file)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().rstrip("\n")


def test_it_shows_what_comes_and_comes_back(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Positions as they move, as plain lines in a pipe; after the sidecar was restarted it goes on; Ctrl-C ends it."""
    pipeline.move("w", 0, 2)
    with served(servers) as address, listening(address) as process:
        assert [line(process), line(process)] == ["SERVER tidemark", "POSITION s w 2 2"]
        pipeline.move("w", 2, 3, empty=1)
        assert line(process) == "POSITION s w 2 3"
        # The same port again, after the first server is gone.
        first = address
    with listening(first) as waiting:
        with served(servers, port=first[1]):
            assert [line(waiting), line(waiting)] == ["SERVER tidemark", "POSITION s w 3 3"]
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130


def test_only_what_was_asked_for_as_json(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """With --stream only that one's lines, with --json one object each."""
    pipeline.move("w", 0, 2)
    with served(servers) as address:
        with listening(address, "--json", "--stream", "s") as process:
            assert json.loads(line(process)) == {"command": "SERVER", "text": "tidemark"}
            assert json.loads(line(process)) == {
                "command": "POSITION",
                "stream": "s",
                "writer": "w",
                "prev": 2,
                "id": 2,
            }
        with listening(address, "--stream", "other") as process:
            assert line(process) == "SERVER tidemark"
            sender = LineClient(address)
            sender.send("USER_IP x")
            assert line(process) == "USER_IP x"
            sender.close()


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_a_terminal_gets_colours_where_they_are_wanted(no_colour: str) -> None:
    """Of whoever has NO_COLOR in the environment they are not."""
    ours, theirs = pty.openpty()
    with served(NO_POSITION) as address, os.fdopen(ours, "rb") as shown:
        command = [sys.executable, "-m", "tidemark.app.cli", "listen", f"{address[0]}:{address[1]}"]
        process = subprocess.Popen(command, env=child_environment({"NO_COLOR": no_colour}), stdout=theirs)
        os.close(theirs)
        first = shown.readline()
        process.kill()
        process.wait()
    assert b"SERVER tidemark" in first
    assert (b"\x1b" in first) == (no_colour == "")


def test_another_server_is_told_in_one_line() -> None:
    """A client that expected another name leaves, with exit code 2."""
    with served(NO_POSITION, LineServerConfig(name="one")) as address, listening(address, "--server", "two") as process:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 2
        assert error.count("\n") == 1
        assert "has the name one, not two" in error


def test_it_listens_with_tls(
    pipeline: Pipeline, servers: ReadSideConfig, authority: Authority, stranger: Authority
) -> None:
    """By the authority in a file; a server that it did not sign is refused in one line, with exit code 2."""
    pipeline.move("w", 0, 2)
    pem = authority.issue(LOOPBACK)
    with served(servers, acceptor=ListenerConfig(Certificate(pem.certificate, pem.key))) as address:
        with listening(address, ca_file=authority.ca_file) as process:
            assert [line(process), line(process)] == ["SERVER tidemark", "POSITION s w 2 2"]
        with listening(address, ca_file=stranger.ca_file) as process:
            _, error = process.communicate(timeout=60)
            assert (process.returncode, error.count("\n")) == (2, 1), error
            assert "is not valid" in error
            assert "TIDEMARK_SIDECAR_CA_FILE" in error


def test_client_keeps_its_side_alive_and_leaves_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends PINGs; when nothing comes back it closes the connection and makes a new one, and asks again."""
    monkeypatch.setattr(client, "PING_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(client, "SERVER_TIMEOUT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        silent.settimeout(60)
        commands = client.LinesClient(silent.getsockname()).commands()
        first = pool.submit(next, commands)
        for _ in range(2):
            connection, _ = silent.accept()
            with connection, connection.makefile("rb") as lines:
                words = [line.split(b" ")[0].strip() for line in lines]
                assert words[:3] == [b"NAME", b"PING", b"REPLICATE"]
                assert words.count(b"PING") > 1
        connection, _ = silent.accept()
        with connection:
            connection.sendall(b"SERVER back\n")
            assert first.result(60) == ServerCommand("back")
        commands.close()


def test_server_that_ends_every_connection_is_pressed_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that comes before the end is no success: the pauses grow as if there were none."""
    pauses: list[float] = []
    # In its module alone: who else sleeps in this process is no part of this.
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=pauses.append)
    monkeypatch.setattr(client, "time", clock)
    with served(NO_POSITION, LineServerConfig(max_connections=0)) as address:
        commands = client.LinesClient(address).commands()
        while len(pauses) < 6:
            assert isinstance(next(commands), ErrorCommand)
        commands.close()
    assert pauses[-1] > 3 * pauses[0]


def test_wrong_address_is_told() -> None:
    """What is no host and port is refused before anything is tried."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemark.app.cli", "listen", "nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "'nowhere' is not an address such as 127.0.0.1:9481" in done.stderr


def test_colours_change_no_letter() -> None:
    """On a terminal the same line is shown, with what makes clients fetch in another colour than what does not."""
    shown: list[Command] = [
        PositionCommand("s", "w", 1, 2),
        PositionCommand("s", "w", 2, 2),
        RdataCommand("s", "w", None, '{"a": 1}'),
        RdataCommand("s", "w", 3, "1"),
        ServerCommand("x"),
        ErrorCommand("y"),
        RelayedCommand("USER_IP z"),
        ReplicateCommand(),
    ]
    for command in shown:
        assert click.unstyle(client.to_colored_text(command)) == str(command)
        assert json.loads(client.to_json(command))["command"] == str(command).split(" ")[0]
    assert client.to_colored_text(shown[0]).split("1 2")[0] != client.to_colored_text(shown[1]).split("2 2")[0]
