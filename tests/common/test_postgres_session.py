"""How Postgres lets us in: what is refused and what is waited for, TLS modes, and passwords that rotate."""

from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_tls import SSL_REQUEST, Authority, tls_front
from tidemark.app.stack.postgres import PostgresServer
from tidemark.common.errors import BadSetting, Refused, Unavailable
from tidemark.common.postgres_address import address
from tidemark.sinks.postgres.database import session_of


def test_a_server_is_known_by_its_certificate(
    postgres: PostgresServer, database: str, authority: Authority, stranger: Authority
) -> None:
    """With `sslmode=verify-full` we talk to the server whose authority we know; another one, or a server without TLS,
    is a refusal that names what to check."""
    with tls_front(postgres.port, authority, SSL_REQUEST) as port:
        secured = make_conninfo(database, host="127.0.0.1", port=port, sslmode="verify-full")
        trusting = session_of(make_conninfo(secured, sslrootcert=str(authority.ca_file)), "test")
        with trusting.use() as connection:
            assert connection.pgconn.ssl_in_use
        trusting.close()
        wrong = [
            make_conninfo(secured, sslrootcert=str(stranger.ca_file)),
            make_conninfo(secured, sslrootcert="/nowhere/ca.pem"),
            make_conninfo(database, host="127.0.0.1", port=postgres.port, sslmode="require"),
        ]
        for dsn in wrong:
            with pytest.raises(Refused, match="check sslmode, sslrootcert") as caught, session_of(dsn, "test").use():
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
        rotating = session_of(lambda: make_conninfo(database, user="turning", password=secret.read_text()), "test")
        with rotating.use() as connection:
            pid = connection.info.backend_pid
        admin.execute("alter role turning password 'two'")
        admin.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(Unavailable), rotating.use() as connection:
            connection.execute("select 1")
        with pytest.raises(Unavailable, match="password"), rotating.use():
            pass
        secret.write_text("two")
        with rotating.use() as connection:
            connection.execute("select 1")
        rotating.close()
        admin.execute("drop role turning")


@pytest.mark.parametrize("wrong", [{"dbname": "no_such_database"}, {"user": "nobody_we_know"}])
def test_server_that_says_no_stops_us(database: str, wrong: dict[str, str]) -> None:
    """An unknown database or user is a refusal with what to do, although libpq gives no code for it."""
    user = session_of(psycopg.conninfo.make_conninfo(database, **wrong), "test")
    with pytest.raises(Refused, match="TIDEMARK_POSTGRES_DSN"), user.use():
        pass


def test_server_that_is_away_is_waited_for() -> None:
    """A port without a server is no refusal."""
    with pytest.raises(Unavailable), session_of("postgresql://u:secret@127.0.0.1:1/db", "test").use():
        pass


def test_address_that_cannot_be_read_is_not_quoted() -> None:
    """A malformed DSN is named without its password."""
    with pytest.raises(BadSetting) as caught:
        session_of("host=h secret word", "test")
    assert "secret" not in str(caught.value)
    with pytest.raises(BadSetting, match="percent-encoded") as caught:
        session_of("postgresql://ada:p/secret@db/tide", "test")
    assert "secret" not in str(caught.value)


def test_an_address_names_what_libpq_takes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person looks for the server where we looked."""
    assert address("postgresql://ada@db/tide") == "db:5432/tide"
    monkeypatch.setenv("PGPORT", "6543")
    monkeypatch.setenv("PGDATABASE", "low")
    assert address("postgresql://ada@db") == "db:6543/low"
    assert address("postgresql://ada@db:7000/tide") == "db:7000/tide"
