from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.sinks.given import advance, batch, stream
from tests.sinks.sqlite import SqliteSink
from tests.streaming.builders import STREAM, Shard, join, opened, position, rdata, retire
from tests.waiting import eventually
from tidemark.app.pipeline import kafka_lag, metrics
from tidemark.app.pipeline.kafka_lag import LagMonitor
from tidemark.app.pipeline.stream_metrics import StreamCollector, StreamEntry
from tidemark.app.stack.processes import KafkaServer
from tidemark.common.errors import TopicMissing, TopicReplaced
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import TopicIdentity, TopicPlan, Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.chain import Chain, Span
from tidemark.streaming.core.effects import NextOffset, ShardEffects, StreamEffects, Summary, WriterRow
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import LinearPosition, WriterState
from tidemark.streaming.engine.query import pack_by_shard
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Evidence, Policies


def a_backward_stream() -> StreamState:
    """At -4, with -6 complete and -5 not, seen first at 10 s."""
    chain = Chain(4, [Span(5, 6, Evidence(facts=1), 1, since=10_000)])
    return StreamState(
        direction=Direction.BACKWARD, linear=LinearPosition(4), writers=Writers({"importer": WriterState(1, chain)})
    )


def effects(stream: str, *, retired: bool = False, **positions: int) -> ShardEffects:
    rows = [WriterRow(writer, 1, position, retired) for writer, position in positions.items()]
    summary = Summary(0, 0, None, [], 0, None)
    moved = StreamEffects(stream, Direction.FORWARD, 0, 3, 0, 9, [], rows, [], [], [], [], [], [], {}, summary, b"")
    return ShardEffects(0, 0, [moved], [], [NextOffset("facts", 2, 7)])


def loaded(states: Mapping[str, bytes]) -> ShardedStates:
    """As Postgres has them at a start."""
    return ShardedStates(4, pack_by_shard(dict(states), 4))


@pytest.fixture
def scraped() -> tuple[StreamCollector, CollectorRegistry]:
    registry = CollectorRegistry()
    board = StreamCollector(now=lambda: 25.0)
    registry.register(board)
    return board, registry


def test_a_restart_shows_every_stream_without_traffic(scraped: tuple[StreamCollector, CollectorRegistry]) -> None:
    """Rule 7: the age of a gap counts from when it was first seen, as the state remembers it."""
    board, registry = scraped
    board.load(loaded({"history": codec.encode(a_backward_stream())}), {"facts": {0: 5}})
    labels = {"stream": "history"}
    assert registry.get_sample_value("tidemark_oldest_gap_age_seconds", labels) == 15.0
    assert registry.get_sample_value("tidemark_pending_ids", labels) == 1
    assert registry.get_sample_value("tidemark_linear_position", labels) == -4
    assert registry.get_sample_value("tidemark_allocated_position", labels) == -6
    assert registry.get_sample_value("tidemark_position", {**labels, "writer": "importer"}) == -4


def test_who_lost_the_lease_shows_no_stream(scraped: tuple[StreamCollector, CollectorRegistry]) -> None:
    """The new owner does; a gap that it closes would age here for ever. With the lease they come back."""
    board, registry = scraped
    stored, labels = {"history": codec.encode(a_backward_stream())}, {"stream": "history"}
    board.load(loaded(stored), {})
    metrics.set_partition_metrics("facts", 0, end_offset=9, read_offset=5, lag_seconds=0.0, blocked_seconds=0.0)
    board.forget()
    assert registry.get_sample_value("tidemark_oldest_gap_age_seconds", labels) is None
    of_partition = {"topic": "facts", "partition": "0"}
    assert metrics.REGISTRY.get_sample_value("tidemark_kafka_lag_records", of_partition) is None
    board.load(loaded(stored), {})
    assert registry.get_sample_value("tidemark_oldest_gap_age_seconds", labels) == 15.0


def test_a_batch_moves_only_the_writers_that_it_names(scraped: tuple[StreamCollector, CollectorRegistry]) -> None:
    """Writers that a batch did not touch keep their last position."""
    board, registry = scraped
    board.update([effects("orders", web=3, shop=4)])
    board.update([effects("orders", web=5)])
    assert registry.get_sample_value("tidemark_position", {"stream": "orders", "writer": "web"}) == 5
    assert registry.get_sample_value("tidemark_position", {"stream": "orders", "writer": "shop"}) == 4
    assert registry.get_sample_value("tidemark_allocated_position", {"stream": "orders"}) == 9
    assert board.read_offsets == {("facts", 2): 7}


