"""Plain streams are advanced all at once, and nobody can tell: each batch gives the same effects and states, byte for
byte, as when every stream is fed run by run.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming.builders import (
    STREAM,
    Record,
    Sent,
    Shard,
    compacted,
    forced,
    join,
    opened,
    packets,
    packing,
    position,
    rdata,
    retire,
    sent,
    skip,
    void,
)
from tests.streaming.protocol import Database
from tests.streaming.test_batch_cuts import WRITERS, anything, cut, cuts
from tidemark.streaming.core import batch as batches
from tidemark.streaming.core import codec, effects, writer_table
from tidemark.streaming.core.chain import EMPTY_RANGES_MAX
from tidemark.streaming.core.fast_path import advance_in_order, read_if_caught_up
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import MAX_ID


class Twins:
    """A shard as it is, and one that takes no stream for plain; `plain` counts the streams that were."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.shard, self.slow = Shard(bounds=bounds or Bounds()), Shard(bounds=bounds or Bounds())
        self.plain = 0
        self._next = 0

    def feed(self, batch: list[Sent], *, runs: bool) -> None:
        made = compacted(batch) if runs else packets(batch)

        def counted(*given: object) -> object:
            found = advance_in_order(*given)  # type: ignore[arg-type]
            self.plain += len(found)
            return found

        with patch.object(batches, "advance_in_order", counted):
            done = self.shard.feed_packets(made)
        with patch.object(batches, "advance_in_order", lambda *_: {}):
            wanted = self.slow.feed_packets(made)
        assert done == wanted
        assert effects.encode(done) == effects.encode(wanted)
        assert self.shard.states == self.slow.states
        for stored in self.shard.states.values():
            stream = codec.decode(stored)
            signed, summary = stream.direction.signed, effects.summarize(stream)
            positions = {name: signed(it.position) for name, it in stream.writers.items() if it.retired_at is None}
            if summary == effects.Summary(0, 0, None, [], 0, None, sources=summary.sources):
                at_rest = (signed(stream.linear.position), positions, summary.sources)
                assert read_if_caught_up(stored) in (None, at_rest)
            else:
                assert read_if_caught_up(stored) is None

    def send(self, *records: Record) -> int:
        """One batch; gives how many streams were plain in it."""
        before, batch = self.plain, sent(records, self._next)
        self._next += len(batch)
        self.feed(batch, runs=True)
        return self.plain - before


EDGES = ("RDATA", "VOID", "POSITION")


@st.composite
def calm(draw: st.DrawFn) -> list[Record]:
    """What writers that keep the protocol produce where transactions are short, so that most batches are plain."""
    database = Database(draw(st.sampled_from([1, -1])), WRITERS)
    log = [record for name in WRITERS for record in database.start(name)]
    ops = st.sampled_from(["fact"] * 8 + ["void", "heartbeat", "reserve", "commit", "restart", "retire", "restore"])
    for name, op, which in draw(
        st.lists(st.tuples(st.sampled_from(WRITERS), ops, st.integers(0, 2)), min_size=5, max_size=50)
    ):
        process = database.processes[name]
        if op == "restore":
            database.restore(max(0, database.last_value - which), told=True)
        elif not process.alive or op == "restart":
            log.extend(database.start(name))
        elif op == "heartbeat":
            log.extend(database.heartbeat(name))
        elif op == "retire" and not process.open:
            log.extend(database.retire(name))
        elif op == "commit" and process.open:
            database.commit(name, which)
            log.extend(database.send(name, -1))
        else:
            database.reserve(name)
            if op == "fact":
                database.commit(name, -1)
                log.extend(database.send(name, -1))
            elif op == "void":
                log.extend(database.roll_back(name, -1))
    return log


