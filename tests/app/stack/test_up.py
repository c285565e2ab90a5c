import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from tidemark.app.settings import load
from tidemark.app.stack import processes
from tidemark.app.stack.home import AlreadyRunning, Home
from tidemark.app.stack.processes import ServerProcess, StartFailed, free_port, listens
from tidemark.app.stack.up import LocalStack, Supervisor


class ListeningServer(ServerProcess):
    """A small real server: listens at its port until it is ended. `script` may be another Python program."""

    name: ClassVar[str] = "listener"
    script = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-c", self.script, str(self.port)]

    def answers(self) -> bool:
        return listens(self.port)


@pytest.fixture
def own_home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_home_has_one_owner(own_home: Home) -> None:
    """A second stack is refused in one line that names the first; a home whose owner ended is free again."""
    with own_home.lock():
        with pytest.raises(AlreadyRunning) as caught, own_home.lock():
            pass
        assert caught.value.pid == str(os.getpid())
        assert "\n" not in str(caught.value)
    with own_home.lock():
        pass


def test_process_that_ends_at_once_is_told_with_its_last_words(own_home: Home) -> None:
    """A start that fails says how the process ended and what it logged last."""
    server = ListeningServer(own_home, free_port())
    server.script = "raise SystemExit('no such disk')"
    with pytest.raises(
        StartFailed,
        match=r"listener did not start: it ended with code 1: no such disk; its log: /.*/log/listener\.log$",
    ):
        server.start()


def test_pid_file_stands_while_the_process_does(own_home: Home) -> None:
    """`run/<name>.pid` names the process, and is gone when that was stopped."""
    server = ListeningServer(own_home, free_port())
    server.start()
    assert int(own_home.pid_file("listener").read_text()) == server.pid
    server.stop()
    assert not own_home.pid_file("listener").exists()
    assert not listens(server.port)


def test_leftover_of_a_dead_owner_is_ended(own_home: Home) -> None:
    """A process that an earlier owner left behind is found by its pid file and ended."""
    port = free_port()
    left = ListeningServer(own_home, port)
    left.start()
    assert ListeningServer(own_home, port).end_leftover() == left.pid or not left.running
    assert not left.running
    assert not listens(port)


def test_stranger_with_a_leftovers_number_is_let_live(own_home: Home) -> None:
    """A process that began after the pid file was written only got the same number by chance."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        path = own_home.pid_file("listener")
        path.write_text(f"{stranger.pid}\n")
        os.utime(path, (0, 0))
        assert ListeningServer(own_home, free_port()).end_leftover() is None
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_dead_process_is_started_again_with_growing_pauses(own_home: Home) -> None:
    """One that dies is started again after 1 s, then 2 s; what happened, and that it is back, is said."""
    server = ListeningServer(own_home, free_port())
    server.start()
    said: list[str] = []
    now = 0.0
    supervisor = Supervisor([server], said.append, now=lambda: now)
    for pause in (1.0, 2.0):
        server.kill()
        supervisor.tick()
        now += pause - 0.1
        supervisor.tick()
        still_dead = not server.running
        now += 0.2
        supervisor.tick()
        assert still_dead
        server.await_answer()
        supervisor.tick()
    server.stop()
    assert [line.split(" (")[0] for line in said[::2]] == [
        "listener ended with code -9; restarting it in 1 s",
        "listener ended with code -9; restarting it in 2 s",
    ]
    assert [line.split(" after")[0] for line in said[1::2]] == ["listener is back"] * 2


def test_a_free_port_is_lent_to_no_connection_while_its_server_is_away() -> None:
    """Every outgoing connection takes one of those that the system lends, of Linux from 32768 on, and may take any."""
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < 32_768


class SlowServer(ListeningServer):
    """Takes longer to answer than it may be silent, and says meanwhile what it does."""

    max_idle_seconds: ClassVar[float] = 3.0
    script = """
