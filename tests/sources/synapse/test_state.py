"""What the bridge remembers, on a real database, and what Tidemark makes of the records that it leaves."""

from collections.abc import Iterator, Sequence

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.sources.relay.world import Core
from tests.sources.synapse.turns import take_turn
from tidemark.common.errors import BadSetting, PrerequisitePending, Refused
from tidemark.sources.synapse import evidence, state, tables, timelines
from tidemark.sources.synapse import evidence as published_facts
from tidemark.sources.synapse.decider import UNBOUNDED, ProvenAdvance, StreamFact
from tidemark.sources.synapse.evidence import PublishedFacts
from tidemark.sources.synapse.state import StreamProgress, SynapseServer
from tidemark.sources.synapse.tables import STREAMS

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


def sent_upto(sql: psycopg.Connection) -> Core:
    """What Tidemark makes of all that was left, in its order."""
    core = Core("events")
    core.take([each.value for each in state.read_outbox(sql, {"events": 0})])
    return core


PUBLISHED = PublishedFacts(0)
"""Of tests in which no other history is looked for."""


def has_begun(sql: psycopg.Connection, floor: int = 7) -> StreamProgress:
    return state.create_stream(sql, EVENTS, "events", SERVER, WRITERS, floor)[0]


def fact(id: int, writer: str) -> StreamFact:
    """Its mark is its own."""
    return StreamFact(id, writer, ['["a"]', '["b"]'], frozenset({id * 1000}))


def other(id: int, writer: str) -> StreamFact:
    """Another fact of that ID."""
    return StreamFact(id, writer, ['["c"]'], frozenset({id * 1000 + 1}))


def advance(writer: str, prev: int, id: int, *ids: int, unseen: bool = False) -> ProvenAdvance:
    return ProvenAdvance(writer, prev, id, [fact(at, writer) for at in ids], unseen)


def advance_stream(
    sql: psycopg.Connection, known: StreamProgress, advances: Sequence[ProvenAdvance], place: str
) -> StreamProgress:
    return state.advance_stream(sql, known, PUBLISHED, advances, place, max(advance.id for advance in advances))


def begun(
    sql: psycopg.Connection, server: SynapseServer = LATER, head: int = 100, table: Sequence[StreamFact] = ()
) -> StreamProgress:
    return found_again(sql, server, head, table)[0]


def found_again(
    sql: psycopg.Connection, server: SynapseServer, head: int, table: Sequence[StreamFact]
) -> tuple[StreamProgress, PublishedFacts]:
    found = timelines.load_progress(
        sql, EVENTS, "events", server, head, lambda low, top: [it for it in table if low < it.id <= top]
    )
    assert found is not None
    return found


def test_a_stream_that_was_never_told_is_not_known(sql: psycopg.Connection) -> None:
    """Its writers join together, and what lies below was never announced."""
    assert timelines.load_progress(sql, EVENTS, "events", SERVER, 100, lambda low, top: []) is None
    has_begun(sql)
    core = sent_upto(sql)
    assert (core.line, core.positions, core.unseen) == (7, {"event1": 7, "event2": 7}, {"event1": 7, "event2": 7})


def test_who_comes_after_goes_on_where_the_dead_one_was(sql: psycopg.Connection) -> None:
    """By what is written down, whether it was sent or not; and Tidemark has each fact once, with its rows."""
    known = advance_stream(sql, has_begun(sql), [advance("event1", 7, 9, 8), advance("event2", 7, 9, 9)], "0/200")
    assert begun(sql) == known
    again = advance_stream(sql, begun(sql), [advance("event1", 9, 12, 10, 12), advance("event2", 9, 12)], "0/300")
    assert again.sent_upto == {"event1": 12, "event2": 12}
    core = sent_upto(sql)
    assert core.line == 12
    assert core.writers == {8: "event1", 9: "event2", 10: "event1", 12: "event1"}
    assert {*core.facts.values()} == {2}
    assert (core.rejected, core.late) == ({}, 0)


def test_of_two_that_speak_at_once_one_begins_anew(sql: psycopg.Connection) -> None:
    """Whoever lost its turn unaware finds that its place was moved, and writes nothing."""
    known = has_begun(sql)
    advance_stream(sql, known, [advance("event1", 7, 9, 8)], "0/200")
    with pytest.raises(PrerequisitePending):
        advance_stream(sql, known, [advance("event2", 7, 9), advance("event1", 7, 8, 8)], "0/200")
    assert begun(sql).sent_upto == {"event1": 9, "event2": 7}
    assert sent_upto(sql).writers == {8: "event1"}