@st.composite
def disturbed(draw: st.DrawFn) -> list[Record]:
    """The same with some records that do not keep it, in two streams."""
    log = draw(calm())
    changes = [
        "again",
        "writer",
        "epoch",
        "partition",
        "sign",
        "void",
        "position",
        "further",
        "inside",
        "skip",
        "retire",
    ]
    changes.append("lost")
    for name, at, near, change in draw(
        st.lists(
            st.tuples(st.sampled_from(WRITERS), st.integers(1, 10), st.integers(0, 80), st.sampled_from(changes)),
            max_size=3,
        )
    ):
        edges = [place for place, record in enumerate(log) if record.kind in EDGES]
        if not edges:
            break
        place = edges[near % len(edges)]
        it = log[place]
        made = {
            "again": it,
            "writer": replace(it, writer=name),
            "epoch": replace(it, epoch=it.epoch + 1),
            "partition": replace(it, partition=1),
            "sign": replace(it, prev=-it.prev, id=-it.id),
            "void": replace(it, kind="VOID"),
            "position": replace(it, kind="POSITION"),
            "further": replace(it, kind="POSITION", prev=it.id, id=it.id + 3 * (1 if it.id > 0 else -1)),
            "inside": replace(it, kind="RDATA", id=it.prev + (1 if it.id > 0 else -1)),
            "skip": skip(it.writer, it.prev, it.id, it.epoch),
            "retire": forced(retire(it.writer, it.id, it.epoch)),
        }
        if change == "lost":
            del log[place]
        else:
            log.insert(place + at, made[change])
    other = draw(st.integers(0, 20))
    return [replace(it, stream="others") if n % 20 < other else it for n, it in enumerate(log)]


logs = st.one_of(calm(), disturbed(), disturbed(), anything())


@given(log=logs, where=cuts, few=st.sampled_from([1, writer_table.UNPACKED_MAX]), runs=st.booleans())
@settings(max_examples=examples(200))
def test_a_plain_stream_is_like_any_other(log: list[Record], where: list[int], few: int, *, runs: bool) -> None:
    """Rule 5, rule 10: whatever comes, and wherever it is cut."""
    twins = Twins(Bounds(retired=1, retirement_ms=4000))
    with packing(few):
        for batch in cut(log, where):
            twins.feed(batch, runs=runs)


def two_writers() -> Twins:
    """At 3 and 4 of their stream."""
    twins = Twins()
    twins.send(join("a", 0), join("b", 0))
    twins.send(rdata("a", 1, 0, 1), rdata("b", 2, 0, 1), rdata("a", 3, 1, 1), rdata("b", 4, 2, 1))
    return twins


def test_runs_that_continue_are_plain() -> None:
    """Facts, voids and announcements; by one writer, by both, in whatever order they complete."""
    twins = two_writers()
    assert twins.plain == 1  # also the first batch behind the JOINs, which tells the direction
    assert twins.send(rdata("a", 5, 3, 1))
    assert twins.send(rdata("b", 7, 4, 1), void("a", 5, 6, 1), position("b", 7, 7 + 1, 1), rdata("a", 8, 6, 1))
    assert twins.send(void("a", 8, 9, 1), void("a", 9, 10, 1))
    assert twins.send(void("a", 10, 11, 1))
    assert twins.send(rdata("a", 12, 11, 1))
    assert twins.shard.stream().linear.position == 12


def test_many_voids_are_remembered_as_far_as_any() -> None:
    """Also where they come one at a time; and so is what lies inside edges of facts."""
    twins = two_writers()
    for id in range(5, 140, 3):
        assert twins.send(void("a", id - 2, id, 1), rdata("a", id + 1, id, 1), rdata("b", id + 2, id - 1, 1))
    for name in ("a", "b"):
        assert len(twins.shard.stream().writers[name].chain.empty_ranges) == EMPTY_RANGES_MAX


def test_of_many_edges_in_one_batch_the_newest_are_remembered() -> None:
    """Rule 10: what lies inside them can be contradicted, as far as any other range."""
    twins = two_writers()
    edges = [rdata(name, id, id - 2, 1) for id in range(5, 205, 2) for name, id in (("a", id), ("b", id + 1))]
    assert twins.send(*edges)
    kept = twins.shard.stream().writers["a"].chain.empty_ranges
    assert [*kept][-1] == (201, 202)
    assert len(kept) == EMPTY_RANGES_MAX
    assert twins.send(*(rdata(name, id, id - 2, 1) for name, id in (("a", 205), ("b", 206))))


