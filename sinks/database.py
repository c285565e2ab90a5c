"""One session to Postgres: opened when needed, opened again after it broke, its errors told apart by who must act.

Not a pool: the pipeline has a handful of threads and each of them owns one `Database`.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import PGconn, Ping
from psycopg.rows import TupleRow

from streaming.errors import BadSetting, Refused, TidemarkError, Unavailable

Connection = psycopg.Connection[TupleRow]

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
    "28": "check the user and the password in TIDEMARK_POSTGRES_DSN",
    "3D": "create the database, or correct its name in TIDEMARK_POSTGRES_DSN",
    "3F": "run `tidemark migrate`",
    "42P01": "run `tidemark migrate`",
    "42501": "grant the user the role tidemark_owner, or run `tidemark migrate` as a user who may create a schema",
}


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

    def __init__(self, dsn: str, application: str) -> None:
        self.where = address(dsn)
        self._conninfo = conninfo(dsn, application)
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
        try:
            return psycopg.connect(self._conninfo, autocommit=True)
        except psycopg.OperationalError:
            if self._trusted or PGconn.ping(self._conninfo.encode()) != Ping.OK:
                raise
        # The server answers, but not us; or it came up between the two calls, hence once more.
        try:
            return psycopg.connect(self._conninfo, autocommit=True)
        except psycopg.OperationalError as error:
            do = "check user, password and database in TIDEMARK_POSTGRES_DSN"
            raise Refused("Postgres", self.where, _first_line(error), do) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise explained(error, self.where) from error


def _first_line(error: psycopg.Error) -> str:
    return error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]
