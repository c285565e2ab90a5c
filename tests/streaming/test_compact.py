"""Compaction against its naive reference, and what bad, odd and huge input does to it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming import naive_compact as naive
from tests.streaming.builders import Shard, Taken, fetched, packed, ranges
from tests.streaming.naive_compact import CONTROL, FACTS, Message, message
from tests.streaming.test_records import BAD, GOOD
from tidemark.common.errors import BadRecord
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.ingest import compact as edge_chains
from tidemark.streaming.ingest.compact import MAX_FACTS, RangeRecords, compact
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.record_batch import PlannedRange
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds, Reason, shard_of
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Topic
from tidemark.streaming.wire.runs import PackedRuns, Packet

SHARDS = 5
NAMES = {Topic.FACTS: FACTS, Topic.CONTROL: CONTROL}
ODD = [*(value for value, _ in BAD.values()), *GOOD.values()]
decoder = msgspec.msgpack.Decoder(Packet)


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_takes_all() -> Iterator[None]:
    """Also what is few. In the tests of the other modules all is read one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "MIN_COMPILED_BYTES", 0)
        patch.setattr(edge_chains, "MAX_NUMPY_EDGES", 0)
        yield


def rows_of(read: Iterable[RangeRecords], most: int = MAX_FACTS) -> list[tuple[int, bytes]]:
    """Key and packet of each row."""
    batches = compact(read, keys=range(SHARDS), names=NAMES, max_facts=most)
    return [(row["key"], row["packet"]) for batch in batches for row in batch.to_pylist()]


def packets(messages: Sequence[Message], batch_size: int = 10_000, most: int = MAX_FACTS) -> list[tuple[int, Packet]]:
    rows = rows_of(ranges(map(as_taken, messages), batch_size), most)
    return [(key, decoder.decode(packet)) for key, packet in rows]


def compacted(messages: Sequence[Message], batch_size: int = 10_000) -> naive.Compacted:
    return naive.unpack(packet for _, packet in packets(messages, batch_size))


def numbered(records: Iterable[records.Record], first: int = 100) -> list[Message]:
    return [message(record, offset) for offset, record in enumerate(records, first)]


def fact(id: int, prev: int, writer: str = "w", stream: str = "events", epoch: int = 0) -> records.Rdata:
    return records.Rdata(stream=stream, writer=writer, epoch=epoch, prev=prev, id=id, row=records.encode_row({"x": 1}))


# -- random logs: few writer epochs and few IDs, so that edges repeat, touch and overlap


@st.composite
def logs(draw: st.DrawFn) -> list[Message]:
    """A partition's log: offsets ascend with holes, times do not. Bad records are in some, here and there."""
    random = draw(st.randoms(use_true_random=False))
    streams, writers, epochs = ["events", "caches"][: draw(st.integers(1, 2))], "ab"[: draw(st.integers(1, 2))], [1, 0]
    highest, widest = draw(st.integers(2, 40)), draw(st.integers(1, 3))
    kinds = ["RDATA", "VOID", "POSITION", "RUN"] * draw(st.integers(1, 30)) + ["JOIN", "RETIRE", "ROW", "OPEN"]
    odd_in = draw(st.sampled_from([0, 0, 2, 30]))
    offset = draw(st.integers(0, 10))
    log: list[Message] = []
    for _ in range(draw(st.integers(1, 120))):
        sign, prev, width = random.choice([1, 1, -1]), random.randint(0, highest), random.randint(1, widest)
        kind = random.choice(kinds)
        record: dict[str, Any] = {"kind": kind, "stream": random.choice(streams), "writer": random.choice(writers)}
        record |= {"epoch": random.choice(epochs), "prev": sign * prev, "id": sign * (prev + width)}
        record["transactions"] = random.choice([[], ["pid 7"]])
        record["row"] = random.choice([{}, {"a": [1]}, "x", None, [1]]) if odd_in else {}
        if kind == "ROW":
            record |= {"kind": "RDATA", "id": "batch"}
        if width == 1 and kind == "RDATA":
            del record["prev"]
        if kind == "RUN":
            record["ids"], record["rows"] = [], []
            for width in random.choices(range(1, widest + 1), k=random.randint(1, 6)):
                prev += width
                record["ids"].append(sign * prev)
                record["rows"].append([record["row"]] * random.choice([0, 1, 1, 1, 2, 3]))
        value: bytes | None = json.dumps(record).encode()
        key = record["stream"].encode()
        if odd_in and not random.randrange(odd_in):
            value, key = random.choice(ODD), b"events"
        offset += random.choice([1, 1, 1, 5])
        log.append(Message(value, key, offset, random.randint(1000, 1010)))
    return log