def test_when_a_writer_was_seen_last_is_no_later_than_the_batch() -> None:
    """And no earlier than it was: Kafka's time may go back."""
    twins = two_writers()
    for now in (-997, -990, -999):
        twins.shard.now = twins.slow.now = now
        position = twins.shard.stream().writers["a"].position
        assert twins.send(rdata("a", twins.shard.stream().linear.position + 1, position, 1))


def test_runs_that_came_in_another_order_are_not_plain() -> None:
    """Though they are one chain in the end: what waited meanwhile may have found no room."""
    twins = Twins(Bounds(pending=1))
    twins.send(join("a", 0))
    for records in ([2, 1], [6, 8, 5, 7]):
        before, batch = twins.plain, sent([rdata("a", id, id - 1, 1) for id in records], 10 * max(records))
        twins.feed(batch, runs=False)
        assert twins.plain == before
        twins.feed(sent([rdata("a", 3, 2, 1), rdata("a", 4, 3, 1)], 50), runs=False)


def test_what_a_writer_says_of_its_transactions_stays() -> None:
    """Until it says otherwise."""
    twins = two_writers()
    twins.send(opened("b", "one"), opened("a", "another"))
    assert twins.send(rdata("a", 5, 3, 1))
    assert twins.shard.stream().transactions == {"a": ["another"], "b": ["one"]}


def test_a_stream_at_rest_is_read_without_its_objects() -> None:
    """With the retired ones among its writers; a gap, or an idle writer behind it, is more to be told."""
    twins = two_writers()
    assert read_if_caught_up(twins.shard.states[STREAM]) == (4, {"a": 3, "b": 4}, [])
    twins.send(retire("b", 4))
    assert read_if_caught_up(twins.shard.states[STREAM]) == (4, {"a": 3}, [])
    twins.send(position("a", 3, 9, 1))
    assert read_if_caught_up(twins.shard.states[STREAM]) == (9, {"a": 9}, [])
    twins.send(rdata("a", 11, 10, 1))
    assert read_if_caught_up(twins.shard.states[STREAM]) is None


def test_ids_of_any_size_are_told_apart() -> None:
    """Those of two streams too."""
    high = 2**62
    twins = Twins()
    joins = [replace(join(name, high), stream=stream) for stream in ("s", "t") for name in ("a", "b")]
    edges = [rdata("a", high + 1, high, 1), rdata("b", high + 2, high, 1)]
    twins.send(*joins)
    assert twins.send(*(replace(it, stream=stream) for stream in ("s", "t") for it in edges)) == 2
    both = [rdata("a", high + 3, high + 1, 1), rdata("b", high + 3, high + 2, 1)]
    assert twins.send(*(replace(it, stream=stream) for stream in ("s", "t") for it in both)) == 0


def test_no_stream_reaches_so_far_that_others_cannot_be_told_apart() -> None:
    """One that goes to the highest ID there is takes nothing from those beside it."""
    twins = Twins()
    joins = [replace(join(name, 0), stream=stream) for stream in ("s", "t") for name in ("a", "b")]
    twins.send(replace(join("a", 0), stream="r"), *joins)
    edges = [replace(it, stream=stream) for stream in ("s", "t") for it in (rdata("a", 1, 0, 1), rdata("b", 2, 0, 1))]
    twins.send(replace(position("a", 0, MAX_ID, 1), stream="r"), *edges)
    assert {name: codec.decode(stored).linear.position for name, stored in twins.shard.states.items()} == {
        "r": MAX_ID,
        "s": 2,
        "t": 2,
    }


