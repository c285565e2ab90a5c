"""What a batch is must not matter: where it is cut, in which order its packets come, and whether it comes twice."""

import random
from collections import Counter
from itertools import pairwise
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming.builders import Record, Sent, Shard, compacted, packets, packing, rejections, sent
from tests.streaming.protocol import Database
from tidemark.streaming.core import effects, writer_table
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.ingest import compact

WRITERS = ("a", "b", "c")


@st.composite
def traffic(draw: st.DrawFn) -> list[Record]:
    """What writers that keep the protocol produce: crashes, retirements and rollbacks among it."""
    database = Database(draw(st.sampled_from([1, -1])), WRITERS)
    topic: list[Record] = []
    ops = st.sampled_from(["reserve"] * 4 + ["commit"] * 4 + ["roll back", "heartbeat", "crash", "retire"])
    for name, op, which in draw(
        st.lists(st.tuples(st.sampled_from(WRITERS), ops, st.integers(0, 5)), min_size=5, max_size=60)
    ):
        process = database.processes[name]
        if not process.alive or op == "crash":
            topic.extend(database.start(name))
        elif op == "reserve":
            database.reserve(name)
        elif op == "commit" and process.open:
            database.commit(name, which)
            topic.extend(database.send(name, -1))
        elif op == "roll back" and process.open:
            topic.extend(database.roll_back(name, which))
        elif op == "heartbeat":
            topic.extend(database.heartbeat(name))
        elif op == "retire" and not process.open:
            topic.extend(database.retire(name))
    return topic


@st.composite
def anything(draw: st.DrawFn) -> list[Record]:
    """Records that may contradict each other in every way, close together so that they do."""
    kinds = st.sampled_from(["RDATA"] * 6 + ["VOID"] * 3 + ["POSITION"] * 2 + ["JOIN"] * 2 + ["RETIRE", "ROW", "OPEN"])
    found = []
    for kind, writer, epoch, prev, width in draw(
        st.lists(
            st.tuples(
                kinds,
                st.sampled_from(WRITERS),
                st.sampled_from([0, 1, 1, 1, 2]),
                st.integers(0, 10),
                st.integers(1, 4),
            ),
            min_size=2,
            max_size=40,
        )
    ):
        edge = kind in ("RDATA", "VOID", "POSITION")
        found.append(
            Record(kind, writer, epoch, prev if edge else 0, prev + width if kind not in ("ROW", "OPEN") else 0)
        )
    return found


cuts = st.lists(st.integers(0, 60), max_size=10)
logs = st.one_of(traffic(), anything())


def cut(log: list[Record], where: list[int]) -> list[list[Sent]]:
    marks = sorted({0, len(log), *(at for at in where if at < len(log))})
    return [sent(log, 0)[first:stop] for first, stop in pairwise(marks)]


def standing(stream: StreamState) -> object:
    """All of a state but the clocks of its gaps, which tell when a batch came."""
    return (
        stream.direction,
        stream.home_partition,
        stream.linear.position,
        list(stream.linear.completed_ids),
        [
            (
                name,
                it.epoch,
                it.retired_at is None,
                it.position,
                it.chain.uncertain_up_to,
                list(it.late_ranges),
                [(span.prev, span.id, span.evidence, span.edge_count) for span in it.chain.pending],
            )
            for name, it in sorted(stream.writers.items())
        ],
        [
            (key, it.retire_id, it.chain.uncertain_up_to, [(span.prev, span.id) for span in it.chain.pending])
            for key, it in sorted(stream.unjoined.items())
        ],
    )


@settings(max_examples=examples(150))
@given(logs, cuts, cuts)
def test_where_a_log_is_cut_into_batches_does_not_matter(log: list[Record], some: list[int], other: list[int]) -> None:
    """Two ways to cut the same log give the same state, the same evidence and the same outcome of each record; also
    where in one of them all writers that can be are packed.
    """
    results = []
    for where, few in ((some, writer_table.UNPACKED_MAX), (other, 0)):
        with packing(few):
            shard = Shard()
            evidence: Counter[tuple[str, str]] = Counter()
            outcomes: Counter[str] = Counter()
            rejected: dict[int, str] = {}
            for batch in cut(log, where):
                done = shard.feed_packets(packets(batch))
                rejected |= rejections(done)
                for stream in done.streams:
                    outcomes.update(stream.counts)
                    for move in stream.advances:
                        for how in ("facts", "empty", "unseen", "skipped"):
                            evidence[move.writer, how] += getattr(move, how)
        results.append((standing(shard.stream()) if log else None, evidence, outcomes, rejected))
    assert results[0] == results[1]


@settings(max_examples=examples(150))
@given(logs, cuts, st.integers(1, 3))
def test_how_much_a_packet_holds_does_not_matter(log: list[Record], where: list[int], edges: int) -> None:
    """Compaction divides what is long, and every effect and state is the same, byte for byte."""
    whole, divided = Shard(), Shard()
    for batch in cut(log, where):
        wanted = whole.feed_packets(compacted(batch))
        with patch.object(compact, "MAX_EDGES", edges):
            made = compacted(batch)
        assert all(len(run.kinds) <= edges or len(packet.runs) == 1 for packet in made for run in packet.runs)
        assert effects.encode(divided.feed_packets(made)) == effects.encode(wanted)
        assert divided.states == whole.states


@given(traffic(), cuts, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=5))
def test_records_that_come_again_change_nothing(
    log: list[Record], where: list[int], again: list[tuple[int, int]]
) -> None:
    """Rule 5: a part of the log that is produced twice is counted as duplicates and zombies, and moves nothing."""
    shard = Shard()
    for batch in cut(log, where):
        shard.feed(*(item.record for item in batch))
    if not log:
        return
    before = standing(shard.stream())
    for at, count in again:
        first = at % len(log)
        replayed = log[first : first + count]
        done = shard.feed(*replayed)
        assert not done.advances
        assert set(done.counts) <= {"duplicate"}
        assert set(shard.rejected.values()) <= {"zombie"}
        assert len(shard.rejected) + done.counts.get("duplicate", 0) == len(replayed)
    assert standing(shard.stream()) == before


@given(logs, cuts, st.integers(0, 100))
def test_a_replayed_batch_gives_the_same_bytes(log: list[Record], where: list[int], seed: int) -> None:
    """Same state, packets and time, in whatever order the packets come: the same effects, byte for byte."""
    shard = Shard()
    for batch in cut(log, where):
        twin = Shard(dict(shard.states), now=shard.now)
        shuffled = packets(batch)
        random.Random(seed).shuffle(shuffled)
        assert effects.encode(twin.feed_packets(shuffled)) == effects.encode(shard.feed_packets(packets(batch)))
        assert twin.states == shard.states
