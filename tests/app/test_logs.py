"""What may be seen on stderr besides lines of ours: nothing."""

import json
import os
import pty
import socket
import struct
import subprocess
import sys
from threading import Thread

import pytest

from tidemark.common.environment import child_environment

_ASK = """
import sys
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError
from tidemark.app import logs
from tidemark.app.settings import load

logs.configure(load())
try:
    JavaGateway(gateway_parameters=GatewayParameters(port=int(sys.argv[1]))).jvm.System.currentTimeMillis()
except Py4JError:
    print("told")
"""


def test_connection_that_the_jvm_resets_is_told_by_an_exception_alone() -> None:
    """py4j logs a lost connection with its stack trace, and also raises: only the exception counts."""
    with socket.create_server(("127.0.0.1", 0)) as jvm:

        def reset() -> None:
            while True:
                try:
                    connection, _ = jvm.accept()
                except OSError:
                    return  # the test has ended
                connection.recv(1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        Thread(target=reset, daemon=True).start()
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, str(jvm.getsockname()[1])],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        jvm.shutdown(socket.SHUT_RDWR)
    assert (asked.stdout, asked.stderr) == ("told\n", "")


_SPEAK = """
import logging, threading, warnings
from tidemark.app import logs
from tidemark.app.settings import load

import structlog
logs.configure(load())
structlog.get_logger().warning("Read", stream="a\x1b[2Jb")
logging.getLogger("some.package").warning("two\\nlines of %s", "it")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("three\\nlines")
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_an_event_is_a_line(form: str) -> None:
    """For programs also what a library logs, warns of, and what ends a thread or the process; and no terminal obeys
    what anybody else wrote."""
    said = subprocess.run(
        [sys.executable, "-c", _SPEAK],
        env=child_environment({"TIDEMARK_LOG_FORMAT": form}),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = said.stderr.splitlines()
    assert said.returncode == 1
    assert "\x1b" not in said.stderr
    if form == "console":
        assert "two lines of it" in lines[1]
        return
    told = [json.loads(line) for line in lines]
    assert [it["level"] for it in told] == ["warning", "warning", "warning", "critical", "critical"]
    assert [it["event"] for it in told[:2]] == ["Read", "two lines of it"]
    assert [it["exception"][0]["exc_type"] for it in told[3:]] == ["ZeroDivisionError", "ValueError"]


def test_a_terminal_of_who_wants_no_colours_gets_none() -> None:
    """NO_COLOR says so."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _SPEAK.partition("logging.get")[0]]
    subprocess.run(command, env=child_environment({"NO_COLOR": "1"}), stderr=theirs, timeout=60, check=True)
    os.close(theirs)
    said = os.read(ours, 65536)
    os.close(ours)
    assert b"Read" in said
    assert b"\x1b" not in said