@pytest.mark.parametrize(
    ("why", "records"),
    [
        ("a gap of its own", [rdata("a", 6, 5, 1)]),
        ("another's open ID", [rdata("a", 6, 3, 1)]),
        ("an announcement beyond what is complete", [position("a", 3, 9, 1)]),
        ("a repetition", [rdata("a", 5, 3, 1), rdata("b", 4, 2, 1)]),
        ("one ID of two", [rdata("a", 5, 3, 1), rdata("b", 5, 4, 1)]),
        ("an ID that the line has passed", [rdata("a", 4, 3, 1)]),
        ("a later epoch", [rdata("a", 5, 3, 2)]),
        ("an earlier one", [rdata("a", 5, 3, 0)]),
        ("a stranger", [rdata("a", 5, 3, 1), rdata("c", 6, 0, 1)]),
        ("the other direction", [rdata("a", -5, -3, 1)]),
        ("another partition", [replace(rdata("a", 5, 3, 1), partition=1)]),
        ("two partitions", [rdata("a", 5, 3, 1), replace(rdata("b", 6, 4, 1), partition=1)]),
        ("a marker", [rdata("a", 5, 3, 1), join("c", 5)]),
        ("an ID of its own that nobody told", [rdata("b", 5, 4, 1), rdata("a", 6, 5, 1)]),
        ("an operator", [rdata("a", 5, 3, 1), skip("a", 5, 6, beyond=True)]),
        ("a row", [rdata("a", 5, 3, 1), Record("ROW", "a", 1)]),
    ],
)
def test_what_is_not_plain(why: str, records: list[Record]) -> None:
    """It is left to the state machine, and so is the stream until it stands as if nothing had been."""
    assert two_writers().send(*records) == 0, why


GAP = [rdata("a", 7, 6, 1)]


@pytest.mark.parametrize(
    ("why", "standing", "records"),
    [
        ("a gap", GAP, [rdata("b", 5, 4, 1), rdata("b", 6, 5, 1)]),
        ("a gap below an announcement", [position("a", 6, 7, 1)], [rdata("b", 5, 4, 1)]),
        ("a writer that never joined", [rdata("c", 6, 0, 1)], [rdata("a", 5, 3, 1)]),
        ("one that never joined and announces", [position("c", 0, 4, 1)], [rdata("a", 5, 3, 1)]),
        ("an ID above the line", [rdata("b", 6, 4, 1)], [rdata("a", 6, 3, 1)]),
        ("a stretch above the line", [rdata("b", 6, 4, 1)], [rdata("a", 5, 3, 1)]),
        ("an operator's word", [skip("a", 5, 8, beyond=True)], [rdata("a", 5, 3, 1)]),
        ("a database that went back", [join("a", 2, 2)], [rdata("a", 3, 2, 2)]),
        ("the line of the history before", [join("c", 0), join("a", 2, 2)], [rdata("c", 5, 0, 1)]),
        ("a retired writer that goes on", [retire("b", 4)], [rdata("b", 5, 4, 1)]),
        ("IDs of one that has retired", [position("b", 4, 9, 1), retire("b", 9)], [rdata("a", 5, 3, 1)]),
        ("a partition that may be another", [], []),
    ],
)
@pytest.mark.parametrize("few", [1, writer_table.UNPACKED_MAX])
def test_what_stands_in_the_way(few: int, why: str, standing: list[Record], records: list[Record]) -> None:
    """Runs that continue are left to the state machine where the stream itself is not plain."""
    twins = two_writers()
    with packing(few):
        twins.send(*standing)
        for shard in (twins.shard, twins.slow) if not standing else ():
            shard.states = {name: codec.forget_home(stored).whole for name, stored in shard.states.items()}
        assert twins.send(*(records or [rdata("a", 5, 3, 1)])) == 0, why


def test_a_writer_with_much_pending_holds_the_line() -> None:
    """Also where it is packed apart from the others."""
    twins = Twins()
    with packing(1):
        twins.send(join("a", 0), join("b", 0))
        twins.send(rdata("b", 1, 0, 1), position("a", 5, 6, 1))
        assert twins.send(rdata("b", 2, 1, 1)) == 0


def test_writers_that_are_to_be_packed_are_left_to_the_state_machine() -> None:
    """It packs them."""
    twins = two_writers()
    with packing(1):
        assert [twins.send(rdata("a", id, id - (2 if id == 5 else 1), 1)) for id in (5, 6)] == [0, 0]


def test_retired_writers_are_passed_by_until_one_is_to_be_forgotten() -> None:
    """Also its IDs count as given out."""
    twins = Twins(Bounds(retired=2, retirement_ms=5000))
    twins.send(join("a", 0), join("b", 0))
    twins.send(rdata("b", 1, 0, 1), retire("b", 1), rdata("a", 2, 0, 1))
    assert [twins.send(rdata("a", id, id - 1, 1)) for id in range(3, 9)] == [1, 1, 1, 1, 0, 1]
    assert len(twins.shard.stream().writers) == 1