def test_past_their_number_streams_and_writers_share_a_series() -> None:
    """However many there are: the rest is summed, of ages the highest counts, and both are counted."""
    registry = CollectorRegistry()
    board = StreamCollector(now=lambda: 25.0, max_streams=2, max_writers=3)
    registry.register(board)
    board.load(loaded({"s9": codec.encode(a_backward_stream())}), {})
    board.update([effects(f"s{number}", a=number, b=number) for number in range(5)])
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    positions = {tuple(it.labels.values()): it.value for it in samples if it.name == "tidemark_position"}
    assert positions == {
        ("s0", "a"): 0,
        ("s0", "b"): 0,
        ("s1", "a"): 1,
        ("other streams", "other writers"): 1 + 2 * (2 + 3 + 4) - 4,
    }
    ages = {it.labels["stream"]: it.value for it in samples if it.name == "tidemark_oldest_gap_age_seconds"}
    assert ages == {"s0": 0, "s1": 0, "other streams": 15.0}
    assert {it.labels["what"]: it.value for it in samples if it.name == "tidemark_series_omitted"} == {
        "streams": 4,
        "writers": 8,
        "blockers": 0,
    }


BEHIND = Shard().left_by_a_dead_writer().summary
MOVES = st.lists(
    st.tuples(
        st.sampled_from("abcde"),
        st.integers(-9, 9),
        st.dictionaries(st.sampled_from("wxyz"), st.tuples(st.integers(-9, 9), st.booleans()), max_size=3),
        st.booleans(),
        st.sampled_from([None, "a", "d", "c*"]),
    ),
    max_size=30,
)


def moved(name: str, line: int, rows: Mapping[str, tuple[int, bool]], *, behind: bool) -> ShardEffects:
    found = [WriterRow(writer, 1, position, retired) for writer, (position, retired) in rows.items()]
    summary = BEHIND if behind else Summary(0, 0, None, [], 0, None)
    done = StreamEffects(name, Direction.FORWARD, 0, line, 0, 9, [], found, [], [], [], [], [], [], {}, summary, b"")
    return ShardEffects(0, 0, [done], [], [])


@given(moves=MOVES, streams=st.integers(0, 3))
def test_what_is_summed_with_each_batch_is_the_sum(moves: Sequence[Any], streams: int) -> None:
    """Whatever comes and ends: a scrape shows what it would show to who saw the last of each stream alone."""

    def scraped(board: StreamCollector) -> set[tuple[str, tuple[str, ...], float]]:
        families = board.collect()
        return {(it.name, tuple(it.labels.values()), it.value) for family in families for it in family.samples}

    board, policies = StreamCollector(now=lambda: 60.0, max_streams=streams, max_writers=2), Policies()
    last: dict[str, tuple[int, dict[str, tuple[int, bool]], bool]] = {}
    for name, line, rows, behind, policy in moves:
        if policy is not None:
            policies = Policies({policy: {"gap_seconds": 7 + len(policies.by_name)}, **policies.by_name})
            board.set_policies(policies)
        board.update([moved(name, line, rows, behind=behind)])
        _, standing, _ = last.get(name, (0, {}, False))
        standing = {**standing, **rows}
        last[name] = line, {writer: it for writer, it in standing.items() if not it[1]}, behind
        fresh = StreamCollector(now=lambda: 60.0, max_streams=streams, max_writers=2)
        for other, (stands, positions, waits) in last.items():
            fresh.update([moved(other, stands, positions, behind=waits)])
        fresh.set_policies(policies)
        assert scraped(board) == scraped(fresh)


LIVES = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from("wx"), st.sampled_from(["join", "fact", "gap", "retire"])),
    max_size=25,
)


@given(before=LIVES, after=LIVES, most=st.integers(0, 3))
def test_a_board_goes_on_with_what_it_found(before: Sequence[Any], after: Sequence[Any], most: int) -> None:
    """Streams at rest, with gaps, held by strangers and ended: after each batch a scrape shows what it would show to a
    process that starts then."""
    shard, head = Shard(), 0

    def lived(name: str, writer: str, what: str) -> ShardEffects:
        nonlocal head
        head += 2
        made = {
            "join": join(writer, head, epoch=head),
            "fact": rdata(writer, head, head - 1, epoch=epochs.get((name, writer), 1)),
            "gap": rdata(writer, head, epoch=epochs.get((name, writer), 1)),
            "retire": retire(writer, head, epoch=epochs.get((name, writer), 1)),
        }[what]
        if what == "join":
            epochs[name, writer] = head
        return ShardEffects(0, 0, [shard.feed(replace(made, stream=name))], [], [])

    def scraped(board: StreamCollector) -> set[tuple[str, tuple[str, ...], float]]:
        families = board.collect()
        return {(it.name, tuple(it.labels.values()), it.value) for family in families for it in family.samples}

    def started() -> StreamCollector:
        board = StreamCollector(now=lambda: 60.0, max_streams=most, max_writers=2)
        board.set_policies(Policies({"c": {"gap_seconds": 7}}))
        board.load(loaded(shard.states), {})
        return board

    epochs: dict[tuple[str, str], int] = {}
    for life in before:
        lived(*life)
    board = started()
    for life in after:
        board.update([lived(*life)])
        assert scraped(board) == scraped(started())