def test_what_may_be_missing_is_unseen(sql: psycopg.Connection) -> None:
    """What is known is told, the rest of the range is settled by a JOIN of the next epoch, and the line goes on."""
    known = advance_stream(
        sql, has_begun(sql), [advance("event1", 7, 12, 9, 11, unseen=True), advance("event2", 7, 12)], "0/2"
    )
    known = advance_stream(sql, known, [advance("event1", 12, 13, 13), advance("event2", 12, 13)], "0/3")
    core = sent_upto(sql)
    assert (core.line, core.unseen["event1"], core.writers) == (13, 12, dict.fromkeys((9, 11, 13), "event1"))
    assert (core.rejected, core.late, core.timelines) == ({}, 0, [])


def test_a_writer_that_is_found_later_joins_at_the_line(sql: psycopg.Connection) -> None:
    known = advance_stream(sql, has_begun(sql), [advance("event1", 7, 9, 8), advance("event2", 7, 9)], "0/200")
    state.add_writer(sql, known, "event3", 9)
    assert sent_upto(sql).positions == {"event1": 9, "event2": 9, "event3": 9}
    assert begun(sql).sent_upto["event3"] == 9


def test_what_nobody_waited_for_is_late(sql: psycopg.Connection) -> None:
    """Facts of a writer that is found when the line has passed them reach readers all the same, as late ones."""
    known = advance_stream(sql, has_begun(sql), [advance("event1", 7, 12, 8), advance("event2", 7, 12)], "0/200")
    known = state.add_writer(sql, known, "event3", 12)
    assert begun(sql) == known
    assert known.backlog_starts == {"event3": 7}
    known = state.send_backlog(
        sql, known, PUBLISHED, "event3", [StreamFact(9, "event3", ["1"]), StreamFact(11, "event3", ["2"])]
    )
    assert begun(sql) == known
    core = sent_upto(sql)
    assert (core.late_ids, core.line, core.rejected, known.backlog_starts) == ({9, 11}, 12, {}, {})


def test_a_writer_that_retired_is_waited_for_no_more(sql: psycopg.Connection) -> None:
    """The line goes on without it; heard again it joins in a later epoch, not below where it ended."""
    known = advance_stream(sql, has_begun(sql), [advance("event1", 7, 12, 8), advance("event2", 7, 9, 9)], "0/200")
    assert state.request_retirement(sql, "event1", None) == ["events"]
    assert state.request_retirement(sql, "event2", "events") == []
    assert (state.read_requested_retirements(sql, "events"), state.read_retired_id(sql, "event1", "events")) == (
        ["event1"],
        None,
    )
    known = state.retire(sql, known, "event1")
    assert begun(sql) == known
    assert (known.sent_upto, known.retired_at_ids) == ({"event2": 9}, {"event1": 12})
    assert (state.read_retired_id(sql, "event1", "events"), state.request_retirement(sql, "event1", None)) == (12, [])
    known = advance_stream(sql, known, [advance("event2", 9, 15, 15)], "0/300")
    core = sent_upto(sql)
    assert (core.line, core.retired, core.rejected) == (15, {"event1"}, {})
    known = state.add_writer(sql, known, "event1", 15)
    assert begun(sql) == known
    assert (known.backlog_starts, known.retired_at_ids) == ({"event1": 12}, {})
    known = state.send_backlog(sql, known, PUBLISHED, "event1", [StreamFact(14, "event1", ["1"])])
    advance_stream(sql, known, [advance("event1", 15, 17, 16), advance("event2", 15, 17)], "0/400")
    core = sent_upto(sql)
    assert (core.line, core.retired, core.late_ids, core.rejected, core.timelines) == (17, set(), {14}, {}, [])


def test_a_writer_that_was_heard_does_not_retire(sql: psycopg.Connection) -> None:
    """Whoever waits for its end is told so."""
    has_begun(sql)
    state.request_retirement(sql, "event1", "events")
    state.cancel_retirement(sql, "events", "event1")
    with pytest.raises(BadSetting, match=r"event1 is alive: .* in events; first stop the worker"):
        state.read_retired_id(sql, "event1", "events")
    with pytest.raises(BadSetting, match="the stream events has no writer event9; for its writers, run: "):
        state.read_retired_id(sql, "event9", "events")


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
    """At the last fact that it still has; and what it gives out again is told again."""
    advance_stream(sql, has_begun(sql), [advance("event1", 7, 9, 8, 9), advance("event2", 7, 9)], "0/200")
    known = begun(sql, server, head, [fact(8, "event1")])
    at = 8
    assert known.sent_upto == {"event1": at, "event2": at}
    assert begun(sql, server, 100) == known
    advance_stream(sql, known, [advance("event1", at, 12, 11), advance("event2", at, 12)], "0/400")
    core = sent_upto(sql)
    assert {id for id, _ in core.timelines} == {at}
    assert (core.line, core.rejected) == (12, {})


