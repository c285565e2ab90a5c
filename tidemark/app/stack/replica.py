"""A second Postgres beside one of the stack's: a standby that streams from it, or an image of it, and its successor.

For faults. The first one may run in another process (`tidemark up`): it is reached by its pid file, its address and its
data, and whoever supervises it starts it again, with the data of the replica.
"""

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
import psycopg

from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer, as_ordinary_user, postgres_program
from tidemark.app.stack.server import StartFailed, free_port, process_of
from tidemark.common.environment import server_environment

POLL_SECONDS = 0.05
STREAMING_SECONDS = 30.0


class Replica(PostgresServer):
    """In a home of its own inside that of `origin`, which is running. `copy`, `start`, and what befalls it then.

    For one thread. Methods raise `StartFailed` and psycopg's errors where either server does not do as it is told;
    then `discard`.
    """

    def __init__(self, origin: PostgresServer) -> None:
        super().__init__(Home(origin.home.root / "replica"), free_port())
        self._origin = origin

    def prepare(self) -> None:
        """Its data are a copy."""

    def command(self) -> Sequence[str]:
        # It is there for seconds; and a standby refuses to follow an origin that allows more prepared transactions.
        return [*super().command(), "-c", "fsync=off", "-c", "max_prepared_transactions=10"]

    def copy(self, *, follows: bool) -> None:
        """Take a base backup, as of now: to be an image of the origin, or a standby that streams from it."""
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(self._origin.password())
        shutil.rmtree(self.data, ignore_errors=True)
        new = self.new_directory()
        arguments = ["-D", str(new), "--checkpoint=fast", "--no-sync", *(["--write-recovery-conf"] if follows else [])]
        command = [*as_ordinary_user(), postgres_program("pg_basebackup"), *arguments]
        self.run_first(command, server_environment(self._origin.libpq))
        new.rename(self.data)

    def stream(self, *, synchronous: bool) -> None:
        """Wait until the standby follows; from then on, if `synchronous`, the origin's commits wait for it."""
        if synchronous:
            self._tell_origin("alter system set synchronous_standby_names = '*'")
            self._tell_origin("select pg_reload_conf()")
        wanted = "sync" if synchronous else "async"
        self._until(
            lambda: self._tell_origin(
                "select 1 from pg_stat_replication where state = 'streaming' and sync_state = %s", wanted
            )
        )

    def fall_behind(self) -> None:
        """The standby hears no more of the origin."""
        self._tell("alter system set primary_conninfo = ''")
        self._tell("select pg_reload_conf()")
        self._until(lambda: not self._tell("select 1 from pg_stat_wal_receiver"))

    def promote(self) -> None:
        """The origin stands still from now on; the standby becomes a primary, with a timeline of its own."""
        self.freeze_origin()
        self._tell("select pg_promote()")

    def freeze_origin(self) -> None:
        """It answers nobody any more."""
        self._signal_origin(signal.SIGSTOP)

    def succeed(self) -> None:
        """Take the origin's place: it is killed, and who starts it again finds the data of the replica."""
        self.stop()
        shutil.rmtree(self._origin.replaced, ignore_errors=True)
        self._origin.data.rename(self._origin.replaced)
        self.data.rename(self._origin.data)
        psutil.wait_procs(self._signal_origin(signal.SIGKILL), timeout=10)
        shutil.rmtree(self._origin.replaced, ignore_errors=True)

    def discard(self) -> None:
        """Nothing came of it: the origin goes on alone; waited for where it is away."""
        self.kill()
        self._signal_origin(signal.SIGCONT)
        self._until(self._goes_on_alone)

    def _goes_on_alone(self) -> bool:
        try:
            self._tell_origin("alter system reset synchronous_standby_names")
            self._tell_origin("select pg_reload_conf()")
        except psycopg.OperationalError:
            return False
        return True

    def _signal_origin(self, number: signal.Signals) -> list[psutil.Process]:
        """The postmaster before its children, so that it has no more of them; but killed, it has none."""
        postmaster = process_of(self._origin.home, self._origin.name)
        if postmaster is None:
            return []
        family = {postmaster}
        with suppress(psutil.NoSuchProcess):
            family.update(postmaster.children(recursive=True))
            postmaster.send_signal(number)
            family.update(postmaster.children(recursive=True))
        for process in family - {postmaster}:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return [*family]

    def _tell(self, statement: str, *values: object) -> list[Any]:
        return _told(self.dsn("postgres"), statement, values)

    def _tell_origin(self, statement: str, *values: object) -> list[Any]:
        return _told(self._origin.dsn("postgres"), statement, values)

    def _until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + STREAMING_SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise StartFailed("the replica", f"no answer within {STREAMING_SECONDS:.0f} s", self.failure())
            time.sleep(POLL_SECONDS)


def _told(dsn: str, statement: str, values: tuple[object, ...]) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(statement.encode(), values)
        return cursor.fetchall() if cursor.description else []
