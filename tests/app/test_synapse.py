"""`tidemark synapse` before it reaches a server: what it tells, and what it refuses with a word."""

import threading

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from tests.fix_synapse import begun_by_a_bridge
from tests.sources.synapse.turns import take_turn
from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.app.synapse import BridgePlan
from tidemark.common.errors import BadSetting
from tidemark.sinks.postgres.status import BridgeStatus
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sources.synapse.channel import SynapseChannel


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (
            BridgePlan("hs", ["typing"]),
            "the stream typing cannot be sent: the stream exists only in its writer's memory",
        ),
        (
            BridgePlan("hs", ["pushers"]),
            "the stream pushers cannot be sent: Tidemark does not support the tables of this stream yet",
        ),
        (
            BridgePlan("hs", ["evnets"]),
            "--stream: 'evnets' is not a stream of Synapse that can be sent; the streams are events, backfill, ",
        ),
        (BridgePlan("hs", ["events"], ["evnets=event1"]), "--writers: 'evnets' is not a stream of Synapse that can be"),
        (BridgePlan("hs", ["events"], ["typing=main"]), "--writers: the stream typing cannot be sent: the stream "),
        (BridgePlan("hs", ["events"], ["event1,event2"]), "'event1,event2' is not a list of workers such as events="),
        (BridgePlan("hs", ["events"], ["events="]), "'events=' is not a list of workers"),
        (
            BridgePlan("hs", ["events"], ["caches=main"]),
            "names streams that are not sent: caches. Add each of them with --stream",
        ),
        (BridgePlan("hs", ["events"], prefix="two words."), "'two words.events' is not a legal name"),
    ],
)
def test_what_cannot_be_told_is_refused_with_a_word(plan: BridgePlan, why: str) -> None:
    """Before any server is asked."""
    with pytest.raises(BadSetting) as refused:
        plan.bridged_streams()
    assert why in str(refused.value)


def test_streams_are_told_once_by_their_prefix() -> None:
    """However often one is named."""
    [events, caches] = BridgePlan("hs", ["events", "caches", "events"], ["events=a,b"], "hs1.").bridged_streams()
    assert (events.name, [*events.writers], caches.name) == ("hs1.events", ["a", "b"], "hs1.caches")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "Missing option '--server-name'"),
        (["--server-name", "hs"], "TIDEMARK_SYNAPSE_DSN: is not set"),
    ],
)
def test_what_is_missing_is_told(words: list[str], why: str) -> None:
    """With exit code 2."""
    done = CliRunner().invoke(main, ["synapse", *words])
    assert (done.exit_code, why in done.output) == (2, True), done.output


def test_a_thread_that_fails_is_no_silence() -> None:
    """What ends the thread that listens ends the process: it would hear nothing for ever."""

    def fail() -> None:
        raise BadSetting("url", "none")

    with SynapseChannel(fail, "hs", threading.Event()) as channel:

        def failed() -> bool:
            try:
                channel.take()
            except BadSetting:
                return True
            return False

        eventually(failed)


def test_which_streams_a_bridge_tells_everybody_may_know_who_may_look(dsn: str, sql: psycopg.Connection) -> None:
    """None before `synapse migrate`; then those that it has begun, and whether one speaks. Since when it does, its own
    user may know. Their writers are named to who mistypes one."""
    looking = make_conninfo(dsn, user="onlooker", password="onlooker")

    def bridges(dsn: str) -> dict[str, BridgeStatus]:
        with Postgres(PostgresConfig(lambda: dsn)) as postgres:
            return postgres.conditions.bridges()

    assert bridges(dsn) == {}
    sql.execute("create role onlooker login password 'onlooker' in role tidemark_reader")
    try:
        assert CliRunner().invoke(main, ["synapse", "migrate"], env={"TIDEMARK_POSTGRES_DSN": dsn}).exit_code == 0
        begun_by_a_bridge(dsn, "hs1.events", "event1")
        said = CliRunner().invoke(main, ["synapse", "retire", "evnet1"], env={"TIDEMARK_POSTGRES_DSN": dsn})
        assert said.output.endswith("no stream has evnet1 and another active writer; active writers are event1\n")
        assert bridges(looking) == {"hs1.events": BridgeStatus(False, None)}
        with psycopg.connect(dsn, autocommit=True) as speaking:
            take_turn(speaking, ["hs2.events"])
            assert bridges(dsn) == {"hs1.events": BridgeStatus(False, None)}
            take_turn(speaking, ["hs1.events", "hs1.caches"])
            assert bridges(looking) == {"hs1.events": BridgeStatus(True, None)}
            since = bridges(dsn)["hs1.events"].since
            assert speaking.execute(
                "select backend_start from pg_stat_activity where pid = pg_backend_pid()"
            ).fetchone() == (since,)
        eventually(lambda: bridges(dsn) == {"hs1.events": BridgeStatus(False, None)})
    finally:
        sql.execute("drop role onlooker")
