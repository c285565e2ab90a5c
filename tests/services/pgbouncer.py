"""PgBouncer in transaction mode before a Postgres of the tests."""

import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import ClassVar

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer, ordinary_user_prefix
from tidemark.app.stack.processes import LOOPBACK, ServerProcess, listens

CONNECTIONS = 4
"""To one database, whatever the number of clients."""


def pgbouncer() -> str | None:
    """The path of the program, which Debian has where only root looks."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")


class PgBouncer(ServerProcess):
    name: ClassVar[str] = "pgbouncer"
    stop_signal: ClassVar[signal.Signals] = signal.SIGQUIT  # others wait for clients, in some versions

    def __init__(self, home: Home, port: int, postgres: PostgresServer, program: str) -> None:
        super().__init__(home, port)
        self._postgres = postgres
        self._program = program
        self._settings = home.data(self.name) / "pgbouncer.ini"

    def dsn(self, dsn: str) -> str:
        """The same database by way of the pooler."""
        return make_conninfo(dsn, port=self.port)

    def prepare(self) -> None:
        at = conninfo_to_dict(self._postgres.dsn())
        users = self._settings.with_name("users.txt")
        users.touch(mode=0o600)
        users.write_text(f'"{at["user"]}" "{at["password"]}"\n')
        settings: Mapping[str, object] = {
            "listen_addr": LOOPBACK,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": users,
            "pool_mode": "transaction",
            "default_pool_size": CONNECTIONS,
            "max_client_conn": 200,
            "server_login_retry": 1,
        }
        lines = [f"{name} = {value}" for name, value in settings.items()]
        behind = f"* = host={LOOPBACK} port={self._postgres.port}"
        self._settings.write_text("\n".join(["[databases]", behind, "[pgbouncer]", *lines, ""]))

    def command(self) -> Sequence[str]:
        return [*ordinary_user_prefix(), self._program, str(self._settings)]

    def answers(self) -> bool:
        return listens(self.port)
