"""What the bridge remembers, on a real database, and what Tidemark makes of the records that it leaves."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.sources.relay.world import Core
from tidemark.sources.synapse import state
from tidemark.sources.synapse.decider import ProvenAdvance, StreamFact
from tidemark.sources.synapse.state import SynapseServer, ToldWriters
from tidemark.sources.synapse.tables import STREAMS
from tidemark.streaming.errors import OthersFirst

EVENTS = STREAMS["events"]
SERVER = SynapseServer("one", "0/100")
LATER = SynapseServer("one", "0/500")
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
    state.introduce(sql, known, "event3", 12, [StreamFact(9, "event3", ["1"]), StreamFact(11, "event3", ["2"])])
    core = told(sql)
    assert (core.late_ids, core.line, core.rejected) == ({9, 11}, 12, {})


@pytest.mark.parametrize(
    ("server", "head"),
    [(SynapseServer("two", "0/300"), 100), (SynapseServer("one", "0/150"), 100), (SynapseServer("one", "0/300"), 8)],
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


def test_one_speaks_for_a_stream(sql: psycopg.Connection, database: str) -> None:
    """Of sets that have a stream in common too; the next one's turn comes when its session has ended."""
    with psycopg.connect(database, autocommit=True) as other:
        assert state.has_turn(other, ["events", "caches"])
        assert not state.has_turn(sql, ["caches", "receipts"])
        assert state.has_turn(sql, ["receipts"])
        other.execute("select pg_advisory_unlock_all()")
        assert state.has_turn(sql, ["caches", "receipts"])
