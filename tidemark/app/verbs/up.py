"""`tidemark up`: download, start, supervise and stop the whole local stack."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import click

from tidemark.app import relay
from tidemark.app.commands import Utf8Command, load_settings
from tidemark.app.output import CLEAR_LINE, progress
from tidemark.app.pipeline import class_archive
from tidemark.app.settings import Settings
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import CHAT_DATABASE, DEMO_BANNER, ServerProcess, StartFailed
from tidemark.app.stack.up import BROKER_JARS, DEMO_JARS, LocalStack, Supervisor, fetch_jars
from tidemark.app.versions import find_java
from tidemark.common.backoff import wait_out
from tidemark.common.environment import (
    VariableGroup,
    child_environment,
    is_trusted,
    remove_foreign_variables,
    temporary_home,
)
from tidemark.common.errors import BadSetting, TidemarkError, Unavailable
from tidemark.sinks.postgres.database import migrate
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sources.relay.queries import session_of

T = TypeVar("T")

FIRST_POSITION_TIMEOUT_SECONDS = 30.0
"""The longest wait for the demo's first position."""


def run(settings: Settings, *, demo: bool) -> None:
    """Start the stack, supervise its processes until Ctrl-C, SIGTERM or SIGHUP, and return when all have ended.

    First ends processes that an earlier stack left running, and downloads missing jars.

    Raises:
        Stop: the stack cannot start. No process was started.
        StartFailed: a process did not start. All started processes have ended again.
    """
    inherited = dict(os.environ)
    ignored = remove_foreign_variables(tuple(VariableGroup))
    home = Home(settings.home)
    _require_writable(home)
    with home.lock(), suppress(KeyboardInterrupt), _interrupt_at_signals():
        began = time.monotonic()
        if ignored:
            _echo(f"ignored these variables, because the stack uses only its own servers: {', '.join(ignored)}")
        java = find_java(settings.java_home)
        stack = LocalStack(home, settings, java)
        _end_leftovers(stack)
        stack.require_free_ports()
        # The only request to the internet. The inherited variables have the user's proxy and certificates.
        for jars in [BROKER_JARS, DEMO_JARS] if demo else [BROKER_JARS]:
            fetch_jars(home.jars, java, lambda text: _echo(f"downloads: {text}"), jars, inherited)
        with _run_processes(stack, demo=demo) as (running, earlier_streams):
            if demo:
                _wait_for_first_position(stack)
            elif earlier_streams:
                _echo(_earlier_demo_notice(stack, earlier_streams))
            _print_instructions(stack, time.monotonic() - began)
            supervisor = Supervisor(running, _echo)
            with _create_class_archive(java):
                while True:
                    time.sleep(0.5)
                    supervisor.tick()


def _require_writable(home: Home) -> None:
    """Create the folder of the stack. Raises `BadSetting` if the folder is not writable, or belongs to another user."""
    try:
        home.root.mkdir(mode=0o700 if home.root == temporary_home() else 0o777, parents=True, exist_ok=True)
        if not is_trusted(home.root):
            raise BadSetting("TIDEMARK_HOME", f"{home.root} belongs to another user; choose another directory")
        home.pid_file("up").touch()
    except OSError as error:
        raise BadSetting(
            "TIDEMARK_HOME", f"cannot write in {home.root}: {error.strerror}; choose another directory"
        ) from None


@contextmanager
def _interrupt_at_signals() -> Iterator[None]:
    """While the block runs, raise KeyboardInterrupt at the first SIGINT, SIGTERM or SIGHUP, and ignore later ones.

    A later signal must not interrupt the end of the stack. A SIGHUP that is ignored already, as with nohup, stays
    ignored: the stack outlives its terminal.
    """

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_leftovers(stack: LocalStack) -> None:
    """End processes that a killed `tidemark up` left running, clients before their servers."""
    relays = [stack.demo_relay(), stack.relay()]
    for server in [*stack.demo(), stack.sidecar(), *relays, stack.pipeline(), *stack.servers]:
        if pid := server.end_leftover():
            _echo(f"ended {server.name} (pid {pid}), which an earlier stack left running")


