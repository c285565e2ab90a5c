"""The library's own session to the service's database: opened when needed, opened again after it broke.

Its commits are durable (`synchronous_commit`), whatever the database's default is: they stand for what is announced.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from tidemark.streaming.errors import BadSetting, Refused, TidemarkError, Unavailable

Connection = psycopg.Connection[TupleRow]

_DEFAULTS = {
    # A server that vanished without a word must not hold an announcement for the two hours that TCP would.
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
_SETTINGS = {
    "synchronous_commit": "on",
    # The outbox is empty whenever nobody looks, so a planner with statistics would read all of it, dead rows and all.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
}
_LOST_CLASSES = ("08", "53", "57", "58")  # connections, resources, an operator's intervention, the system
_REFUSALS = {
    "3F": "run `tidemark writer migrate`",
    "42P01": "run `tidemark writer migrate`",
    "42883": "run `tidemark writer migrate`",
    "42501": "grant the user the role tidemark_writer, and usage and select on the sequences",
}


class Session:
    """One connection in autocommit. Any thread may use it, one at a time.

    `life` goes up whenever a connection was opened: while it stays, the server cannot have crashed.
    """

    def __init__(self, dsn: str, application: str) -> None:
        try:
            parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
        except psycopg.ProgrammingError:  # its text would quote the password
            raise BadSetting("dsn", "write postgresql://user:password@host:5432/database") from None
        self.where = f"{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}/{parts.get('dbname') or ''}"
        self.life = 0
        self._conninfo = make_conninfo(**{**_DEFAULTS, "application_name": application, **parts})
        self._connection: Connection | None = None
        self._lock = threading.RLock()

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """The connection, outside a transaction. Turns what psycopg raises into `Unavailable` or `Refused`."""
        with self._lock:
            try:
                yield self._live()
            except psycopg.Error as error:
                raise self._explained(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _live(self) -> Connection:
        if self._connection is None or self._connection.closed:
            connection = psycopg.connect(self._conninfo, autocommit=True)
            for setting, value in _SETTINGS.items():
                connection.execute(f"set {setting} = {value}".encode())
            self._connection = connection
            self.life += 1
        return self._connection

    def _explained(self, error: psycopg.Error) -> TidemarkError | psycopg.Error:
        code = error.sqlstate
        problem = error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]
        lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) if code is None else False
        if lost or (code or "")[:2] in _LOST_CLASSES:
            return Unavailable("Postgres", self.where, problem)
        do = _REFUSALS.get(code or "") or _REFUSALS.get((code or "")[:2])
        return error if do is None else Refused("Postgres", self.where, problem, do)
