"""The bridge beside a real Synapse whose database breaks its promises: nothing is lost, and what is wrong is named."""

from collections.abc import Callable

import psycopg
from confluent_kafka.admin import AdminClient
from msgspec import Raw

from tests.sources.relay.test_oversized import limited
from tests.sources.synapse.site import SynapseSite
from tests.waiting import eventually
from tidemark.sinks.reader import Positions, Reader, Table
from tidemark.sources.synapse import state
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Open, Rdata

WRITERS = ("--writers", "events=event1,event2")
COPY = """
    insert into events
    select (jsonb_populate_record(e, jsonb_build_object('event_id', '$late', 'stream_ordering', %s::bigint))).*
    from events e where instance_name = 'event1' and stream_ordering > 0 limit 1
"""


def logged(site: SynapseSite, reported_positions: str) -> Callable[[], bool]:
    def found() -> bool:
        site.follower.follow()
        return any(reported_positions in site.home.log(bridge.name).read_text() for bridge in site.bridges)

    return found


def sent_upto(site: SynapseSite) -> bool:
    """Everything that the table has beyond the floor was published, up to the head."""
    site.follower.follow()
    core = site.follower.core
    rows = {id: writer for id, writer in site.rows().items() if id > site.floor}
    assert not core.rejected, core.rejected
    return core.line == site.head() and rows.items() <= core.writers.items()


def begun(site: SynapseSite) -> str:
    """A room of event1 once the bridge follows."""
    room = site.room_of("event1")
    site.bridge(*WRITERS)
    eventually(lambda: site.checked() and site.floor, 60, site.known)
    site.server.send(room, "alice", "first")
    eventually(lambda: sent_upto(site), 60, site.known)
    return room


def test_fact_that_completes_below_what_was_published_is_late(site: SynapseSite) -> None:
    """As of a second process with the name of a worker, whose transaction nobody spoke of."""
    begun(site)
    room, core = site.room_of("event2"), site.follower.core
    row = site.sql.execute("select nextval('events_stream_seq')").fetchone()
    assert row is not None
    site.server.send(room, "alice", "goes on")
    eventually(lambda: sent_upto(site) and core.line > row[0], 60, site.known)
    site.sql.execute(COPY, [row[0]])
    try:
        eventually(logged(site, "below published positions"), 30, site.known)
        eventually(lambda: sent_upto(site) and core.late_ids == {row[0]}, 30, site.known)
        assert core.timelines == []
    finally:
        site.sql.execute("delete from events where event_id = '$late'")


def test_sequence_that_is_set_back_under_a_connection_begins_a_timeline(site: SynapseSite) -> None:
    """It is noticed at the next look and logged, and what follows is told."""
    room, core = begun(site), site.follower.core
    head = site.head()
    site.sql.execute("select setval('events_stream_seq', %s)", [head - 2])
    try:
        eventually(logged(site, "a new timeline of the stream begins"), 30, site.known)
        eventually(lambda: sent_upto(site) or bool(core.timelines), 30, site.known)
        assert [id for id, _ in core.timelines] == [head - 2]
    finally:
        site.sql.execute("select setval('events_stream_seq', %s)", [head])
    site.server.send(room, "alice", "goes on")
    eventually(lambda: sent_upto(site), 60, site.known)
    assert len(core.timelines) == 1


def test_filtered_session_tells_nothing(site: SynapseSite) -> None:
    """Row level security under a running bridge: what is committed meanwhile is not void, the privilege is named."""
    room, core = begun(site), site.follower.core
    before = core.line
    site.sql.execute("alter table events enable row level security")
    try:
        site.server.send(room, "alice", "hidden")
        eventually(logged(site, "BYPASSRLS"), 30, site.known)
        site.wait(1)
        assert max(core.line, core.positions["event1"]) <= before
    finally:
        site.sql.execute("alter table events disable row level security")
    site.settle()


def test_record_that_is_too_large_holds_its_stream_alone(site: SynapseSite) -> None:
    """It is named with its ID, other streams go on, and it goes out once the topic takes it."""
    large = Rdata(stream="receipts", writer="master", epoch=1, prev=1, id=7, row=Raw(b'"' + b"x" * 1_500_000 + b'"'))
    with psycopg.connect(site.variables["TIDEMARK_POSTGRES_DSN"], autocommit=True) as own:
        state.append_outbox(own, "receipts", [large])
        site.bridge(*WRITERS, "--stream", "events", "--stream", "receipts")
        room = site.room_of("event1")
        eventually(logged(site, "too large for the Kafka topic"), 60, site.known)
        eventually(lambda: site.checked() and site.floor, 60, site.known)
        site.server.send(room, "alice", "goes on")
        eventually(lambda: sent_upto(site), 60, site.known)
        (line,) = (it for it in site.home.log("bridge-0").read_text().splitlines() if "too large for the Kafka" in it)
        assert "stream=receipts" in line
        assert "id=7" in line
        assert [it.stream for it in state.read_outbox(own, {"events": 0, "receipts": 0})][:1] == ["receipts"]
        admin = AdminClient({"bootstrap.servers": site.variables["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]})
        limited(admin, site.variables["TIDEMARK_KAFKA_FACTS_TOPIC"], 2_000_000)
        eventually(lambda: not state.read_outbox(own, {"receipts": 0}), 60, site.known)


def test_outlier_that_becomes_regular_reaches_the_documented_reader(
    site: SynapseSite, redis_url: str, dsn: str
) -> None:
    """Its second stream ID is in a table of its own (docs/how-to/synapse.md), in the order of all events."""
    room, core = begun(site), site.follower.core
    row = site.sql.execute(
        "insert into ex_outlier_stream (event_stream_ordering, event_id, state_group, instance_name)"
        " select nextval('events_stream_seq'), event_id, 1, 'event1' from events where room_id = %s limit 1"
        " returning event_stream_ordering, event_id",
        [room],
    ).fetchone()
    assert row is not None
    site.server.send(room, "alice", "goes on")
    eventually(lambda: sent_upto(site) and row[0] in core.facts, 60, site.known)
    regular = Table("ex_outlier_stream", id="event_stream_ordering", writer="instance_name")
    source = site.variables["TIDEMARK_SYNAPSE_DSN"]
    with (
        Positions(redis_url) as positions,
        Reader(positions, "events", regular, name="search-regular", source=source, effects=dsn) as reader,
    ):
        (found,) = next(iter(reader)).rows
    assert (found["event_stream_ordering"], found["event_id"]) == row


def blocked(site: SynapseSite) -> str | None:
    """Why the bridge publishes nothing new, by its newest report; None before the first."""
    site.follower.follow()
    reports = [it for value in site.follower.values if isinstance(it := records.decode(value), Open)]
    return reports[-1].blocked if reports else None


def test_sequence_with_a_cache_is_reported_to_readers(site: SynapseSite) -> None:
    """With the statement that repairs it, until it is repaired: in an OPEN, for `tidemark gaps` and the page."""
    room = begun(site)
    site.sql.execute("alter sequence events_stream_seq cache 20")
    try:
        repair = "alter sequence events_stream_seq increment 1 cache 1 no cycle"
        eventually(lambda: repair in (blocked(site) or ""), 60, site.known)
    finally:
        site.sql.execute("alter sequence events_stream_seq cache 1")
    eventually(lambda: blocked(site) == "", 60, site.known)
    site.server.send(room, "alice", "goes on")
    site.settle()