PROMOTED = SynapseServer("one/2", "0/500", "one.test")


def test_a_standby_that_lagged_is_joined_where_it_agrees(sql: psycopg.Connection) -> None:
    """Workers wrote there before the bridge was back, past all that was told: what they wrote in place of what was
    published is late, the rest is told as ever, and nothing that both have is told twice."""
    known = advance_stream(
        sql, has_begun(sql), [advance("event1", 7, 25, *range(8, 26)), advance("event2", 7, 25)], "0/200"
    )
    table = [*(fact(id, "event1") for id in range(8, 18)), *(other(id, "event2") for id in range(18, 34))]
    known, published = found_again(sql, PROMOTED, 33, table)
    assert known.sent_upto == {"event1": 17, "event2": 17}
    again = ProvenAdvance("event2", 17, 33, [other(id, "event2") for id in range(18, 34)])
    state.advance_stream(sql, known, published, [again, advance("event1", 17, 33)], "0/600", 33)
    core = sent_upto(sql)
    assert (core.line, core.late_ids, core.rejected) == (33, {*range(18, 26)}, {})
    assert {id: core.writers[id] for id in range(18, 34)} == dict.fromkeys(range(18, 34), "event2")


def test_a_standby_that_has_everything_repeats_nothing(sql: psycopg.Connection) -> None:
    known = advance_stream(
        sql, has_begun(sql), [advance("event1", 7, 25, *range(8, 26)), advance("event2", 7, 25)], "0/200"
    )
    known, _ = found_again(sql, PROMOTED, 40, [fact(id, "event1") for id in range(8, 26)])
    assert known.sent_upto == {"event1": 25, "event2": 25}


def test_a_database_that_has_no_fact_of_before_is_told_from_the_floor(sql: psycopg.Connection) -> None:
    """Nothing shows which IDs are given out again."""
    advance_stream(sql, has_begun(sql), [advance("event1", 7, 25, *range(8, 26)), advance("event2", 7, 25)], "0/200")
    assert begun(sql, PROMOTED, 40, [other(id, "event1") for id in range(8, 41)]).sent_upto == {
        "event1": 7,
        "event2": 7,
    }


def test_what_older_bridges_told_is_remembered_from_the_table(sql: psycopg.Connection) -> None:
    """As long as nothing shows that its history is another one."""
    advance_stream(sql, has_begun(sql), [advance("event1", 7, 12, 8), advance("event2", 7, 9, 9)], "0/200")
    sql.execute("update tidemark.synapse_streams set facts_since = null")
    sql.execute("delete from tidemark.synapse_facts")
    table = [fact(8, "event1"), fact(9, "event2"), fact(11, "event2"), fact(12, "")]
    _, published = found_again(sql, LATER, 20, table)
    assert [published.contains(it) for it in table] == [True, True, False, False]
    assert begun(sql, PROMOTED, 20, table[:2]).sent_upto == {"event1": 9, "event2": 9}