def test_streams_at_rest_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 8: neither a batch nor a scrape opens one that did not move and has no series of its own."""
    shard = Shard()
    shard.feed(join("w", 0), rdata("w", 1, epoch=1))
    board = StreamCollector(max_streams=3)
    board.load(loaded({f"s{number:04}": shard.states[STREAM] for number in range(2000)}), {})
    opened, open_it = [], StreamEntry.of_state

    def of(stored: bytes) -> StreamEntry:
        opened.append(stored)
        return open_it(stored)

    monkeypatch.setattr(StreamEntry, "of_state", of)
    for _ in range(3):
        board.update([effects("s1999", w=2)])
        assert (
            len(
                {
                    sample.labels["stream"]
                    for it in board.collect()
                    for sample in it.samples
                    if "stream" in sample.labels
                }
            )
            == 4
        )
    assert len(opened) == 4


def test_a_dead_writer_is_named_without_a_gap(scraped: tuple[StreamCollector, CollectorRegistry]) -> None:
    """How far the line is behind in IDs and in seconds, for whom it waits, and how long that one is silent."""
    board, registry = scraped
    shard = Shard()
    board.update([ShardEffects(0, 0, [shard.left_by_a_dead_writer()], [], [])])
    holder = {"stream": "events", "writer": "w1", "reason": "silent"}
    assert registry.get_sample_value("tidemark_linear_lag_ids", {"stream": "events"}) == 13
    assert registry.get_sample_value("tidemark_linear_lag_seconds", {"stream": "events"}) == 23
    assert registry.get_sample_value("tidemark_linear_blocked_seconds", holder) == 23
    assert registry.get_sample_value("tidemark_blocker_last_seen_seconds", holder) == 25 - 1
    board.load(loaded(shard.states), {})
    assert registry.get_sample_value("tidemark_linear_blocked_seconds", holder) == 23
    board.update([ShardEffects(0, 0, [shard.feed(position("w1", 7, 20, epoch=1))], [], [])])
    assert registry.get_sample_value("tidemark_linear_blocked_seconds", holder) is None
    assert registry.get_sample_value("tidemark_linear_lag_ids", {"stream": "events"}) == 0
    assert registry.get_sample_value("tidemark_linear_lag_seconds", {"stream": "events"}) == 0


def test_a_line_that_waits_no_longer_than_a_transaction_takes_makes_no_series() -> None:
    """Else each scrape under traffic would name others."""
    registry = CollectorRegistry()
    board = StreamCollector(now=lambda: 11.0)
    registry.register(board)
    board.load(loaded({"events": Shard().left_by_a_dead_writer().state}), {})
    assert registry.get_sample_value("tidemark_linear_lag_seconds", {"stream": "events"}) == 9
    assert "w1" not in {
        it.labels.get("writer") for family in board.collect() for it in family.samples if "blocked" in it.name
    }


def test_past_their_number_holders_share_a_series() -> None:
    """Those that hold longest are named, whatever their streams are called; the others are counted."""
    registry = CollectorRegistry()
    board = StreamCollector(now=lambda: 60.0, max_streams=1)
    registry.register(board)
    old = Shard().left_by_a_dead_writer()
    young = Shard(now=20_000).left_by_a_dead_writer()
    board.load(loaded({"a": young.state, "z": old.state}), {})
    held = [sample for family in board.collect() for sample in family.samples if "linear_blocked" in sample.name]
    assert [(*it.labels.values(), it.value) for it in held] == [
        ("z", "w1", "silent", 58),
        ("other streams", "other writers", "any", 38),
    ]
    assert registry.get_sample_value("tidemark_series_omitted", {"what": "blockers"}) == 1
    assert registry.get_sample_value("tidemark_linear_lag_ids", {"stream": "other streams"}) == 13


def test_each_copy_has_its_line(store: Postgres, lease: Lease, tmp_path: Path) -> None:
    """Postgres and each sink, as they were compared last, while the lease lasts; streams that ended have none."""
    registry = CollectorRegistry()
    board = StreamCollector(now=lambda: 60.0, max_streams=1)
    registry.register(board)
    board.update([effects(name, web=3) for name in ("a", "b", "c", "ended")])
    board.update([effects("ended", retired=True, web=4)])
    sink = SqliteSink(store, tmp_path / "sink", lease)
    for number, (prev, id) in enumerate([(0, 3), (3, 4)]):
        moved = [stream(name, advance("web", prev, id), linear=id) for name in ("a", "b", "c", "ended")]
        given = batch(number, *moved, token=lease.token)
        committed = store.apply(given)
        if id == 3:
            sink.publish(given, committed)
    sink.refill()

    def lines() -> dict[tuple[str, ...], float]:
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        return {tuple(it.labels.values()): it.value for it in samples if it.name == "tidemark_sink_linear_position"}

    with board.showing_sinks([sink]):
        assert lines() == {
            ("a", "postgres"): 4,
            ("other streams", "postgres"): 8,
            ("a", "sqlite"): 3,
            ("other streams", "sqlite"): 6,
        }
    assert lines() == {}


def test_a_bound_is_shown_from_a_half_on() -> None:
    """By stream, as its policy bounds it, and past their number the fullest of the others. How full each is, is asked
    of the state itself."""
    registry = CollectorRegistry()
    board = StreamCollector(now=lambda: 60.0, max_streams=1)
    registry.register(board)
    board.set_policies(Policies({"a": {"pending_bound": 4}}, {"pending_bound": 5, "completed_bound": 5}))
    shard = Shard()
    edges = [rdata("web", id, epoch=1) for id in (3, 5, 7)]
    done = shard.feed(join("web", 0), *edges, *(rdata(f"new{number}", 9, epoch=1) for number in range(500)))
    board.load(loaded({"a": done.state, "b": done.state, "c": codec.encode(a_backward_stream())}), {})
    for name, used in (
        ("a", {"pending": 3 / 4, "completed": 4 / 5, "unknown": 1 / 2}),
        ("other streams", {"pending": 3 / 5, "completed": 4 / 5, "unknown": 1 / 2}),
    ):
        for bound, ratio in used.items():
            found = registry.get_sample_value("tidemark_bound_used_ratio", {"stream": name, "bound": bound})
            assert found == ratio, (name, bound)


def test_what_alerts_compare_with_is_the_streams_own() -> None:
    """Of streams that share a series the least; a stream with a policy of its own is the last to lose its series."""
    registry = CollectorRegistry()
    board = StreamCollector(now=lambda: 60.0, max_streams=1)
    registry.register(board)
    board.set_policies(
        Policies({"z": {"gap_seconds": 9, "behind_ids": 3}, "b*": {"gap_seconds": 7}}, {"gap_seconds": 8})
    )
    board.load(loaded(dict.fromkeys(("a", "b", "z"), codec.encode(a_backward_stream()))), {})

    def shown(setting: str, stream: str) -> float | None:
        return registry.get_sample_value(f"tidemark_policy_{setting}", {"stream": stream})

    assert [shown("gap_seconds", stream) for stream in ("z", "other streams", "a", "b")] == [9, 7, None, None]
    assert [shown("silent_seconds", stream) for stream in ("z", "other streams")] == [60, 60]
    assert [shown("linear_lag_ids", stream) for stream in ("z", "other streams")] == [3, None]
    board.set_policies(Policies())
    assert [shown("gap_seconds", stream) for stream in ("a", "other streams", "z")] == [120, 120, None]


def test_who_retired_has_no_series_any_more(scraped: tuple[StreamCollector, CollectorRegistry]) -> None:
    """A writer's ends as it retires, and the stream's with its last one; they come back when they move again."""
    board, registry = scraped
    board.update([effects("orders", web=3, shop=4)])
    board.update([effects("orders", retired=True, web=3)])
    assert registry.get_sample_value("tidemark_position", {"stream": "orders", "writer": "web"}) is None
    assert registry.get_sample_value("tidemark_linear_position", {"stream": "orders"}) == 3
    board.update([effects("orders", retired=True, shop=4)])
    assert registry.get_sample_value("tidemark_linear_position", {"stream": "orders"}) is None
    board.update([effects("orders", web=5)])
    assert registry.get_sample_value("tidemark_position", {"stream": "orders", "writer": "web"}) == 5


def test_a_topic_that_is_made_anew_is_noticed_at_run_time(
    kafka: KafkaServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records are others: the failure names the topic and what to do, although offsets and partitions fit."""
    monkeypatch.setattr(kafka_lag, "CHECK_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(kafka_lag, "MAX_MISSING_CHECKS", 10_000)
    connection = KafkaConnection(kafka.bootstrap_servers)
    topics, admin = Topics(connection), AdminClient(connection.client_settings())
    topics.create_missing([TopicPlan(prefix, 1, 1000)])
    board = StreamCollector()
    board.read_offsets[prefix, 0] = 0
    with LagMonitor(Topics(connection), topics.identities([prefix]), board).running() as noticing:
        admin.delete_topics([prefix])[prefix].result(30)
        eventually(lambda: topics.create_missing([TopicPlan(prefix, 1, 1000)]), 30, lambda: "the new topic")
        eventually(lambda: noticing.failure, 30, lambda: "the failure")
    assert isinstance(noticing.failure, TopicReplaced)
    assert "--accept loss" in str(noticing.failure)


def test_a_topic_that_stays_away_is_noticed_at_run_time(
    kafka: KafkaServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first answer: a broker that has just started may not know its topics yet."""
    monkeypatch.setattr(kafka_lag, "CHECK_INTERVAL_SECONDS", 0.05)
    connection = KafkaConnection(kafka.bootstrap_servers)
    absent = {prefix: TopicIdentity("some", 1)}
    with LagMonitor(Topics(connection), absent, StreamCollector()).running() as noticing:
        eventually(lambda: noticing.failure, 30, lambda: "the failure")
    assert isinstance(noticing.failure, TopicMissing)


class _RestartingTopics(Topics):
    """While `is_restarting`, every second query of the topics goes to a port on which no broker listens."""

    def __init__(self, connection: KafkaConnection) -> None:
        super().__init__(connection)
        self._unreachable = Topics(KafkaConnection("127.0.0.1:1"), 0.1)
        self.queries, self.is_restarting = 0, True

    def identities(self, names: Iterable[str]) -> dict[str, TopicIdentity]:
        self.queries += 1
        if self.is_restarting and self.queries % 2 == 0:
            return self._unreachable.identities(names)
        return super().identities(names)


def test_a_topic_is_missing_only_after_consecutive_checks(
    kafka: KafkaServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that Kafka does not answer begins the count again: the brokers restart, and may not list all topics."""
    monkeypatch.setattr(kafka_lag, "CHECK_INTERVAL_SECONDS", 0.01)
    topics = _RestartingTopics(KafkaConnection(kafka.bootstrap_servers))
    absent = {prefix: TopicIdentity("some", 1)}
    with LagMonitor(topics, absent, StreamCollector()).running() as noticing:
        eventually(lambda: noticing.failure or topics.queries > 4 * kafka_lag.MAX_MISSING_CHECKS, 30)
        assert noticing.failure is None
        topics.is_restarting = False
        eventually(lambda: noticing.failure, 30, lambda: "the failure")
    assert isinstance(noticing.failure, TopicMissing)


def test_a_source_that_misses_its_heartbeat_or_holds_back_has_a_series() -> None:
    """From the states at a start, too: but no heartbeat is missed that no pipeline could have read."""
    clock, shard = [1000.0], Shard(now=1_000_000)
    shard.feed(join("shop", 0), rdata("shop", 1, epoch=1), opened("shop", heartbeat=30))
    registry, board = CollectorRegistry(), StreamCollector(now=lambda: clock[0])
    registry.register(board)
    series = {"stream": STREAM, "writer": "shop"}

    def values() -> list[float | None]:
        names = "tidemark_source_silent_seconds", "tidemark_source_blocked_seconds"
        return [registry.get_sample_value(name, series) for name in names]

    clock[0] = 5000.0
    board.load(loaded(shard.states), {})
    clock[0] = 5065.0
    assert values() == [None, None]
    clock[0] = 5066.0
    assert values() == [5066.0 - 1001, None]
    shard.now = 5_066_000
    done = shard.feed(opened("shop", heartbeat=30, blocked="the sequence has a CACHE"))
    board.set_kafka_answers(is_answering=False)
    assert values() == [None, None]
    board.set_kafka_answers(is_answering=True)
    clock[0] = 5131.0
    assert values() == [None, None]
    clock[0] = 5132.0
    assert values() == [5132.0 - 1001, None]
    board.update([ShardEffects(0, 0, [done], [], [])])
    clock[0] = 5077.0
    assert values() == [None, 10.0]
    done = shard.feed(rdata("shop", 2, epoch=1), opened("shop"))
    board.update([ShardEffects(0, 0, [done], [], [])])
    assert values() == [None, None]
