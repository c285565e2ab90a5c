"""What verbs, store and sidecar say on a database with other defaults, and on one that hides rows."""

import re
import threading

import psycopg
import pytest
from click.testing import CliRunner, Result

from tests.app.recording import STREAM, Recording
from tests.app.sidecar.given import At, moved, sidecar
from tests.fix_sinks import LEASE
from tests.hidden import login, switch_rls
from tests.odd_settings import make_odd
from tests.sinks.given import advance, batch, stream
from tests.sinks.reader.given import Pipeline
from tidemark.app.cli import main
from tidemark.app.read_side import ReadSideConfig
from tidemark.common.errors import Refused
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres, PostgresConfig

VERBS = [
    ["explain", STREAM],
    ["explain", STREAM, "--at", "2026-09-21T14:16:30+00:00"],
    ["trace", STREAM, "4"],
    ["trace", STREAM, "3"],
    ["status"],
    ["status", "--json"],
    ["gaps"],
    ["overrides", "list"],
    ["late", "list"],
    ["policy", "list"],
]


def run(recording: Recording, words: list[str], **changed: str) -> Result:
    done = CliRunner(env=recording.variables | changed).invoke(main, words)
    assert not done.exception or isinstance(done.exception, SystemExit), (words, done.exception)
    return done


def told(done: Result) -> tuple[int, str]:
    """Without the times of this run, and how long ago something was."""
    text = re.sub(
        r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d[^ \",]*", lambda it: it[0] if it[0][:7] == "2026-09" else "T", done.output
    )
    return done.exit_code, re.sub(r"\d+(\.\d+)?(e-?\d+)? ?(s|ms|min|h|days?)\b|\d+\.\d+(e-?\d+)?", "D", text)


def test_verbs_say_the_same_whatever_the_database_defaults_to(recording: Recording, dsn: str) -> None:
    """`DateStyle 'SQL, DMY'` and its like: dates are read, and are told in UTC."""
    before = [told(run(recording, words)) for words in VERBS]
    make_odd(dsn)
    assert [told(run(recording, words)) for words in VERBS] == before


def test_a_sidecar_answers_whatever_the_database_defaults_to(
    pipeline: Pipeline, servers: ReadSideConfig, dsn: str
) -> None:
    """Also with the history, which has times."""
    make_odd(dsn)
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    with sidecar(servers) as client:
        page = client.json("/v1/streams/s/advances", params={"since": "m0", "limit": 10})
        assert [(move["writer"], move["id"]) for move in page["moves"]] == [("w", 3)]
        assert client.json("/v1/streams/s/gaps")["gaps"] == []


def test_verbs_name_the_table_whose_rows_are_hidden(recording: Recording, dsn: str, sql: psycopg.Connection) -> None:
    """Each ends with one line, instead of telling of no streams and no gaps."""
    with login(sql, dsn, "onlooking", "tidemark_reader") as address:
        assert run(recording, ["status"], TIDEMARK_POSTGRES_DSN=address).exit_code in (0, 1)
        switch_rls(sql, "tidemark", "enable")
        for words in VERBS:
            done = run(recording, words, TIDEMARK_POSTGRES_DSN=address)
            assert done.exit_code == 2, (words, done.output)
            assert len(done.output.splitlines()) == 1, done.output
            assert re.search(r'row level security hides rows of table "\w+" from role "onlooking"', done.output)
        switch_rls(sql, "tidemark", "disable")
        assert run(recording, ["status"], TIDEMARK_POSTGRES_DSN=address).exit_code in (0, 1)


def test_a_pipeline_refuses_a_database_that_hides_rows(dsn: str, sql: psycopg.Connection) -> None:
    """Whose user is a member of tidemark_owner and owns nothing: neither its start nor a batch reads nothing."""
    with (
        login(sql, dsn, "piping", "tidemark_owner") as address,
        Lease.acquire(address, LEASE, threading.Event()) as lease,
        Postgres(PostgresConfig(address)) as store,
    ):
        store.apply(batch(1, stream("s", advance("w", 0, 3), linear=3), token=lease.token))
        for table in ("stream_positions", "applied_batches", "query_lease"):
            switch_rls(sql, "tidemark", "enable", f"^{table}$")
            with pytest.raises(Refused, match=f'hides rows of table "{table}" from role "piping"'):
                store.apply(batch(2, stream("s", advance("w", 3, 5), linear=5), token=lease.token))
            switch_rls(sql, "tidemark", "disable", f"^{table}$")
        switch_rls(sql, "tidemark", "enable")
        with (
            Postgres(PostgresConfig(address)) as restarted,
            pytest.raises(Refused, match='hides rows of table "schema_version"'),
        ):
            restarted.check_writable()
        switch_rls(sql, "tidemark", "disable")
        store.apply(batch(2, stream("s", advance("w", 3, 5), linear=5), token=lease.token))


@pytest.mark.parametrize("how", ["enable", "force"])
def test_the_owner_is_held_back_by_force_alone(migrated: str, sql: psycopg.Connection, how: str) -> None:
    """The tables are the user's own. FORCE hides rows from the owner too, and the line says how to take it back."""
    with login(sql, migrated, "owning") as address:
        sql.execute("grant owning to current_user")
        sql.execute("grant usage on schema tidemark to owning")
        for (table,) in sql.execute(
            "select oid::regclass::text from pg_class where relnamespace = 'tidemark'::regnamespace and relkind = 'r'"
        ).fetchall():
            sql.execute(f"alter table {table} owner to owning".encode())
        switch_rls(sql, "tidemark", "enable")
        switch_rls(sql, "tidemark", how)
        done = CliRunner(env={"TIDEMARK_POSTGRES_DSN": address}).invoke(main, ["overrides", "list"])
        if how == "force":
            assert "NO FORCE ROW LEVEL SECURITY" in done.output
            assert done.exit_code == 2
        else:
            assert done.exit_code == 0, done.output
        for (table,) in sql.execute(
            "select oid::regclass::text from pg_class where relnamespace = 'tidemark'::regnamespace and relkind = 'r'"
        ).fetchall():
            sql.execute(f"alter table {table} owner to current_user".encode())