@settings(max_examples=examples(300))
@given(logs(), st.integers(1, 130))
def test_fast_and_naive_compaction_agree(log: list[Message], batch_size: int) -> None:
    """Runs, rows, markers and rejected records are those of the record-by-record reference, however Arrow cuts it."""
    assert compacted(log, batch_size) == naive.compact(log)


@st.composite
def logs_with_acts(draw: st.DrawFn) -> list[Message]:
    """A log, and among it what operators force on the control topic."""
    log = draw(logs())
    random = draw(st.randoms(use_true_random=False))
    for at in range(0, len(log), draw(st.integers(3, 40))):
        prev, kind = random.randint(0, 40), random.choice(["SKIP", "SKIP", "SKIP", "JOIN", "RETIRE"])
        stream = random.choice(["events", "caches"])
        act = {"kind": kind, "stream": stream, "writer": random.choice("ab"), "prev": prev, "beyond": True}
        act |= {"id": prev + random.randint(1, 20), "by": "ann", "why": "so"}
        if random.randrange(3):
            act["epoch"] = random.choice([0, 1])
        log.insert(at, replace(log[at], value=json.dumps(act).encode(), key=stream.encode(), topic=CONTROL))
    return log


@settings(max_examples=examples(100))
@given(logs_with_acts(), st.integers(1, 130), st.integers(0, 4), st.integers(1, 10))
def test_runs_on_the_wire_mean_what_their_edges_mean(log: list[Message], cut: int, held: int, completed: int) -> None:
    """A log and the same with a record for each edge have equal effects, in batches that end at the same places: but
    for offsets, and for each dead letter, which is one record and names the first ID that does not fit."""
    whole, apart = (Shard(bounds=Bounds(unjoined=held, completed=completed)) for _ in range(2))
    for first in range(0, len(log), cut):
        batch = log[first : first + cut]
        one = whole.feed_packets(packed(map(as_taken, batch)))
        other = apart.feed_packets(packed(map(as_taken, [part for it in batch for part in parts(it)])))
        assert one.streams == other.streams
        assert dead_letters(one, room=1) == dead_letters(other, ROOM)
        assert at_fault(one, room=1) == at_fault(other, ROOM)


