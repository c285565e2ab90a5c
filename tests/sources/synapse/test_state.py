"""What the bridge remembers, on a real database, and what Tidemark makes of the records that it leaves."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.sources.relay.world import Core
from tidemark.sources.synapse import looks, retirement, state
from tidemark.sources.synapse.facts import ProvenAdvance, StreamFact
from tidemark.sources.synapse.state import SynapseServer, ToldWriters
from tidemark.sources.synapse.tables import STREAMS
from tidemark.streaming.errors import BadSetting, OthersFirst, Refused

EVENTS = STREAMS["events"]
SERVER = SynapseServer("one", "0/100", "one.test")
LATER = SynapseServer("one", "0/500", "one.test")
WRITERS = ["event1", "event2"]


@pytest.fixture
def sql(database: str) -> Iterator[psycopg.Connection]:
    with state.state_session(database) as session:
        state.SCHEMA.migrate(session)
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


def told(sql: psycopg.Connection) -> Core:
    """What Tidemark makes of all that was left, in its order."""
    core = Core("events")
    core.take([each.value for each in state.unsent(sql, ["events"], 0)])
    return core


def founded(sql: psycopg.Connection, floor: int = 7) -> ToldWriters:
    return state.found(sql, EVENTS, "events", SERVER, WRITERS, floor)


def advance(writer: str, prev: int, id: int, *ids: int, unseen: bool = False) -> ProvenAdvance:
    return ProvenAdvance(writer, prev, id, [StreamFact(at, writer, ['["a"]', '["b"]']) for at in ids], unseen)


def begun(sql: psycopg.Connection, server: SynapseServer = LATER, head: int = 100) -> ToldWriters:
    known = state.begin(sql, EVENTS, "events", server, head)
    assert known is not None
    return known


def test_a_stream_that_was_never_told_is_not_known(sql: psycopg.Connection) -> None:
    """Its writers join together, and what lies below was never announced."""
    assert state.begin(sql, EVENTS, "events", SERVER, 100) is None
    founded(sql)
    core = told(sql)
    assert (core.line, core.positions, core.unseen) == (7, {"event1": 7, "event2": 7}, {"event1": 7, "event2": 7})


def test_who_comes_after_goes_on_where_the_dead_one_was(sql: psycopg.Connection) -> None:
    """By what is written down, whether it was sent or not; and Tidemark has each fact once, with its rows."""
    known = state.tell(sql, founded(sql), [advance("event1", 7, 9, 8), advance("event2", 7, 9, 9)], "0/200")
    assert begun(sql) == known
    again = state.tell(sql, begun(sql), [advance("event1", 9, 12, 10, 12), advance("event2", 9, 12)], "0/300")
    assert again.told == {"event1": 12, "event2": 12}
    core = told(sql)
    assert core.line == 12
    assert core.writers == {8: "event1", 9: "event2", 10: "event1", 12: "event1"}
    assert {*core.facts.values()} == {2}
    assert (core.rejected, core.late) == ({}, 0)


def test_of_two_that_speak_at_once_one_begins_anew(sql: psycopg.Connection) -> None:
    """Whoever lost its turn unaware finds that its place was moved, and writes nothing."""
    known = founded(sql)
    state.tell(sql, known, [advance("event1", 7, 9, 8)], "0/200")
    with pytest.raises(OthersFirst):
        state.tell(sql, known, [advance("event2", 7, 9), advance("event1", 7, 8, 8)], "0/200")
    assert begun(sql).told == {"event1": 9, "event2": 7}
    assert told(sql).writers == {8: "event1"}


def test_what_may_be_missing_is_unseen(sql: psycopg.Connection) -> None:
    """What is known is told, the rest of the range is settled by a JOIN of the next epoch, and the line goes on."""
    known = state.tell(
        sql, founded(sql), [advance("event1", 7, 12, 9, 11, unseen=True), advance("event2", 7, 12)], "0/2"
    )
    known = state.tell(sql, known, [advance("event1", 12, 13, 13), advance("event2", 12, 13)], "0/3")
    core = told(sql)
    assert (core.line, core.unseen["event1"], core.writers) == (13, 12, dict.fromkeys((9, 11, 13), "event1"))
    assert (core.rejected, core.late, core.timelines) == ({}, 0, [])


def test_a_writer_that_is_found_later_joins_at_the_line(sql: psycopg.Connection) -> None:
    known = state.tell(sql, founded(sql), [advance("event1", 7, 9, 8), advance("event2", 7, 9)], "0/200")
    state.introduce(sql, known, "event3", 9)
    assert told(sql).positions == {"event1": 9, "event2": 9, "event3": 9}
    assert begun(sql).told["event3"] == 9


def test_what_nobody_waited_for_is_late(sql: psycopg.Connection) -> None:
    """Facts of a writer that is found when the line has passed them reach readers all the same, as late ones."""
    known = state.tell(sql, founded(sql), [advance("event1", 7, 12, 8), advance("event2", 7, 12)], "0/200")
    known = state.introduce(sql, known, "event3", 12)
    assert begun(sql) == known
    assert known.owed == {"event3": 7}
    known = state.pay(sql, known, "event3", [StreamFact(9, "event3", ["1"]), StreamFact(11, "event3", ["2"])])
    assert begun(sql) == known
    core = told(sql)
    assert (core.late_ids, core.line, core.rejected, known.owed) == ({9, 11}, 12, {}, {})


def test_a_writer_that_retired_is_waited_for_no_more(sql: psycopg.Connection) -> None:
    """The line goes on without it; heard again it joins in a later epoch, not below where it ended."""
    known = state.tell(sql, founded(sql), [advance("event1", 7, 12, 8), advance("event2", 7, 9, 9)], "0/200")
    assert retirement.order(sql, "event1", None) == ["events"]
    assert retirement.order(sql, "event2", "events") == []
    assert (retirement.ordered(sql, "events"), retirement.retired_at(sql, "event1", "events")) == (["event1"], None)
    known = state.retire(sql, known, "event1")
    assert begun(sql) == known
    assert (known.told, known.retired) == ({"event2": 9}, {"event1": 12})
    assert (retirement.retired_at(sql, "event1", "events"), retirement.order(sql, "event1", None)) == (12, [])
    known = state.tell(sql, known, [advance("event2", 9, 15, 15)], "0/300")
    core = told(sql)
    assert (core.line, core.retired, core.rejected) == (15, {"event1"}, {})
    known = state.introduce(sql, known, "event1", 15)
    assert begun(sql) == known
    assert (known.owed, known.retired) == ({"event1": 12}, {})
    known = state.pay(sql, known, "event1", [StreamFact(14, "event1", ["1"])])
    state.tell(sql, known, [advance("event1", 15, 17, 16), advance("event2", 15, 17)], "0/400")
    core = told(sql)
    assert (core.line, core.retired, core.late_ids, core.rejected, core.timelines) == (17, set(), {14}, {}, [])


def test_a_writer_that_was_heard_does_not_retire(sql: psycopg.Connection) -> None:
    """Whoever waits for its end is told so."""
    founded(sql)
    retirement.order(sql, "event1", "events")
    retirement.stays(sql, "events", "event1")
    with pytest.raises(BadSetting, match=r"event1 lives: .* in events; stop it"):
        retirement.retired_at(sql, "event1", "events")


@pytest.mark.parametrize(
    ("server", "head"),
    [
        (SynapseServer("two", "0/300", "one.test"), 100),
        (SynapseServer("one", "0/150", "one.test"), 100),
        (SynapseServer("one", "0/300", "one.test"), 8),
    ],
    ids=["another database", "an older disk", "a sequence that went back"],
)
def test_a_database_that_went_back_begins_a_timeline(sql: psycopg.Connection, server: SynapseServer, head: int) -> None:
    """At what it has given out; and what it gives out again is told again."""
    state.tell(sql, founded(sql), [advance("event1", 7, 9, 8, 9), advance("event2", 7, 9)], "0/200")
    known = begun(sql, server, head)
    at = min(head, 9)
    assert known.told == {"event1": at, "event2": at}
    assert begun(sql, server, 100) == known
    state.tell(sql, known, [advance("event1", at, 12, 11), advance("event2", at, 12)], "0/400")
    core = told(sql)
    assert {id for id, _ in core.timelines} == {at}
    assert (core.line, core.rejected) == (12, {})


def test_two_synapses_need_names_of_their_own(sql: psycopg.Connection) -> None:
    """The streams of one do not go on with those of the other, whose bridge came first."""
    founded(sql)
    with pytest.raises(BadSetting, match=r"stream events is told of one\.test: those of two\.test need"):
        begun(sql, SynapseServer("two", "0/300", "two.test"))


def test_database_of_another_synapse_is_refused(sql: psycopg.Connection) -> None:
    """By the names of its users; one that has none says nothing."""
    sql.execute("create table users (name text)")
    looks.check_server(sql, "one.test")
    sql.execute("insert into users values ('@alice:two.test:8448')")
    looks.check_server(sql, "two.test:8448")
    with pytest.raises(BadSetting, match=r"is one\.test, and the users of \w+ are of two\.test:8448"):
        looks.check_server(sql, "one.test")


def test_what_is_no_synapse_or_may_not_be_read_is_told(sql: psycopg.Connection, database: str) -> None:
    """With what to do."""
    sql.execute("create role synapse_stranger login password 'stranger'")
    try:
        with looks.synapse_session(make_conninfo(database, user="synapse_stranger", password="stranger")) as session:
            with pytest.raises(Refused, match="give the dsn of Synapse's own database"), session.use() as connection:
                looks.check_server(connection, "one.test")
            sql.execute("create table users (name text)")
            with pytest.raises(Refused, match=r"users.*grant the user pg_read_all_data"), session.use() as connection:
                looks.check_server(connection, "one.test")
    finally:
        sql.execute("drop role synapse_stranger")


def test_one_speaks_for_a_stream(sql: psycopg.Connection, database: str) -> None:
    """Of sets that have a stream in common too; the next one's turn comes when its session has ended."""
    with psycopg.connect(database, autocommit=True) as other:
        assert state.has_turn(other, ["events", "caches"])
        assert not state.has_turn(sql, ["caches", "receipts"])
        assert state.has_turn(sql, ["receipts"])
        other.execute("select pg_advisory_unlock_all()")
        assert state.has_turn(sql, ["caches", "receipts"])
