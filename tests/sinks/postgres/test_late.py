"""Late completions as operators list and resolve them, on a real server."""

import json
from collections.abc import Iterator

import psycopg
import pytest
from click.testing import CliRunner, Result

from tests.sinks.given import batch, stream
from tidemark.app.cli import main
from tidemark.common.errors import BadRecord, StreamNotKnown
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.inspect import LateCompletions
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core.effects import LateCompletion


@pytest.fixture
def late(store: Postgres, lease: Lease, dsn: str) -> Iterator[LateCompletions]:
    """Of stream s two, of t one."""
    completions = [LateCompletion("w", 3, prev, id, 1, "skipped") for prev, id in ((4, 6), (8, 9))]
    store.apply(batch(1, stream("s", late=completions), stream("t", late=completions[:1]), token=lease.token))
    with session_of(dsn, "test") as session:
        yield LateCompletions(session)


def run(dsn: str, *words: str) -> Result:
    return CliRunner(env={"TIDEMARK_POSTGRES_DSN": dsn}).invoke(main, ["late", *words])


def test_each_is_resolved_once_and_all_or_none(late: LateCompletions, sql: psycopg.Connection) -> None:
    """An act for each; one that was resolved before takes the others back."""
    newest, oldest = late.newest("s", 9, with_resolved=False)
    assert (oldest.prev, oldest.id, newest.prev, newest.id, newest.act) == (4, 6, 8, 9, None)
    (resolved,) = late.resolve([newest], "ada", "booked by hand")
    assert late.newest("s", 9, with_resolved=False) == [oldest]
    with pytest.raises(BadRecord, match="is resolved already"):
        late.resolve([oldest, newest], "bob", "me too")
    assert late.newest("s", 9, with_resolved=True) == [resolved, oldest]
    columns = "number, kind, stream, writer, epoch, prev, id, by, seen_as = session_user, outcome"
    assert sql.execute(f"select {columns} from tidemark.overrides").fetchall() == [
        (resolved.act, "RESOLVE", "s", "w", 3, 8, 9, "ada", True, "applied"),
    ]
    assert len(late.newest(None, 9, with_resolved=False)) == 2


def test_a_number_of_another_stream_is_none(late: LateCompletions) -> None:
    """And a stream that nobody knows is no stream of which nothing is late."""
    (other,) = late.newest("t", 9, with_resolved=False)
    assert late.with_numbers("s", [other.number]) == []
    with pytest.raises(StreamNotKnown):
        late.newest("typo", 9, with_resolved=False)


def test_scripts_see_by_the_exit_code_what_is_left(late: LateCompletions, dsn: str) -> None:
    """3 with `--check` while any is left; 2 without anybody to ask; 1 for what is not there or resolved before."""
    assert run(dsn, "list").exit_code == 0
    assert run(dsn, "list", "t", "--check").exit_code == 3
    (number,) = (str(it["number"]) for it in json.loads(run(dsn, "list", "t", "--json").stdout)["late"])
    by = ("--by", "ada", "--why", "booked by hand")
    assert run(dsn, "resolve", "t", number, *by).exit_code == 2
    assert run(dsn, "resolve", "s", number, *by, "--yes").exit_code == 1
    assert run(dsn, "resolve", "t", number, *by, "--dry-run").exit_code == 0
    assert len(json.loads(run(dsn, "resolve", "t", number, *by, "--dry-run", "--json").stdout)["late"]) == 1
    done = run(dsn, "resolve", "t", number, *by, "--yes")
    assert (done.exit_code, "resolved 1 late completion, logged as override" in done.output) == (0, True)
    assert run(dsn, "resolve", "t", number, *by, "--yes").exit_code == 1
    assert run(dsn, "list", "t", "--check").output == "no unresolved late completions\n"
    assert "override " in run(dsn, "list", "t", "--all").output
    assert run(dsn, "list", "typo", "--check").exit_code == 1
