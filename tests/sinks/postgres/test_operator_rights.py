"""What an operator's login may do to the record of overrides: add to it, and rewrite nothing.

It has the roles tidemark_operator and tidemark_reader, which every verb needs.
"""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tidemark.common.errors import BadRecord
from tidemark.common.postgres_session import PostgresSession
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.operators import LoggedOverride, OverrideLog, PolicyTable
from tidemark.streaming.core.effects import OperatorOverride

SKIP = OperatorOverride("w", 1, "SKIP", 5, 6, "eve", "it hangs")


@pytest.fixture
def logins(dsn: str, sql: psycopg.Connection) -> Iterator[dict[str, PostgresSession]]:
    """Two operators, by name."""
    sessions = {}
    for name in ("eve", "mallory"):
        sql.execute(f"create role {name} login password '{name}' in role tidemark_operator, tidemark_reader".encode())
        sessions[name] = session_of(make_conninfo(dsn, user=name, password=name), "test")
    yield sessions
    for name, session in sessions.items():
        session.close()
        sql.execute(f"drop owned by {name}".encode())
        sql.execute(f"drop role {name}".encode())


@pytest.fixture
def noted(logins: dict[str, PostgresSession]) -> LoggedOverride:
    """An override of eve's that was sent."""
    act = OverrideLog(logins["eve"]).log("s", SKIP)
    OverrideLog(logins["eve"]).note_sent(act, "control", 0, 7)
    return act


def test_outcome_is_written_once_by_who_began(
    logins: dict[str, PostgresSession], noted: LoggedOverride, sql: psycopg.Connection
) -> None:
    """Neither another operator nor eve herself can say later that something else came of it."""
    with pytest.raises(BadRecord, match="another login"):
        OverrideLog(logins["mallory"]).note_outcome(noted, "refused")
    OverrideLog(logins["eve"]).note_outcome(noted, "applied")
    for login in logins.values():
        with pytest.raises(BadRecord, match="already stored"):
            OverrideLog(login).note_outcome(noted, "refused")
        with pytest.raises(BadRecord, match="already stored"):
            OverrideLog(login).note_sent(noted, "control", 0, 9)
    assert sql.execute('select outcome, "offset" from tidemark.overrides').fetchall() == [("applied", 7)]


@pytest.mark.parametrize(
    "statement",
    [
        "update tidemark.overrides set outcome = 'refused'",
        'update tidemark.overrides set "offset" = 9',
        "update tidemark.overrides set seen_as = 'zoe'",
        "delete from tidemark.overrides",
        "truncate tidemark.overrides",
        "insert into tidemark.overrides (kind, stream, writer, epoch, prev, id, by, why, outcome)"
        " values ('SKIP', 's', 'w', 0, 0, 1, 'x', 'y', 'applied')",
        "insert into tidemark.policies values ('s', 'gap_seconds', 3)",
        "update tidemark.policies set value = 3",
        "delete from tidemark.policies",
        "delete from tidemark.skips",
        "update tidemark.late_resolved set act = 1",
        "update tidemark.replays set act = 1",
        "insert into tidemark.late_resolved select 1, number from tidemark.overrides",
        "insert into tidemark.replays select 'facts', 0, 1, number from tidemark.overrides",
    ],
)
def test_record_is_append_only_by_rights(
    logins: dict[str, PostgresSession], noted: LoggedOverride, dsn: str, statement: str
) -> None:
    """In plain SQL, without any code of ours."""
    with (
        psycopg.connect(make_conninfo(dsn, user="mallory", password="mallory"), autocommit=True) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement.encode())


def test_override_of_another_login_has_no_replay_and_no_late_completion_added(
    logins: dict[str, PostgresSession], sql: psycopg.Connection
) -> None:
    """An operator attaches what an override is about to an override of the same login and kind alone, and once."""
    overrides = {
        kind: OverrideLog(logins["eve"]).log("s", OperatorOverride("w", 1, kind, 5, 6, "eve", "mended")).number
        for kind in ("REPLAY", "RESOLVE", "SKIP")
    }
    replay, resolved = "select tidemark.note_replay(%s, 'facts', 2, %s)", "select tidemark.note_resolved(%s, %s)"
    for statement in (replay, resolved):
        for number in overrides.values():
            assert logins["mallory"].fetch_value(statement, (number, 40)) is None
        assert logins["eve"].fetch_value(statement, (overrides["SKIP"], 40)) is None
    assert logins["eve"].fetch_value(replay, (overrides["RESOLVE"], 40)) is None
    assert logins["eve"].fetch_value(resolved, (overrides["REPLAY"], 40)) is None
    assert logins["eve"].fetch_value(replay, (overrides["REPLAY"], 40)) is True
    assert logins["eve"].fetch_value(replay, (overrides["REPLAY"], 40)) is None
    assert logins["eve"].fetch_value(resolved, (overrides["RESOLVE"], 7)) is True
    assert sql.execute('select "offset", act from tidemark.replays').fetchall() == [(40, overrides["REPLAY"])]
    assert sql.execute("select number, act from tidemark.late_resolved").fetchall() == [(7, overrides["RESOLVE"])]


def test_policy_is_changed_with_an_audit_entry(logins: dict[str, PostgresSession], sql: psycopg.Connection) -> None:
    """The function that changes it writes the entry; it names the login, and what was before."""
    PolicyTable(logins["eve"]).change("s", {"gap_seconds": 3}, "eve", "slow")
    number, done = PolicyTable(logins["mallory"]).change("s", {"gap_seconds": None, "silent_seconds": 9}, "m", "back")
    assert done == "gap_seconds: 3 -> not set, silent_seconds: not set -> 9"
    assert sql.execute("select setting, value, act from tidemark.policies").fetchall() == [
        ("silent_seconds", 9, number)
    ]
    assert sql.execute("select kind, seen_as, outcome from tidemark.overrides order by number").fetchall() == [
        ("POLICY", "eve", "gap_seconds: not set -> 3"),
        ("POLICY", "mallory", done),
    ]