def test_of_older_facts_few_are_remembered(sql: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """They show the history of a database that has none of the newest."""
    monkeypatch.setattr(published_facts, "MAX_FACTS", 10)
    monkeypatch.setattr(published_facts, "_TRIM_MARGIN", 0)
    known, published = state.create_stream(sql, EVENTS, "events", SERVER, WRITERS, 7)
    facts = [fact(id, "event1") for id in range(8, 100)]
    known = state.advance_stream(sql, known, published, [ProvenAdvance("event1", 7, 99, facts)], "0/200", 99)
    evidence.trim(sql, "events", published)
    assert (len(published), published.since_id) == (10, 89)
    assert sql.execute("select min(id), count(*) from tidemark.synapse_facts").fetchone() == (8, 10 + 82)
    restored, published = found_again(sql, PROMOTED, 120, [it for it in facts if it.id < 60])
    assert (restored.sent_upto["event1"], published.since_id) == (57, 57)


def test_a_sequence_that_was_seen_higher_went_back(sql: psycopg.Connection) -> None:
    """Though it has given out more than was told."""
    known, published = state.create_stream(sql, EVENTS, "events", SERVER, WRITERS, 7)
    known = state.advance_stream(sql, known, published, [advance("event1", 7, 12, 8)], "0/200", 50)
    assert begun(sql, LATER, 50, [fact(8, "event1")]) == known
    assert begun(sql, LATER, 40, [fact(8, "event1")]).timeline != known.timeline


def test_what_came_below_is_late(sql: psycopg.Connection) -> None:
    """Of a writer that lives, one that is behind others, and one that has retired."""
    known, published = state.create_stream(sql, EVENTS, "events", SERVER, WRITERS, 7)
    advances = [advance("event1", 7, 15, 8, 15), advance("event2", 7, 12)]
    known = state.advance_stream(sql, known, published, advances, "0/200", 20)
    known = state.retire(sql, known, "event1")
    table = [fact(8, "event1"), fact(9, "event2"), fact(10, "event1"), fact(14, "event2"), fact(15, "event1")]
    late = published.find_unpublished(table, known.all_sent_upto)
    assert [it.id for it in late] == [9, 10]
    state.publish_late(sql, known, published, late)
    assert published.find_unpublished(table, known.all_sent_upto) == []
    assert (begun(sql), sent_upto(sql).rejected) == (known, {})
    assert {9, 10} <= sent_upto(sql).late_ids


def test_rows_that_others_had_the_ids_of_begin_a_timeline(sql: psycopg.Connection) -> None:
    """Whatever head, server and log say: IDs were given out again."""
    known, published = state.create_stream(sql, EVENTS, "events", SERVER, WRITERS, 7)
    known = state.advance_stream(sql, known, published, [advance("event1", 7, 15, 8, 15)], "0/200", 20)
    assert begun(sql, LATER, 30, [fact(8, "event1"), fact(15, "event1")]) == known
    restored = begun(sql, LATER, 30, [fact(8, "event1"), other(15, "event1")])
    assert (restored.timeline.after, restored.sent_upto["event1"]) == (known.timeline.start, 8)


DAY = 86_400_000


def test_rows_are_as_old_as_the_samples_allow(sql: psycopg.Connection) -> None:
    """What was given out beyond a head is younger than the moment before which it was read."""
    has_begun(sql)
    samples = evidence.HeadSamples.load(sql, "events")
    assert samples.kept_above(100 * DAY, 6 * 86_400) == UNBOUNDED
    for day, head in ((100, 10), (103, 40), (105, 60)):
        samples.note(sql, day * DAY, head, 6 * 86_400)
        samples.note(sql, day * DAY + 1000, head + 5, 6 * 86_400)  # once an hour
    assert samples.kept_above(106 * DAY, 6 * 86_400) == 10
    again = evidence.HeadSamples.load(sql, "events")
    assert [again.kept_above(day * DAY, 6 * 86_400) for day in (106, 107, 110, 112, 104, 90)] == [
        10, 40, 60, UNBOUNDED, 10, UNBOUNDED,
    ]  # fmt: skip


def test_two_synapses_need_names_of_their_own(sql: psycopg.Connection) -> None:
    """The streams of one do not go on with those of the other, whose bridge came first."""
    has_begun(sql)
    with pytest.raises(
        BadSetting, match=r"the stream events belongs to one\.test: set another prefix for the streams of two\.test"
    ):
        begun(sql, SynapseServer("two", "0/300", "two.test"))


def test_database_of_another_synapse_is_refused(sql: psycopg.Connection) -> None:
    """By the names of its users; one that has none says nothing."""
    sql.execute("create table users (name text)")
    tables.check_server(sql, "one.test")
    sql.execute("insert into users values ('@alice:two.test:8448')")
    tables.check_server(sql, "two.test:8448")
    with pytest.raises(BadSetting, match=r"is one\.test, but the users in .* belong to two\.test:8448"):
        tables.check_server(sql, "one.test")


def test_what_is_no_synapse_or_may_not_be_read_is_told(sql: psycopg.Connection, database: str) -> None:
    """With what to do."""
    sql.execute("create role synapse_stranger login password 'stranger'")
    try:
        with tables.synapse_session(make_conninfo(database, user="synapse_stranger", password="stranger")) as session:
            with pytest.raises(Refused, match="give the DSN of Synapse's own database"), session.use() as connection:
                tables.check_server(connection, "one.test")
            sql.execute("create table users (name text)")
            with pytest.raises(Refused, match=r"users.*grant the user pg_read_all_data"), session.use() as connection:
                tables.check_server(connection, "one.test")
    finally:
        sql.execute("drop role synapse_stranger")


def test_one_speaks_for_a_stream(sql: psycopg.Connection, database: str) -> None:
    """Of sets that have a stream in common too; the next one's turn comes when its session has ended."""
    with psycopg.connect(database, autocommit=True) as other:
        assert take_turn(other, ["events", "caches"])
        assert not take_turn(sql, ["caches", "receipts"])
        assert take_turn(sql, ["receipts"])
        other.execute("select pg_advisory_unlock_all()")
        assert take_turn(sql, ["caches", "receipts"])
