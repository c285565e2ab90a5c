"""The relay and the SQL functions on a database with other defaults, and on one that hides rows."""

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.hidden import login, switch_rls
from tests.odd_settings import ODD, make_odd
from tests.sources.relay.judge import Judge
from tests.sources.relay.running import Run, agrees, append, settled
from tests.waiting import eventually
from tidemark.common.errors import Refused
from tidemark.sources.writer import Writer


def test_facts_are_sent_whatever_the_database_defaults_to(
    ready: str,
    run: Run,
    judge: Judge,
    sql: psycopg.Connection,
) -> None:
    """The service's session keeps its own settings, through `tidemark.append` too."""
    make_odd(ready)
    run()
    facts = append(sql, 3)
    with psycopg.connect(ready, autocommit=True) as service:
        facts.add(Writer().append(service, "orders", {"text": "a\\b'ü"}))
        for name in ("DateStyle", "TimeZone", "row_security", "standard_conforming_strings"):
            assert service.execute(f"show {name}".encode()).fetchone() == (ODD[name],)
    eventually(lambda: settled(sql))
    agrees(judge, sql, facts)


def test_a_relay_holds_facts_that_are_hidden_from_it(
    ready: str,
    run: Run,
    judge: Judge,
    sql: psycopg.Connection,
) -> None:
    """Row level security on the outbox, without a policy, while the relay runs: nothing of it is told as void, and all
    of it is sent once it is off."""
    with login(sql, ready, "relaying", "tidemark_relay") as address:
        relay = run(dsn=address)
        facts = append(sql, 2)
        eventually(lambda: settled(sql))
        switch_rls(sql, "tidemark", "enable", "^append_outbox$")
        facts |= append(sql, 3)
        eventually(lambda: relay.metric("tidemark_relay_active") == 0)
        assert judge.verdict().announced["orders"] == {1, 2}
        assert judge.verdict().position("orders", "shop") == 2
        switch_rls(sql, "tidemark", "disable")
        eventually(lambda: settled(sql))
        agrees(judge, sql, facts)
        relay.stop()


def test_a_relay_starts_on_no_database_that_hides_rows(ready: str, run: Run, sql: psycopg.Connection) -> None:
    """It names table, role and privilege, and no version of the schema."""
    with login(sql, ready, "relaying", "tidemark_relay") as address:
        switch_rls(sql, "tidemark", "enable")
        failure = run(dsn=address).ended()
        assert isinstance(failure, Refused)
        assert 'hides rows of table "relay_schema_version" from role "relaying"' in failure.problem
        assert 'ALTER ROLE "relaying" BYPASSRLS' in failure.do


def test_functions_refuse_what_is_hidden_from_their_owner(ready: str, sql: psycopg.Connection) -> None:
    """FORCE hides rows from the owner too, as whom they run; `drop_stream` would drop facts that it does not see."""
    with login(sql, ready, "making") as address:
        sql.execute("grant all on schema tidemark to making")
        for (table,) in sql.execute(
            "select oid::regclass::text from pg_class where relnamespace = 'tidemark'::regnamespace and relkind = 'r'"
        ).fetchall():
            sql.execute(f"alter table {table} owner to making".encode())
        for (function,) in sql.execute(
            "select oid::regprocedure::text from pg_proc where pronamespace = 'tidemark'::regnamespace"
        ).fetchall():
            sql.execute(f"alter routine {function} owner to making".encode())
        sql.execute("grant all on all sequences in schema tidemark to making")
        with psycopg.connect(make_conninfo(address), autocommit=True) as service:
            assert Writer().append(service, "orders", 1) == 1
            switch_rls(sql, "tidemark", "enable")
            assert Writer().append(service, "orders", 1) == 2
            switch_rls(sql, "tidemark", "force")
            with pytest.raises(Refused, match="NO FORCE ROW LEVEL SECURITY"):
                Writer().append(service, "orders", 1)
            for call in ("drop_stream('orders')", "retire_writer('', 'orders')", "append_beat('orders')"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
                    service.execute(f"select tidemark.{call}".encode())
            switch_rls(sql, "tidemark", "no force")
            assert Writer().append(service, "orders", 1) == 3
            assert service.execute("show row_security").fetchone() == ("on",)


def test_every_function_that_runs_as_its_owner_refuses_hidden_rows(sql: psycopg.Connection) -> None:
    """Also one that a later migration replaces, by which it loses the settings that it had."""
    rows = sql.execute(
        "select proname from pg_proc where pronamespace = 'tidemark'::regnamespace and prosecdef"
        " and not 'row_security=off' = any (coalesce(proconfig, '{}'))"
    )
    assert rows.fetchall() == []