@contextmanager
def _run_processes(stack: LocalStack, *, demo: bool) -> Iterator[tuple[Sequence[ServerProcess], Sequence[str]]]:
    """Start all processes in order, run the block, and end the processes in reverse order, also after an error.

    Also migrates the database, and writes the file `stack.env`. The file exists while the block runs.

    Yields the processes, and the streams of an earlier demo if the demo does not run now.
    """
    running: list[ServerProcess] = [*stack.servers]
    try:
        with ThreadPoolExecutor() as pool, progress("starting servers", len(stack.servers), "server") as advance:
            for _ in pool.map(_start, stack.servers):
                advance(1)
        dsn, streams = stack.postgres.dsn(), ["payments"] if demo else []
        migrating = partial(progress, "migrating", unit="migration")
        _retry_while_running(lambda: migrate(dsn, migrating), stack.postgres)
        _retry_while_running(lambda: relay.migrate(dsn, streams, "forward", say=lambda _: None), stack.postgres)
        earlier_streams = [] if demo else _chat_streams(stack)
        processes = _tidemark_processes(stack, earlier_streams, demo=demo)
        with progress("starting Tidemark", len(processes), "process") as advance:
            for process in processes:
                running.append(process)
                _start(process)
                advance(1)
        stack.write_stack_env()
        yield running, earlier_streams
    finally:
        stack.home.stack_env.unlink(missing_ok=True)
        for server in reversed(running):
            if server.running:
                _echo(f"ending {server.name}")
            server.stop()


def _tidemark_processes(stack: LocalStack, earlier_streams: Sequence[str], *, demo: bool) -> list[ServerProcess]:
    """The processes to start after the servers, in order. `earlier_streams`: the streams of an earlier demo."""
    processes: list[ServerProcess] = [stack.pipeline(), stack.relay(), stack.sidecar(DEMO_BANNER if demo else "")]
    if demo:
        processes += stack.demo()
    elif earlier_streams:
        processes.append(stack.demo_relay())
    return processes


def _wait_for_first_position(stack: LocalStack) -> None:
    """Wait until a position is stored, so that `tidemark status` shows the demo's streams.

    Returns after `FIRST_POSITION_TIMEOUT_SECONDS` without an error: the pipeline may be slow on a busy machine.
    """
    if _stored_streams(stack):
        return
    _echo("waiting for the first position of the demo")
    deadline = time.monotonic() + FIRST_POSITION_TIMEOUT_SECONDS
    while time.monotonic() < deadline and not _stored_streams(stack):
        time.sleep(0.5)


def _stored_streams(stack: LocalStack) -> list[str]:
    """The names of the streams that have positions; empty if Postgres does not answer."""
    with suppress(TidemarkError), Postgres(PostgresConfig(stack.postgres.dsn())) as postgres:
        return postgres.streams()
    return []


def _chat_streams(stack: LocalStack) -> list[str]:
    """The streams that the chat server of an earlier demo created, sorted.

    Queries the chat server's database: a killed chat server may have open IDs before its streams have positions. Waits
    while Postgres is unavailable. Raises `StartFailed` if Postgres has ended.
    """

    def query() -> list[str]:
        with session_of(stack.postgres.dsn(), "tidemark up") as session:
            if session.fetch_value("select 1 from pg_database where datname = %s", [CHAT_DATABASE]) is None:
                return []
        with session_of(stack.postgres.dsn(CHAT_DATABASE), "tidemark up") as session:
            # The demo may have been killed before it created the table.
            if session.fetch_value("select to_regclass('tidemark.append_streams')") is None:
                return []
            rows = session.fetch_tuples("select stream from tidemark.append_streams order by stream")
            return [stream for (stream,) in rows]

    return _retry_while_running(query, stack.postgres)


