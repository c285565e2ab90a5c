"""One session to Postgres: opened when needed, opened again after it broke, its errors told apart by who must act.

Not a pool: the pipeline has a handful of threads and each of them owns one `Database`.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, LiteralString, TypeAlias

import psycopg
from psycopg import Cursor
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import PGconn, Ping
from psycopg.rows import TupleRow

from tidemark.streaming.errors import BadSetting, Refused, TidemarkError, Unavailable

Connection = psycopg.Connection[TupleRow]

Dsn: TypeAlias = str | Callable[[], str]
"""An address, or who knows it: asked at every new connection, because passwords rotate."""

# A peer that vanished without a word (its host died) must not hold a batch for the two hours that TCP would.
_DEFAULTS = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}

# SQLSTATE classes and codes that the world mends: lost connections, resources, rolled back by the server, restarts.
_RETRIED_CLASSES = ("08", "40", "53", "58")
_RETRIED_CODES = {
    "25006",  # read only: a replica that is about to be promoted, or a server in maintenance
    "25P03",  # idle in transaction for too long
    "25P04",  # transaction for too long
    "55P03",  # lock not available
    "57014",  # statement time-out
    "57P01",  # administrator's shutdown
    "57P02",  # crash of another backend
    "57P03",  # starting up or shutting down
    "57P05",  # idle session
}
_REFUSALS = {
    "28": "check the user and the password in TIDEMARK_POSTGRES_DSN, or TIDEMARK_POSTGRES_PASSWORD",
    "3D": "create the database, or correct its name in TIDEMARK_POSTGRES_DSN",
    "3F": "run `tidemark migrate`",
    "42P01": "run `tidemark migrate`",
    "42501": "grant the user the role tidemark_owner, or run `tidemark migrate` as a user who may create a schema",
}

# What libpq says where the two sides do not trust each other; it has no code for it.
_DISTRUST = re.compile(
    r"certificate verify failed|does not match host name|not support SSL|(root )?certificate file|private key file"
    r"|alert (unknown ca|certificate required|bad certificate)|requires a valid client certificate"
)


def address(dsn: str) -> str:
    """Host, port and database of `dsn`, fit for a message: no user, no password."""
    parts = _parsed(dsn)
    return f"{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}/{parts.get('dbname') or ''}"


def conninfo(dsn: str, application: str) -> str:
    """`dsn` with what a session of ours needs where it says nothing else."""
    return make_conninfo(**{**_DEFAULTS, "application_name": application, **_parsed(dsn)})


def explained(
    error: psycopg.Error, where: str, refusals: Mapping[str, str] = _REFUSALS
) -> TidemarkError | psycopg.Error:
    """The error to raise instead; `error` itself where it is neither waited out nor refused.

    `refusals`: SQLSTATE, or its class -> what a person has to do about it.
    """
    code = error.sqlstate
    if code is None:
        lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return Unavailable("Postgres", where, _first_line(error)) if lost else error
    if code[:2] in _RETRIED_CLASSES or code in _RETRIED_CODES:
        return Unavailable("Postgres", where, _first_line(error))
    do = refusals.get(code) or refusals.get(code[:2])
    return Refused("Postgres", where, _first_line(error), do) if do else error


def _parsed(dsn: str) -> dict[str, str]:
    try:
        return {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.ProgrammingError:
        # Its text would quote the address, password and all.
        raise BadSetting(
            "TIDEMARK_POSTGRES_DSN", "is not a Postgres address; write postgresql://user:password@host:5432/database"
        ) from None


class Database:
    """A session that heals. Sessions are in autocommit; transactions are begun by who needs them.

    `session()` hands the connection to one thread at a time, and turns what psycopg raises into `Unavailable` (retry
    the whole transaction: nothing of it was kept, or the commit's answer was lost) or `Refused`. A refusal counts only
    until the first success: credentials that worked a minute ago are waited for, because libpq does not
    tell a wrong password from a server that is out of connections.
    """

    def __init__(self, dsn: Dsn, application: str) -> None:
        self._dsn = dsn
        self._application = application
        self.where = address(self._current())
        self._connection: Connection | None = None
        self._trusted = False
        self._lock = threading.RLock()

    @contextmanager
    def session(self) -> Iterator[Connection]:
        with self._lock, self._translated():
            yield self._live()

    def close(self) -> None:
        """Close the session; the next `session()` would open it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _live(self) -> Connection:
        if self._connection is None or self._connection.closed or self._connection.broken:
            self._connection = self._connect()
            self._trusted = True
        return self._connection

    def _connect(self) -> Connection:
        wanted = conninfo(self._current(), self._application)
        try:
            return psycopg.connect(wanted, autocommit=True)
        except psycopg.OperationalError as error:
            if self._trusted:
                raise
            if _DISTRUST.search(str(error)):
                do = "check sslmode, sslrootcert, sslcert and sslkey in TIDEMARK_POSTGRES_DSN"
                raise Refused("Postgres", self.where, _first_line(error), do) from error
            if PGconn.ping(wanted.encode()) != Ping.OK:
                raise
        # The server answers, but not us; or it came up between the two calls, hence once more.
        try:
            return psycopg.connect(wanted, autocommit=True)
        except psycopg.OperationalError as error:
            do = "check user, password and database in TIDEMARK_POSTGRES_DSN, or TIDEMARK_POSTGRES_PASSWORD"
            raise Refused("Postgres", self.where, _first_line(error), do) from error

    def _current(self) -> str:
        return self._dsn if isinstance(self._dsn, str) else self._dsn()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise explained(error, self.where) from error


def _first_line(error: psycopg.Error) -> str:
    return error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]


Rows: TypeAlias = Iterable[tuple[Any, ...]]


def execute(connection: Connection, statement: LiteralString, rows: Rows, *more: object) -> Cursor[TupleRow] | None:
    """Run `statement` with one array per column of `rows`, then `more`; without rows nothing runs and None comes back.

    The statement casts each array (`%s::bigint[]`). Rows hold no None.
    """
    columns = list(zip(*rows, strict=True))
    return connection.execute(statement, [*map(_array, columns), *more]) if columns else None


def _array(column: tuple[Any, ...]) -> Any:
    # One literal for all numbers: psycopg adapts a list item by item, which takes three times as long.
    return "{" + ",".join(map(str, column)) + "}" if isinstance(column[0], int) else list(column)
