"""`tidemark up`: the whole local stack in one command, from the first download to the last process stopped."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import click

from tidemark.app import relay
from tidemark.app.commands import OurCommand, loaded
from tidemark.app.output import progress
from tidemark.app.pipeline import class_archive
from tidemark.app.settings import Settings
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import postgres_program
from tidemark.app.stack.processes import STORY, ServerProcess, redis_program
from tidemark.app.stack.up import DEMO, SERVERS, LocalStack, Supervisor, fetch_jars
from tidemark.app.versions import find_java
from tidemark.common.backoff import wait_out
from tidemark.common.environment import Foreign, child_environment, forget, is_own, temporary_home
from tidemark.common.errors import BadSetting
from tidemark.sinks.postgres.database import migrate

BUSY_SECONDS = 300.0
"""How long Postgres may refuse connections that a busy machine makes it time out."""


def run(settings: Settings, *, demo: bool) -> None:
    """Run the stack until Ctrl-C, SIGTERM or SIGHUP, and return when it has ended. Raises a `Stop` before a process
    is started, or `StartFailed` after all started processes have ended again."""
    inherited = dict(os.environ)
    ignored = forget(tuple(Foreign))
    home = Home(settings.home)
    _require_writable(home)
    with home.claimed(), suppress(KeyboardInterrupt), _signals_interrupt():
        began = time.monotonic()
        if ignored:
            _say(f"ignored, because the stack has servers of its own: {', '.join(ignored)}")
        java = find_java(settings.java_home)
        members = LocalStack(home, settings, java)
        _end_leftovers(members)
        members.require_free_ports()
        # The one request to the internet: it needs the user's proxy and certificates.
        for jars in [SERVERS, DEMO] if demo else [SERVERS]:
            fetch_jars(home.jars, java, _show_fetching, jars, inherited)
        with _running(members, demo=demo) as running:
            _invite(members, time.monotonic() - began)
            supervisor = Supervisor(running, _say)
            with _archiving(java):
                while True:
                    time.sleep(0.5)
                    supervisor.tick()


def _require_writable(home: Home) -> None:
    try:
        home.root.mkdir(mode=0o700 if home.root == temporary_home() else 0o777, parents=True, exist_ok=True)
        if not is_own(home.root):
            raise BadSetting("TIDEMARK_HOME", f"{home.root} belongs to another user; choose another")
        home.pid("up").touch()
    except OSError as error:
        raise BadSetting("TIDEMARK_HOME", f"cannot write in {home.root}: {error.strerror}; choose another") from None


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """The first signal raises KeyboardInterrupt. Signals that come while the stack ends are ignored."""

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A stack that was started with nohup outlives its terminal.
    numbers = [
        number for number in ending if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_leftovers(members: LocalStack) -> None:
    """End what an `up` that was killed left behind, readers before the servers that they read from."""
    for server in [*members.demo(), members.sidecar(), members.relay(), members.pipeline(), *members.servers]:
        if pid := server.end_leftover():
            _say(f"ended {server.name} (pid {pid}), left behind by an earlier stack")


@contextmanager
def _running(members: LocalStack, *, demo: bool) -> Iterator[Sequence[ServerProcess]]:
    """Start all processes in order; end them in reverse order in any case."""
    running: list[ServerProcess] = [*members.servers]
    try:
        with ThreadPoolExecutor() as pool, progress("starting servers", len(members.servers), "server") as advance:
            for _ in pool.map(_start, members.servers):
                advance(1)
        dsn, streams = members.postgres.dsn(), ["payments"] if demo else []
        wait_out(lambda: migrate(dsn), Event(), BUSY_SECONDS)
        wait_out(lambda: relay.migrate(dsn, streams, "forward", say=lambda _: None), Event(), BUSY_SECONDS)
        ours = [members.pipeline(), members.relay(), members.sidecar(STORY if demo else "")]
        processes = [*ours, *members.demo()] if demo else ours
        with progress("starting Tidemark", len(processes), "process") as advance:
            for process in processes:
                running.append(process)
                _start(process)
                advance(1)
        members.write_stack_env()
        yield running
    finally:
        members.home.stack_env.unlink(missing_ok=True)
        for server in reversed(running):
            if server.running:
                _say(f"ending {server.name}")
            server.stop()


@contextmanager
def _archiving(java: str) -> Iterator[None]:
    """Meanwhile, unless already done, prepare files that make later starts of the pipeline faster. A failure is
    ignored."""
    if class_archive.is_whole(class_archive.spark_archive(java)):
        yield
        return
    maker = subprocess.Popen(
        ["nice", "-n", "19", *class_archive.MAKER],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment({}),
        start_new_session=True,
    )
    try:
        yield
    finally:
        maker.terminate()  # it removes incomplete files
        with suppress(subprocess.TimeoutExpired):
            maker.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(maker.pid, signal.SIGKILL)  # its JVM would write on as it ends
        maker.wait()


def _start(server: ServerProcess) -> None:
    began = time.monotonic()
    _say(f"starting {server.name}")
    server.start(
        lambda seconds: _say(f"{server.name} is not up after {seconds:.0f} s; it waits for: {server.waits_for()}")
    )
    _say(f"{server.name} is up after {time.monotonic() - began:.1f} s")


def _invite(members: LocalStack, seconds: float) -> None:
    tidemark = _shown("tidemark", Path(sys.executable).parent / "tidemark")
    redis_cli = _shown("redis-cli", Path(redis_program("redis-cli")))
    psql = _shown("psql", Path(postgres_program("psql")))
    _say(
        f"""
ready after {seconds:.0f} s. Ctrl-C ends everything; the next start finds its data again.

  In a browser: {members.sidecar().url}/

  In another terminal:
    . {shlex.quote(str(members.home.stack_env))}
    {psql} -c "SELECT tidemark.create_stream('sales')" -c "SELECT tidemark.append('sales', '{{}}')"
    {tidemark} status
    curl {members.sidecar().url}/v1/streams
    {redis_cli} -p {members.redis.port} get 'tidemark:{{sales}}:token'

  The first of these lines are the settings for your own programs, too.
  Logs: {members.home.root / "log"}
"""
    )


def _shown(name: str, path: Path) -> str:
    """How a person starts a program from here: by name if the shell finds it, otherwise by the shortest path."""
    if shutil.which(name):
        return name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _show_fetching(name: str) -> None:
    """Show progress: one changing line on a terminal, otherwise a line for each step."""
    if sys.stdout.isatty():
        click.echo(f"\r\x1b[Kfetching the jars of Kafka and Spark, once: {name}\r", nl=False)
    else:
        _say(f"fetching {name}")


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone; the stack goes on
        click.echo(f"\r\x1b[K{text}" if sys.stdout.isatty() else text)


@click.command("up", cls=OurCommand)
@click.option("--demo", is_flag=True, help="Also play several writers whose facts complete out of order.")
def up(*, demo: bool) -> None:
    """Run the whole local stack: Kafka, Postgres, Redis, the pipeline and the sidecar."""
    settings = loaded()
    run(settings, demo=demo)
