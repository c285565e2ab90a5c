"""`tidemark up` as a person runs it: a process of its own, signals, and whatever it prints."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from tests.app.lines import given as lines
from tests.fix_stack import READY_SECONDS, Terminal
from tests.waiting import eventually
from tidemark.app.connections import parse_host_port
from tidemark.app.settings import read_stack_env
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import postgres_program
from tidemark.app.stack.processes import redis_program

pytestmark = pytest.mark.slow

VISIBLE_SECONDS = 60.0
LINEAR = "tidemark:{orders}:linear"
FACT = b'{"kind":"RDATA","stream":"orders","writer":"shop","id":1,"row":{}}\n'


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _sourced(terminal: Terminal) -> dict[str, str]:
    """The environment of a shell that has sourced `stack.env`."""
    return {**terminal.environment, **{name: str(text) for name, text in terminal.stack_env.items()}}


def _require_no_warning_about_the_stack(terminal: Terminal) -> None:
    """`tidemark doctor` does not warn about the stack's own ports and variables."""
    command = [sys.executable, "-P", "-m", "tidemark", "doctor"]
    done = subprocess.run(command, env=_sourced(terminal), cwd=terminal.folder, capture_output=True, check=False)
    assert b"in use by the running local stack" in done.stdout
    assert b"PGPASSWORD" not in done.stdout


def _append(terminal: Terminal) -> None:
    words = ["-c", "select tidemark.create_stream('sales')", "-c", "select tidemark.append('sales', '{}')"]
    subprocess.run([postgres_program("psql"), *words], env=_sourced(terminal), check=True, capture_output=True)


def test_stack_ends_cleanly_or_is_killed_and_the_next_start_finds_its_data(terminal: Terminal) -> None:
    """One Ctrl-C ends every process with exit code 0; the next stack goes on where the first one ended. What psql
    appends in the database that the stack's own settings name is relayed. No password stands in the arguments of a
    process, which everybody on the machine may read. A killed server is started again; after `up` itself was killed,
    the next one ends what it left behind. The demo's services write, also the one in Java."""
    with terminal.up() as process:
        names = {path.stem for path in (terminal.home.root / "run").iterdir()}
        assert names == {"up", "kafka", "postgres", "redis", "pipeline", "relay", "sidecar"}
        pids = [int(terminal.home.pid_file(name).read_text()) for name in names - {"up"}]
        arguments = []
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since
                arguments.append(" ".join(child.cmdline()))
        assert len(arguments) >= len(pids)
        assert not [words for words in arguments if str(terminal.stack_env["PGPASSWORD"]) in words]
        assert b"1 record sent" in terminal.run("produce", stdin=FACT).stdout
        _require_no_warning_about_the_stack(terminal)
        with terminal.redis() as client:
            _append(terminal)
            eventually(lambda: client.get("tidemark:{sales}:token") == "m1", VISIBLE_SECONDS)
            eventually(lambda: client.get(LINEAR) == "1", VISIBLE_SECONDS)
        assert b"orders" in terminal.run("status").stdout
        with urlopen(f"{terminal.stack_env['TIDEMARK_SIDECAR_URL']}/v1/streams/orders") as answer:
            assert b'"token":"m1"' in answer.read()
        with lines.client(parse_host_port(str(terminal.stack_env["TIDEMARK_LINES_LISTEN"])), "REPLICATE") as one:
            told = {one.said(), one.said()}
            assert told == {"POSITION orders shop 1 1", "POSITION sales tidemark 1 1"}
        second = terminal.run("up")
        assert second.returncode == 2
        assert f"already running in {terminal.home.root} (pid {process.pid})".encode() in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert all(map(_is_gone, pids))
    assert not terminal.home.stack_env.exists()

    with terminal.up("--demo") as process:
        assert b"no streams yet" not in terminal.run("status").stdout
        with terminal.redis() as client:
            assert client.get(LINEAR) == "1"
            terminal.run("produce", stdin=FACT.replace(b'"id":1', b'"id":2'))
            eventually(lambda: client.get(LINEAR) == "2", VISIBLE_SECONDS)
            # The first position of the chat server: from here on, its database has streams that need a relay.
            eventually(lambda: [*client.scan_iter("tidemark:{chat_*}:linear")], READY_SECONDS)
            eventually(lambda: int(client.get("tidemark:{payments}:linear") or 0) > 1, VISIBLE_SECONDS)
            eventually(lambda: b"session named slow-payment" in terminal.run("status").stdout, VISIBLE_SECONDS)
        os.kill(int(terminal.home.pid_file("redis").read_text()), signal.SIGKILL)
        eventually(lambda: terminal.said("redis is back"), READY_SECONDS)
        process.kill()
        process.wait()
    kafka = int(terminal.home.pid_file("kafka").read_text())
    assert not _is_gone(kafka)
    with terminal.up():
        assert terminal.said(f"ended kafka (pid {kafka}), which an earlier stack left running")
        assert terminal.said("ended simulate")
        assert terminal.said("ended payments")
        assert terminal.said("streams of an earlier `tidemark up --demo`")
        # Without a relay, the IDs of the killed chat server would stay open.
        eventually(lambda: terminal.run("gaps").stdout == b"no gaps: nothing is blocked\n", VISIBLE_SECONDS)


