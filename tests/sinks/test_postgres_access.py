"""How Postgres lets us in: TLS modes, and passwords that rotate."""

from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_tls import SSL_REQUEST, Authority, tls_front
from tidemark.app.stack.postgres import PostgresServer
from tidemark.sinks.postgres.session import Database
from tidemark.streaming.errors import Refused, Unavailable


def test_a_server_is_known_by_its_certificate(
    postgres: PostgresServer, database: str, authority: Authority, stranger: Authority
) -> None:
    """With `sslmode=verify-full` we talk to the server whose authority we know; another one, or a server without TLS,
    is a refusal that names what to check."""
    with tls_front(postgres.port, authority, SSL_REQUEST) as port:
        secured = make_conninfo(database, host="127.0.0.1", port=port, sslmode="verify-full")
        trusting = Database(make_conninfo(secured, sslrootcert=str(authority.ca_file)), "test")
        with trusting.session() as connection:
            assert connection.pgconn.ssl_in_use
        trusting.close()
        wrong = [
            make_conninfo(secured, sslrootcert=str(stranger.ca_file)),
            make_conninfo(secured, sslrootcert="/nowhere/ca.pem"),
            make_conninfo(database, host="127.0.0.1", port=postgres.port, sslmode="require"),
        ]
        for dsn in wrong:
            with pytest.raises(Refused, match="check sslmode, sslrootcert") as caught, Database(dsn, "test").session():
                pass
            assert "\n" not in str(caught.value)


def test_a_password_that_rotates_is_taken_up_at_the_next_connection(
    postgres: PostgresServer, database: str, tmp_path: Path
) -> None:
    """An open session stays; when it breaks, the next one logs in with the password as it is then. Until that has
    arrived it is waited for: a password that was good a minute ago is no reason to end."""
    secret = tmp_path / "password"
    secret.write_text("one")
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute("drop role if exists turning")
        admin.execute("create role turning login password 'one'")
        rotating = Database(lambda: make_conninfo(database, user="turning", password=secret.read_text()), "test")
        with rotating.session() as connection:
            pid = connection.info.backend_pid
        admin.execute("alter role turning password 'two'")
        admin.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(Unavailable), rotating.session() as connection:
            connection.execute("select 1")
        with pytest.raises(Unavailable, match="password"), rotating.session():
            pass
        secret.write_text("two")
        with rotating.session() as connection:
            connection.execute("select 1")
        rotating.close()
        admin.execute("drop role turning")
