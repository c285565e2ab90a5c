"""`tidemark reseed`: what the next start of the pipeline begins with."""

import json

import psycopg
import pytest
from click.testing import CliRunner, Result

from tests.app.sidecar.given import At, moved
from tests.sinks.reader.given import Pipeline
from tidemark.app.cli import main
from tidemark.app.verbs import reseed as reseeding
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres, RememberedSetup


def reseed(dsn: str, *words: str, shards: int = 8) -> Result:
    variables = {"TIDEMARK_POSTGRES_DSN": dsn, "TIDEMARK_SHARDS": str(shards)}
    return CliRunner(env=variables).invoke(main, ["reseed", "--by", "ada", "--why", "state of last year", *words])


def test_a_stopped_pipeline_begins_with_what_postgres_holds(
    pipeline: Pipeline, lease: Lease, store: Postgres, dsn: str, sql: psycopg.Connection
) -> None:
    """The number of shards is the new one, and the states stay as they are. A dry run changes nothing."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    pipeline.publish(moved("events", 7, w1=At(0, 7)))
    store.remember_setup(RememberedSetup(16, {}))
    lease.close()
    before = store.states()

    done = reseed(dsn, "--dry-run")
    said = "streams that the next start loads from Postgres: 2\nshards: 8 instead of 16\n"
    assert (done.exit_code, done.stdout) == (0, said)
    assert (store.states(), store.remembered_setup().shard_count) == (before, 16)

    assert sql.execute("select count(*) from tidemark.overrides").fetchall() == [(0,)]

    done = reseed(dsn)
    assert (done.exit_code, done.stdout) == (0, f"{said}logged as override 1\n")
    assert sql.execute("select kind, stream, by, why, seen_as, outcome from tidemark.overrides").fetchall() == [
        ("RESEED", "", "ada", "state of last year", "postgres", "applied")
    ]
    shown = CliRunner(env={"TIDEMARK_POSTGRES_DSN": dsn}).invoke(main, ["overrides", "show", "1"])
    assert shown.stdout.splitlines()[0] == "RESEED of all streams"
    assert store.states() == before
    assert store.remembered_setup().shard_count == 8

    told = json.loads(reseed(dsn, "--json").stdout)
    assert (told["before"], told["shards"]) == (8, 8)


def test_a_pipeline_that_runs_is_named_and_left_alone(
    pipeline: Pipeline, store: Postgres, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 6: two that write one database never work at a time."""
    monkeypatch.setattr(reseeding, "LEASE_TIMEOUT_SECONDS", 0.5)
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    store.remember_setup(RememberedSetup(16, {}))
    done = reseed(dsn)
    assert done.exit_code == 1
    assert "test has the lease: stop the pipeline" in done.output
    assert store.remembered_setup().shard_count == 16
    pipeline.publish(moved("s", 8, w=At(7, 8)))