def _earlier_demo_notice(stack: LocalStack, streams: Sequence[str]) -> str:
    """The notice that the database has `streams`, which an earlier demo created."""
    return (
        f"{', '.join(streams)}: streams of an earlier `tidemark up --demo`. Nothing writes to them now.\n"
        f"To start empty, stop the stack and run: rm -r {shlex.quote(str(stack.home.root / 'data'))}"
    )


def _retry_while_running(step: Callable[[], T], server: ServerProcess) -> T:
    """Run `step`, and repeat it while the server is unavailable. Returns the result of `step`.

    Connections may time out on a busy machine. Raises `StartFailed` if the server has ended.
    """

    def require_running(_: Unavailable) -> None:
        if not server.running:
            raise StartFailed(server.name, f"it ended with code {server.returncode}", server.failure_cause())

    return wait_out(step, Event(), on_failure=require_running)


@contextmanager
def _create_class_archive(java: str) -> Iterator[None]:
    """Create the Java class archive, if it is missing, in a child process while the block runs.

    The archive makes later starts of the pipeline faster. If the block ends before the archive is complete, the child
    process is ended, and a later start creates the archive. A failure of the child process is ignored.
    """
    if class_archive.is_complete(class_archive.spark_archive_path(java)):
        yield
        return
    maker = subprocess.Popen(
        ["nice", "-n", "19", *class_archive.CREATE_COMMAND],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment({}),
        start_new_session=True,
    )
    try:
        yield
    finally:
        maker.terminate()  # the process removes incomplete files before it ends
        with suppress(subprocess.TimeoutExpired):
            maker.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(maker.pid, signal.SIGKILL)  # also ends the JVM of the process, which would continue to write
        maker.wait()


def _start(server: ServerProcess) -> None:
    """Start a process, wait until it is up, and print its progress."""
    began = time.monotonic()
    _echo(f"starting {server.name}")
    server.start(
        lambda seconds: _echo(
            f"{server.name} is not up after {seconds:.0f} s; it waits for: {server.pending_condition()}"
        )
    )
    _echo(f"{server.name} is up after {time.monotonic() - began:.1f} s")


def _print_instructions(stack: LocalStack, seconds: float) -> None:
    tidemark = _command_name("tidemark", Path(sys.executable).parent / "tidemark")
    _echo(
        f"""
ready after {seconds:.0f} s. Ctrl-C ends all processes; the data stays for the next start.

  In a browser: {stack.sidecar().url}/

  In another terminal:
    . {shlex.quote(str(stack.home.stack_env))}
    psql -c "SELECT tidemark.create_stream('sales')" -c "SELECT tidemark.append('sales', '{{}}')"
    {tidemark} status
    curl {stack.sidecar().url}/v1/streams
    redis-cli -p {stack.redis.port} get 'tidemark:{{sales}}:token'

  The first line sets the variables that your own programs need, and adds tidemark, psql and redis-cli to PATH.
  Logs: {stack.home.root / "log"}
"""
    )


def _command_name(name: str, path: Path) -> str:
    """The word to type for a command: `name` if the command is on PATH, otherwise `path`. The path is quoted for the
    shell, and relative if the program is below the current directory."""
    if shutil.which(name):
        return name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _echo(text: str) -> None:
    with suppress(OSError):  # the terminal may be closed, and the stack continues
        click.echo(f"{CLEAR_LINE}{text}" if sys.stdout.isatty() else text)


@click.command("up", cls=Utf8Command)
@click.option("--demo", is_flag=True, help="Also run several demo writers whose facts complete out of order.")
def up(*, demo: bool) -> None:
    """Run the whole local stack until Ctrl-C: Kafka, Postgres, Redis, the pipeline, the relay and the sidecar.

    The first start downloads Kafka.
    """
    settings = load_settings()
    run(settings, demo=demo)