def test_taken_port_is_told_in_one_line(terminal: Terminal) -> None:
    """Before anything is started, the port that another program has is named, and the setting that avoids it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = terminal.run("up", TIDEMARK_UP_POSTGRES_PORT=port)
    assert done.returncode == 2
    assert done.stderr.endswith(b"`tidemark doctor` checks this machine\n")
    assert done.stderr.count(b"\n") == 1
    assert f"port {port} for postgres is not free".encode() in done.stderr
    assert b"TIDEMARK_UP_POSTGRES_PORT" in done.stderr
    assert done.stdout == b""


def test_missing_java_is_told_in_one_line(terminal: Terminal) -> None:
    """Without a Java nothing is started, and one line says what to install."""
    done = terminal.run("up", JAVA_HOME=str(terminal.home.root))
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"Tidemark needs Java 17 or newer" in done.stderr


def test_home_that_cannot_be_written_is_told_in_one_line(terminal: Terminal) -> None:
    """A home below a file is refused with its path and the reason."""
    terminal.output.touch()
    done = terminal.run("up", TIDEMARK_HOME=str(terminal.output / "below"))
    assert done.returncode == 2
    assert b"TIDEMARK_HOME: cannot write in" in done.stderr


def test_stack_env_can_be_sourced(terminal: Terminal) -> None:
    """What a shell takes from `stack.env` is what was written, whatever the home is called and whatever the shell had
    for other servers."""
    from tidemark.app.settings import load
    from tidemark.app.stack.up import LocalStack

    home = Home(terminal.home.root / "a home; $(with) 'quotes'")
    members = LocalStack(home, load(), "java")
    home.root.mkdir(exist_ok=True)
    path = members.write_stack_env()
    program = (
        """. "$0"; printf '%s|' "$TIDEMARK_HOME" "$PGHOST" "${PGSSLMODE-unset}" "${PGSERVICE-unset}" "$no_proxy\""""
    )
    misleading = {"PGSSLMODE": "require", "PGSERVICE": "prod", "PGHOST": "prod", "no_proxy": "intra"}
    shell = subprocess.run(["sh", "-c", program, str(path)], env=misleading, capture_output=True, text=True, check=True)
    assert shell.stdout == f"{home.root}|127.0.0.1|unset|unset|intra,127.0.0.1,localhost|"
    assert read_stack_env(path) == {**members.variables(), **members.postgres.libpq_environment}
    assert path.stat().st_mode & 0o077 == 0
    programs = [sys.executable, postgres_program("psql"), redis_program("redis-cli")]
    folders = [str(Path(program).parent) for program in programs]
    sourced = '. "$0"; . "$0"; echo "$PATH"'
    shell = subprocess.run(
        ["sh", "-c", sourced, str(path)], env={"PATH": "/bin"}, capture_output=True, text=True, check=True
    )
    assert shell.stdout.rstrip("\n").split(":") == ["/bin", *folders]