@settings(max_examples=examples(50))
@given(logs(), st.integers(1, 20), st.integers(1, 100))
def test_a_task_that_holds_too_many_facts_says_how_far_it_came(log: list[Message], batch_size: int, most: int) -> None:
    """It takes whole Arrow batches, at least one, until it has too many more than records; what it left comes next."""
    whole, cut = Shard(), Shard()
    left = log
    while left:
        found = [packet for _, packet in packets(left, batch_size, most)]
        done = cut.feed_packets(found)
        (progress,) = done.next_offsets
        taken = [it for it in left if it.offset < progress.offset]
        left = left[len(taken) :]
        assert taken
        assert done.is_cut_short == bool(left)
        before = taken[: (len(taken) - 1) // batch_size * batch_size]  # the last may be a part of one
        assert sum(facts(packet) for _, packet in packets(before)) < len(before) + most
        whole.feed_packets(packed(map(as_taken, taken)))
    assert cut.states == whole.states


def facts(packet: Packet) -> int:
    return sum(len(run.kinds) for run in packet.runs) + sum(len(rows.offsets) // 4 for rows in packet.rows)


def as_taken(it: Message) -> Taken:
    topic = Topic.FACTS if it.topic == FACTS else Topic.CONTROL
    return it.offset, it.time, (topic, it.partition), it.key, it.value


ROOM = 1000  # offsets for the parts of a record


def parts(it: Message) -> Iterator[Message]:
    """The records that say one thing each, at offsets of their own."""
    for part, value in enumerate(singles(it)):
        yield replace(it, value=value, offset=ROOM * it.offset + part)


def dead_letters(done: ShardEffects, room: int) -> set[tuple[str, int]]:
    return {(it.reason, at // room) for it in done.rejected for at in np.frombuffer(it.offsets, np.int64).tolist()}


def at_fault(done: ShardEffects, room: int) -> dict[tuple[str, int], int]:
    """For each dead letter that names one, the ID that does not fit, the first of a record."""
    found: dict[tuple[str, int], int] = {}
    for it in done.rejected:
        offsets, ids = np.frombuffer(it.offsets, np.int64), np.frombuffer(it.ids, np.int64)
        for at, id in zip(offsets.tolist() if len(ids) else [], ids.tolist(), strict=True):
            place = it.reason, at // room
            found[place] = min(id, found.get(place, id), key=abs)
    return found


def singles(it: Message) -> list[bytes | None]:
    try:
        record = records.read(it.value, it.key, Topic.FACTS)
    except BadRecord:
        return [it.value]
    if not isinstance(record, records.FactRun):
        return [it.value]
    whose = {"stream": record.stream, "writer": record.writer, "epoch": record.epoch}
    found: list[dict[str, object]] = []
    for prev, id, rows in zip([record.prev, *record.ids], record.ids, record.rows, strict=False):
        edge = {**whose, "prev": prev, "id": id}
        found.extend({**whose, "kind": "RDATA", "id": "batch", "row": row} for row in rows[:-1])
        found.append({**edge, "kind": "RDATA", "row": rows[-1]} if rows else {**edge, "kind": "VOID"})
    return [msgspec.json.encode(it) for it in found]


@given(logs())
def test_feeding_runs_by_first_offset_is_feeding_records_by_offset(log: list[Message]) -> None:
    """Inside a group, first come first served accepts the same records, whether fed as runs or one by one."""
    runs = sorted(compacted(log).runs, key=lambda run: min(edge.offset for edge in run[1]))
    as_runs = accepted((group, edge) for group, chain, *_ in runs for edge in chain)
    as_records = accepted(
        sorted(((group, edge) for group, chain, *_ in runs for edge in chain), key=lambda at: at[1].offset)
    )
    assert as_runs == as_records


def accepted(arrivals: Iterable[tuple[naive.Group, naive.Edge]]) -> set[tuple[naive.Group, naive.Edge]]:
    taken: dict[naive.Group, list[naive.Edge]] = {}
    for group, edge in arrivals:
        there = taken.setdefault(group, [])
        if not any(edge.overlaps(other) for other in there):
            there.append(edge)
    return {(group, edge) for group, there in taken.items() for edge in there}


@given(logs(), st.integers(1, 130), st.integers(1, 130))
def test_compaction_is_deterministic(log: list[Message], one: int, other: int) -> None:
    """A replayed task gives the same bytes, even where Arrow cuts its batches elsewhere."""
    assert packets(log, one) == packets(log, other)


@contextmanager
def packed_after(edges: int) -> Iterator[None]:
    """Ranges are packed whenever this many edges have been read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_chains, "MAX_UNPACKED_EDGES", edges)
        yield


@given(logs(), st.integers(1, 130), st.integers(1, 130), st.integers(1, 60))
def test_compaction_in_pieces_is_deterministic(log: list[Message], one: int, other: int, edges: int) -> None:
    """The pieces end at the same records, even where Arrow cuts its batches elsewhere. All packets of a range have the
    same next offset."""
    with packed_after(edges):
        found = packets(log, one)
        assert found == packets(log, other)
    assert len({packet.next_offset for _, packet in found}) == 1


@settings(max_examples=examples(100))
@given(logs_with_acts(), st.integers(1, 130), st.integers(1, 60), st.integers(0, 4), st.integers(1, 10))
def test_pieces_of_a_range_have_the_effects_of_the_whole(
    log: list[Message], cut: int, edges: int, unjoined: int, completed: int
) -> None:
    """Batch by batch, and so have the states that they leave.

    Rejected records are left out: a whole range joins their possible facts, so that it is uncertain about more IDs.
    """
    log = [it for it in log if not any(packet.rejected for packet in packed([as_taken(it)]))]
    whole, pieces = (Shard(bounds=Bounds(unjoined=unjoined, completed=completed)) for _ in range(2))
    for first in range(0, len(log), cut):
        batch = log[first : first + cut]
        expected = whole.feed_packets(packed(map(as_taken, batch)))
        with packed_after(edges):
            assert pieces.feed_packets(packed(map(as_taken, batch))) == expected
    assert pieces.states == whole.states


def test_a_large_range_is_packed_in_pieces() -> None:
    """Whole records, as few as have the wanted number of edges; the rest stays for the next piece."""
    ids = [[2, 3, 4], [5, 6], [7], [8, 9]]
    log = numbered(
        records.FactRun(
            stream="events",
            writer="w",
            epoch=0,
            prev=part[0] - 1,
            ids=part,
            rows=[[records.encode_row({})]] * len(part),
        )
        for part in ids
    )
    with packed_after(4):
        found = [[run.ids for run in packet.runs] for _, packet in packets(log)]
    assert [[np.frombuffer(chain, np.int64).tolist() for chain in runs] for runs in found] == [
        [[2, 3, 4, 5, 6]],
        [[7, 8, 9]],
    ]


# -- odd records among others


@pytest.mark.parametrize("name", GOOD)
def test_an_unusual_record_in_a_batch_is_what_it_is_alone(name: str) -> None:
    """Compiled code and the reading of single records agree."""
    log = numbered(fact(id, id - 1, "v") for id in range(1, 100))
    log.append(Message(GOOD[name], b"events", 500))
    found = compacted(log)
    assert found == naive.compact(log)
    assert found.rejected == {}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_costs_itself_and_not_its_batch(name: str) -> None:
    """Rule 5: the bad record is set aside with its reason and offset; its 999 neighbours make one run."""
    value, reason = BAD[name]
    log = numbered(fact(id, id - 1) for id in range(1, 1000))
    log[500:500] = [Message(value, b"events", 5)]
    log = [replace(each, offset=offset) for offset, each in enumerate(log)]
    found = compacted(log)
    assert found.rejected == {reason: [500]}
    ((_, chain, *_),) = found.runs
    assert [edge.id for edge in chain] == list(range(1, 1000))
    assert {edge.offset for edge in chain} == set(range(1000)) - {500}


@pytest.mark.parametrize("key", [None, b"caches"])
def test_a_wrong_key_costs_its_record_only(key: bytes | None) -> None:
    """A record under a null key or another stream's is set aside."""
    log = numbered(fact(id, id - 1) for id in range(1, 10))
    log[3] = replace(log[3], key=key)
    assert compacted(log).rejected == {Reason.KEY_MISMATCH: [103]}


def test_values_that_only_together_make_as_many_records_are_told_apart() -> None:
    """Halves of a record and messages with two are not paired off: the count alone would not notice."""
    whole = records.encode(fact(1, 0))
    log = [Message(value, b"events", at) for at, value in enumerate([whole[:-1], b"}", whole + whole])]
    assert compacted(log).rejected == {Reason.NOT_JSON: [0, 1, 2]}


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_layout_of_the_json_makes_no_difference(space: str) -> None:
    """Pretty-printed records, and those with white space around, count like others."""
    log = [
        Message((space + json.dumps(record, indent=2 if space else None) + space).encode(), b"events", at)
        for at, record in enumerate(
            {"kind": "VOID", "stream": "events", "writer": "w", "prev": n, "id": n + 1} for n in range(20)
        )
    ]
    ((_, chain, *_),) = compacted(log).runs
    assert len(chain) == 20


# -- chains


def test_a_topic_replayed_twice_gives_two_full_chains() -> None:
    """Duplicates lie in a layer of their own, so that they cost one run and not one each."""
    once = [fact(id, id - 1) for id in range(1, 500)]
    chains = [chain for _, chain, *_ in compacted(numbered([*once, *once])).runs]
    assert sorted((len(chain), chain[0].offset) for chain in chains) == [(499, 100), (499, 599)]


def test_edges_that_clash_through_others_are_fed_one_by_one() -> None:
    """What lies inside a wide edge clashes with it, also where the edge before is short and already ended."""
    log = numbered([fact(3, 1), fact(10, 0), fact(7, 5), fact(9, 7), fact(11, 10), fact(12, 11)])
    assert sorted([edge.id for edge in chain] for _, chain, *_ in compacted(log).runs) == [
        [3],
        [7],
        [9],
        [10],
        [11, 12],
    ]


def test_a_join_cuts_the_runs_of_all_writers_of_its_stream() -> None:
    """A run lies between two markers of its stream; other streams are not touched."""
    log = numbered(
        [
            *(fact(1, 0, "a"), fact(2, 0, "b"), fact(1, 0, "a", "caches")),
            records.Join(stream="events", writer="c", epoch=1, id=2),
            *(fact(3, 1, "a"), fact(4, 2, "b"), fact(2, 1, "a", "caches")),
        ]
    )
    lengths = sorted(
        (group.stream, group.writer, group.segment, len(chain)) for group, chain, *_ in compacted(log).runs
    )
    assert lengths == [
        ("caches", "a", 0, 2),
        ("events", "a", 0, 1),
        ("events", "a", 1, 1),
        ("events", "b", 0, 1),
        ("events", "b", 1, 1),
    ]


def test_the_order_of_arrival_is_that_of_the_offsets() -> None:
    """Whatever order Spark hands records over in, the lower offset came first."""
    join = records.Join(stream="events", writer="w", epoch=1, id=2)
    log = numbered([fact(1, 0), fact(1, 0), fact(2, 1), join, fact(3, 2)])
    assert compacted(log[::-1]) == naive.compact(log)


def test_ids_at_both_ends_of_64_bits_chain_up() -> None:
    """The largest IDs of both directions survive arrays, packing and the default of `prev`."""
    top = records.MAX_ID
    log = numbered([fact(top, top - 1), fact(top - 1, 0), fact(1 - top, 0), fact(-top, 1 - top), fact(5, 4, "v")])
    up, down = Direction.FORWARD, Direction.BACKWARD
    found = {(group.writer, group.direction): [edge.id for edge in chain] for group, chain, *_ in compacted(log).runs}
    assert found == {("w", up): [top - 1, top], ("w", down): [top - 1, top], ("v", up): [5]}


def test_offsets_too_far_apart_for_a_run_divide_it() -> None:
    """A topic whose offsets have holes of billions still packs them into 32 bits each."""
    near, far = numbered([fact(1, 0), fact(3, 2)]), numbered([fact(2, 1), fact(4, 3)], first=100 + 2**32)
    batch_rows = [records.Rdata(stream="events", writer="w", id="batch", row=records.encode_row({})) for _ in range(2)]
    far.append(message(records.Join(stream="events", writer="v", epoch=1, id=0), 2**32 + 500))
    far.extend(numbered(batch_rows[:1], first=2**33 + 7))
    near.extend(numbered(batch_rows[1:], first=102))
    found = compacted([*near, *far])
    assert sorted([edge.offset for edge in chain] for _, chain, *_ in found.runs) == [
        [100],
        [101],
        [100 + 2**32],
        [101 + 2**32],
    ]
    assert {offset for *_, offset in found.rows} == {102, 2**33 + 7}


def test_many_writer_epochs_keep_their_chains() -> None:
    """More groups than 16 bits can number are still grouped right."""
    log = [message(fact(id, id - 1, f"w{writer}"), 0) for writer in range(40_000) for id in (1, 2)]
    log = [
        replace(each, offset=offset)
        for offset, each in enumerate(np.random.default_rng(5).permutation(np.array(log, object)))
    ]
    runs = [run for _, packet in packets(log) for run in packet.runs]
    assert len(runs) == 40_000
    assert {np.frombuffer(run.ids, "<i8").tolist() == [1, 2] for run in runs} == {True}


# -- packets


def test_packets_go_to_the_shard_of_their_stream() -> None:
    """Every stream is found in one packet only, that of its shard, and all packets know how far the task read."""
    streams = [f"stream-{number}" for number in range(40)]
    log = numbered(
        [*(fact(1, 0, stream=stream) for stream in streams), *(fact(2, 2, stream=stream) for stream in streams)]
    )
    found = packets(log)
    assert sorted(shard for shard, _ in found) == list(range(SHARDS))
    assert {run.stream: shard for shard, packet in found for run in packet.runs} == {
        s: shard_of(s, SHARDS) for s in streams
    }
    assert {packet.next_offset for _, packet in found} == {180}
    assert [shard for shard, packet in found if packet.rejected] == [0]


def test_a_task_without_a_good_record_still_says_how_far_it_read() -> None:
    """Offsets of nothing but garbage are progress too."""
    log = [replace(each, partition=7) for each in [Message(b"?", None, 41), Message(None, None, 42)]]
    ((shard, packet),) = packets(log)
    assert (shard, packet.partition, packet.next_offset) == (7 % SHARDS, 7, 43)
    assert [(rejected.reason, rejected.partition) for rejected in packet.rejected] == [(Reason.NOT_JSON, 7)]


def test_partitions_and_topics_of_one_task_are_kept_apart() -> None:
    """Spark may give a task several ranges, even inside one Arrow batch."""
    skip = records.Skip(stream="events", writer="w", prev=1, id=4, by="ann", why="lost")
    log = [
        message(fact(1, 0), 10),
        replace(message(fact(1, 0, stream="caches"), 3), partition=1),
        message(fact(2, 1), 11),
        message(skip, 8, topic=CONTROL),
    ]
    found = packets(log)
    assert {(packet.topic, packet.partition, packet.role, packet.next_offset) for _, packet in found} == {
        (FACTS, 0, Topic.FACTS, 12),
        (FACTS, 1, Topic.FACTS, 4),
        (CONTROL, 0, Topic.CONTROL, 9),
    }
    (marker,) = (marker for _, packet in found for marker in packet.markers)
    assert (marker.kind.name, marker.prev, marker.id, marker.by, marker.why) == ("SKIP", 1, 4, "ann", "lost")


def test_an_empty_task_says_nothing() -> None:
    """No records, no packets."""
    assert packets([]) == []


# -- offset ranges


def of_range(start: int, end: int, *parts: Sequence[Message], most: int = MAX_FACTS) -> list[Packet]:
    wanted = PlannedRange(Topic.FACTS, 0, start, end)
    twice = [([wanted], ((wanted, fetched([*map(as_taken, part)])) for part in parts)) for _ in range(2)]
    return [decoder.decode(packet) for _, packet in rows_of(twice, most)]


def test_a_range_is_read_to_its_end_whatever_it_ends_with() -> None:
    """The marks of transactions have offsets and are no records: behind them nothing is left to read, and a range of
    nothing else says so too."""
    log = numbered([fact(1, 0)])
    assert {packet.next_offset for packet in of_range(100, 103, log)} == {103}
    assert [(packet.next_offset, packet.runs) for packet in of_range(100, 103)] == [(103, PackedRuns())] * 2


def test_a_range_that_a_cut_left_to_others_is_not_begun() -> None:
    """What was read before it is said as read, and of the rest no offset is passed over."""
    run = records.FactRun(stream="events", writer="w", epoch=0, prev=2, ids=[3, 4, 5], rows=[[], [], []])
    log = numbered([fact(1, 0), fact(2, 1), run, fact(6, 5)])
    read, left = of_range(100, 104, log[:3], log[3:], most=2)
    assert (read.next_offset, read.is_cut_short) == (103, True)
    assert (left.next_offset, left.is_cut_short, left.runs) == (100, True, PackedRuns())


def test_ranges_that_come_by_turns_are_packed_as_one_after_the_other() -> None:
    """The client hands over what is there, of one partition and then of another; packets stand by range."""
    here, there = PlannedRange(Topic.FACTS, 0, 100, 104), PlannedRange(Topic.FACTS, 1, 100, 105)
    log = [fetched([as_taken(it)]) for it in numbered([fact(id, id - 1) for id in range(1, 5)])]
    in_turn = [(here, log[0]), (there, log[0]), (there, log[1]), (here, log[1]), (here, log[2]), (there, log[2])]
    by_range = [([it], [part for part in in_turn if part[0] == it]) for it in (here, there)]
    together = rows_of([([here, there], in_turn)])
    assert together == rows_of(by_range)
    assert [decoder.decode(packet).next_offset for _, packet in together] == [104, 105]


def test_a_cut_leaves_each_of_the_ranges_that_are_read_together_where_it_stood() -> None:
    """One may not even be begun."""
    here, there, third = (PlannedRange(Topic.FACTS, partition, 100, 104) for partition in range(3))
    run = records.FactRun(stream="events", writer="w", epoch=0, prev=1, ids=[2, 3, 4, 5], rows=[[], [], [], []])
    log = [fetched([as_taken(it)]) for it in numbered([fact(1, 0), run, fact(6, 5)])]
    in_turn = [(here, log[0]), (there, log[0]), (here, log[1]), (there, log[1]), (here, log[2])]
    found = [decoder.decode(packet) for _, packet in rows_of([([here, there, third], in_turn)], most=3)]
    assert [(it.partition, it.next_offset, it.is_cut_short) for it in found] == [
        (0, 102, True),
        (1, 101, True),
        (2, 100, True),
    ]


def test_records_of_a_fact_each_are_never_too_many() -> None:
    """A batch has as many of them as it may have, in one task or in several."""
    log = numbered([fact(1, 0), fact(2, 1), fact(3, 2)])
    assert [(packet.next_offset, packet.is_cut_short) for packet in of_range(100, 103, log[:2], log[2:], most=1)] == [
        (103, False)
    ] * 2
