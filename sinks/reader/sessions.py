"""The databases of a reader, for both shells: where they are, and what their errors mean. No connections."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg
from psycopg.pq import PGconn, Ping

from tidemark.sinks.database import address, conninfo, explained
from tidemark.sinks.reader.asks import Role
from tidemark.streaming.errors import Refused

_REFUSALS: Mapping[str, str] = {
    "28": "check user and password",
    "3D": "create the database, or correct its name",
    "42501": "grant the reader's user select on the backing table, and create on its own database for the schema"
    " tidemark_reader",
    "42P01": "check the name of the table",
    "42703": "check the names of the columns",
}


@dataclass(frozen=True, slots=True)
class Databases:
    """Addresses, which may hold passwords: `source` has the backing table, `effects` is the reader's own, `primary`
    is the server that `source` is a replica of, None where it is none."""

    source: str = field(repr=False)
    effects: str = field(repr=False)
    primary: str | None = field(default=None, repr=False)

    def conninfo(self, role: Role, reader: str) -> str:
        return conninfo(self._dsn(role), f"tidemark reader {reader}")

    @contextmanager
    def translated(self, role: Role) -> Iterator[None]:
        """Turn what psycopg raises into `Unavailable` (go on from the place that is kept) and `Refused`."""
        try:
            yield
        except psycopg.Error as error:
            raise explained(error, address(self._dsn(role)), _REFUSALS) from error

    def refuse(self, role: Role, error: psycopg.OperationalError) -> None:
        """Raise `Refused` where the server answers, but not us. For the first connection only: later, the server may
        be out of connections, which libpq does not tell from a wrong password."""
        if PGconn.ping(self._dsn(role).encode()) == Ping.OK:
            problem = (str(error).splitlines() or [type(error).__name__])[0]
            raise Refused("Postgres", address(self._dsn(role)), problem, "check user, password and database") from error

    def _dsn(self, role: Role) -> str:
        match role:
            case "source":
                return self.source
            case "place":
                return self.effects
            case "primary":
                assert self.primary is not None
                return self.primary