import socket, sys, time
for step in range(6):
    print("step", step, flush=True)
    time.sleep(1)
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def test_a_start_has_all_the_time_that_it_needs(own_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is slow. While the log grows the start goes on, and somebody who waits is told how long it is."""
    monkeypatch.setattr(processes, "PROGRESS_INTERVAL_SECONDS", 2.0)
    server = SlowServer(own_home, free_port())
    told: list[float] = []
    server.start(told.append)
    server.stop()
    assert len(told) >= 2
    assert told == sorted(told)


def test_work_without_a_word_is_a_sign_of_life(own_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM that loads its classes writes nothing for long."""
    monkeypatch.setattr(processes, "MIN_CPU_SECONDS", 0.05)  # a busy machine gives it no more in so short a time
    server = SlowServer(own_home, free_port())
    server.script = """
import socket, sys, time
end = time.monotonic() + 6
while time.monotonic() < end: pass
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""
    server.start()
    server.stop()


def test_a_start_that_hangs_has_failed(own_home: Home) -> None:
    """The process lives, and neither writes nor computes: its last words are told, and where its log is."""
    server = SlowServer(own_home, free_port())
    server.script = "import time; print('error: the disk does not answer', flush=True); time.sleep(600)"
    with pytest.raises(StartFailed) as failed:
        server.start()
    problem = "listener did not start: no answer, and no activity for 3 s: error: the disk does not answer; its log: "
    assert str(failed.value) == f"{problem}{own_home.log('listener')}"
    assert not server.running


LITTLE = """
import socket, sys, time
began = time.monotonic()
while time.monotonic() - began < {seconds}:
    end = time.process_time() + 0.01
    while time.process_time() < end: pass
    time.sleep(0.1)
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def test_what_an_idle_server_does_is_no_sign_of_work(own_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle JVM takes two hundredths of a core for ever."""
    monkeypatch.setattr(processes, "MIN_CPU_SECONDS", 0.02)
    monkeypatch.setattr(processes, "MIN_CPU_SHARE", 0.5)  # a short test has no time for the real one
    monkeypatch.setattr(processes, "fair_share", lambda: 1.0)
    server = SlowServer(own_home, free_port())
    server.script = LITTLE.format(seconds=600)
    with pytest.raises(StartFailed, match="no activity for 3 s"):
        server.start()


def test_little_work_is_a_sign_of_life_on_a_machine_that_gives_no_more(
    own_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that gets a hundredth of a core, because others take the rest, goes on."""
    monkeypatch.setattr(processes, "MIN_CPU_SECONDS", 0.02)
    monkeypatch.setattr(processes, "MIN_CPU_SHARE", 0.5)
    monkeypatch.setattr(processes, "fair_share", lambda: 0.01)
    server = SlowServer(own_home, free_port())
    server.script = LITTLE.format(seconds=6)
    server.start()
    server.stop()


def test_the_work_of_processes_that_have_ended_is_not_forgotten(
    own_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark starts one Python process after the other; each new one is work, however long the last one took."""
    monkeypatch.setattr(processes, "MIN_CPU_SECONDS", 0.05)
    monkeypatch.setattr(SlowServer, "max_idle_seconds", 10.0)
    server = SlowServer(own_home, free_port())
    server.script = """
import socket, subprocess, sys, time
end = time.monotonic() + 20
while time.monotonic() < end:
    subprocess.run([sys.executable, "-Sc", "import time\\nwhile time.process_time() < 0.5: pass"])
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""
    server.start()
    server.stop()


def test_a_failure_tells_nothing_of_the_start_before(own_home: Home) -> None:
    """Each start appends to the same log."""
    own_home.log("listener").write_text("FATAL: an old story\n")
    server = ListeningServer(own_home, free_port())
    server.script = "raise SystemExit(3)"
    with pytest.raises(StartFailed, match="it ended with code 3: it wrote nothing; its log: "):
        server.start()


def test_servers_see_nothing_of_the_shell(own_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is started, and whatever prepares it."""
    monkeypatch.setenv("PGSSLMODE", "require")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:+UseG1GC")
    server = ListeningServer(own_home, free_port())
    server.run_preparation(["env"])
    server.script = "import os; print(*os.environ, sep='=\\n', flush=True); raise SystemExit(1)"
    with pytest.raises(StartFailed):
        server.start()
    said = own_home.log("listener").read_text()
    assert said.count("PATH=") == 2
    assert "PGSSLMODE" not in said
    assert "JAVA_TOOL_OPTIONS" not in said


@pytest.mark.parametrize(("given", "share"), [(None, "0.15"), ("2", "2.0")])
def test_the_pipeline_of_a_local_stack_takes_little_of_a_core(
    own_home: Home, monkeypatch: pytest.MonkeyPatch, given: str | None, share: str
) -> None:
    """People work on the machine. A share that the user sets is the share of the pipeline."""
    if given is not None:
        monkeypatch.setenv("TIDEMARK_BATCH_CPU_SHARE", given)
    assert LocalStack(own_home, load(), "java").pipeline().environment()["TIDEMARK_BATCH_CPU_SHARE"] == share


def test_settings_for_other_servers_do_not_reach_the_stack(own_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords, certificates and addresses of a user's own installation are in many a shell."""
    mine = {
        "TIDEMARK_POSTGRES_DSN": "postgresql://production/tidemark",
        "TIDEMARK_POSTGRES_PASSWORD_FILE": "/run/secrets/postgres",
        "TIDEMARK_REDIS_PASSWORD": "secret",
        "TIDEMARK_REDIS_CA_FILE": "/etc/ca.pem",
        "TIDEMARK_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "TIDEMARK_KAFKA_SASL_MECHANISM": "PLAIN",
        "TIDEMARK_KAFKA_USERNAME": "me",
        "TIDEMARK_KAFKA_PASSWORD": "secret",
        "TIDEMARK_CHECKPOINT_STORE": "s3a://bucket/tidemark",
    }
    members = LocalStack(own_home, load(), "java")
    for name, text in mine.items():
        monkeypatch.setenv(name, text)
    for process in (members.pipeline(), members.relay(), members.sidecar()):
        environment = process.environment()
        assert environment["TIDEMARK_POSTGRES_DSN"] == members.postgres.dsn()
        assert [name for name in mine if environment.get(name) == mine[name]] == []
    sourced = 'set -a; . "$0"; echo "${TIDEMARK_REDIS_PASSWORD-}${TIDEMARK_POSTGRES_PASSWORD_FILE-}"'
    done = subprocess.run(["sh", "-c", sourced, str(members.write_stack_env())], capture_output=True, check=True)
    assert done.stdout == b"\n"
