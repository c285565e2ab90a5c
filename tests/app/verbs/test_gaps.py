"""`tidemark gaps` as people and programs read it."""

import json
import shlex

from tests.streaming.builders import STREAM, Shard, join, opened, position, rdata
from tidemark.app.diagnosis import open_ranges
from tidemark.app.verbs import gaps
from tidemark.app.verbs.overrides import try_override
from tidemark.sinks.postgres.status import ReadStatus
from tidemark.streaming.values.limits import Policies
from tidemark.streaming.wire.records import DatabaseStart, Retire


def test_a_dead_writer_is_listed_without_a_gap_with_what_settles_it() -> None:
    """The command that is shown is one that the state takes, and the line goes on by it."""
    shard = Shard()
    shard.left_by_a_dead_writer()
    (found,) = open_ranges.find_open_ranges(shard.states, 302.0)
    assert gaps.to_text([found], 302.0).splitlines() == [
        "events: w1: no record beyond ID 7 for 5 min; no record for 5 min",
        "    Start w1, or the relay of its database. If it is gone for good:"
        ' tidemark retire --id=7 --by "$USER" --why "gone for good" events w1',
    ]
    act = Retire(stream=STREAM, writer="w1", epoch=1, id=7, by="ann", why="gone")
    assert try_override(shard.states[STREAM], act, 302.0).effects.linear == 20


def test_who_was_not_heard_of_since_the_line_waits_is_silent_at_once() -> None:
    """Not only after a minute; one that was heard of meanwhile lives, and waits for something."""
    shard = Shard()
    shard.left_by_a_dead_writer()
    assert [it.verdict for it in open_ranges.find_open_ranges(shard.states, 13.0)] == ["silent"]
    shard.next_offset = 5000  # which is its time too
    shard.now = 9000
    shard.feed(position("w1", 0, 7, epoch=1))
    assert [it.verdict for it in open_ranges.find_open_ranges(shard.states, 13.0)] == ["alive"]


def test_whose_epoch_an_operator_began_is_fenced_until_the_writer_is_heard_of() -> None:
    """Who would start it is told that this needs a higher epoch."""
    shard = Shard()
    shard.left_by_a_dead_writer()
    (found,) = open_ranges.find_open_ranges(shard.states, 302.0, operator_epochs={(STREAM, "w1", 1), (STREAM, "w2", 2)})
    assert gaps.to_text([found], 302.0).splitlines() == [
        "events: w1: no record beyond ID 7 for 5 min; fenced, last record 5 min ago",
        "    Start w1, in an epoch above 1. If it is gone for good:"
        ' tidemark retire --id=7 --by "$USER" --why "gone for good" events w1',
    ]
    assert [
        it.verdict
        for it in open_ranges.find_open_ranges(
            shard.states, 302.0, operator_epochs={("other", "w1", 1), (STREAM, "w1", 2)}
        )
    ] == ["silent"]


def test_how_long_a_writer_may_be_silent_its_streams_policy_says() -> None:
    """One that is heard of once an hour lives."""
    shard = Shard()
    shard.feed(join("w", 0), rdata("w", 3, 2, epoch=1))
    hourly = Policies({STREAM: {"silent_seconds": 3600}})
    assert [
        [it.verdict for it in open_ranges.find_open_ranges(shard.states, now, hourly)] for now in (3599.0, 3602.0)
    ] == [
        ["alive"],
        ["silent"],
    ]


def test_each_gap_tells_what_waits_behind_it() -> None:
    """IDs and facts above it, up to the end of the chain; the writer lives, or says whose transaction it is."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 3, 2, epoch=1), rdata("a", 5, 4, epoch=1), position("a", 5, 9, epoch=1))
    found = open_ranges.find_open_ranges(shard.states, 11.0)
    assert [(it.low, it.top, it.waiting, it.facts, it.verdict) for it in found] == [
        (0, 2, 3, 2, "alive"),
        (3, 4, 2, 1, "alive"),
    ]
    shard.feed(opened("a", "pid 7: insert"))
    lines = gaps.to_text(open_ranges.find_open_ranges(shard.states, 11.0), 11.0).splitlines()
    assert lines == [
        "events: a: IDs 1..2 open for 10 s; transaction open, last record 9 s ago; 3 complete IDs are pending,"
        " 2 with facts",
        "events: a: ID 4 open for 10 s; transaction open, last record 9 s ago; 2 complete IDs are pending,"
        " 1 with facts",
        "    open transaction: pid 7: insert",
        "    End the transaction with this statement in its own database: select pg_terminate_backend(7)",
    ]


def test_of_a_stream_that_a_bridge_tells_the_bridges_own_verbs_are_shown() -> None:
    """It proves from Synapse's tables what an operator's word would skip."""
    shard = Shard()
    shard.left_by_a_dead_writer()
    (found,) = open_ranges.find_open_ranges(shard.states, 302.0, bridged_streams={STREAM})
    assert gaps.to_text([found], 302.0).splitlines()[1:] == [
        "    Start w1, or the relay of its database. If it is gone for good: tidemark synapse retire w1 events"
    ]
    shard.feed(opened("w1", "pid 7"))
    (found,) = open_ranges.find_open_ranges(shard.states, 302.0, bridged_streams={STREAM})
    assert gaps.to_text([found], 302.0).splitlines()[1:] == [
        "    open transaction: pid 7",
        "    End the transaction with this statement in its own database: select pg_terminate_backend(7)",
    ]


def test_of_a_stream_that_a_bridge_tells_a_transaction_holds_what_nobody_has_told() -> None:
    """Nothing is told beyond it, so nobody is seen to wait."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 2, 0, epoch=1), opened("a", "pid 7"))
    assert open_ranges.find_open_ranges(shard.states, 11.0) == []
    assert gaps.to_text(
        open_ranges.find_open_ranges(shard.states, 11.0, bridged_streams={STREAM}), 11.0
    ).splitlines() == [
        "events: a: no record beyond ID 2; transaction open, last record 10 s ago",
        "    open transaction: pid 7",
        "    End the transaction with this statement in its own database: select pg_terminate_backend(7)",
    ]
    shard.feed(opened("a"))
    assert open_ranges.find_open_ranges(shard.states, 11.0, bridged_streams={STREAM}) == []


def test_of_a_silent_writers_gap_both_ways_out_are_shown() -> None:
    """Where it is gone, and where it lives on without these IDs; the command reads the range as it stands there."""
    shard = Shard()
    shard.feed(join("a", -2), rdata("a", -5, -4, epoch=1), rdata("a", -9, -5, epoch=1))
    lines = gaps.to_text(open_ranges.find_open_ranges(shard.states, 100.0), 100.0).splitlines()
    assert lines[1:] == [
        "    Start a, or the relay of its database. If it is gone for good:"
        ' tidemark retire --id=-9 --by "$USER" --why "gone for good" events a',
        "    If the writer runs and will never complete these IDs:"
        ' tidemark skip --by "$USER" --why "lost" -- events a -3..-4',
    ]


def test_a_writer_that_never_joined_is_listed_with_its_epoch() -> None:
    """Its ID in the command is one at or beyond all that it completed."""
    shard = Shard()
    shard.feed(join("a", 0))
    shard.feed(rdata("-new", -7, -6, epoch=4))
    found = open_ranges.find_open_ranges(shard.states, 100.0)
    assert [(it.writer, it.verdict, it.waiting, it.facts, it.low) for it in found if it.verdict == "unknown"] == [
        ("-new", "unknown", 1, 1, None)
    ]
    verb = shlex.split(next(it.verb for it in found if it.writer == "-new"))
    assert verb[1:5] == ["retire", "--epoch", "4", "--id=-7"]
    assert verb[-3:] == ["--", "events", "-new"]
    act = Retire(stream=STREAM, writer="-new", epoch=4, id=-7, by="ann", why="gone")
    assert try_override(shard.states[STREAM], act, 100.0).effects.summary.unknown_writers == []


def test_many_gaps_of_a_writer_are_counted_in_the_text_and_all_in_the_json() -> None:
    """Ten lines and a number; a program gets each."""
    shard = Shard()
    shard.feed(join("a", 0), *(rdata("a", id, epoch=1) for id in range(2, 60, 2)))
    found = open_ranges.find_open_ranges(shard.states, 5.0)
    assert gaps.to_text(found, 5.0).splitlines()[10] == "events: a: 19 more gaps"
    assert len(json.loads(gaps.to_json(found))["gaps"]) == 29


def test_a_quiet_or_busy_stream_has_nothing_to_show() -> None:
    """Nor a line that waits no longer than a transaction takes."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), position("a", 0, 4, epoch=1), position("b", 0, 4, epoch=1))
    assert open_ranges.find_open_ranges(shard.states, 9000.0) == []
    shard.feed(position("a", 4, 9, epoch=1))
    assert open_ranges.find_open_ranges(shard.states, 5.0) == []


READS = ReadStatus(0.0, frozenset())
RELAYED = DatabaseStart("shop", "start-1")


def relayed(blocked: str = "") -> Shard:
    """A database whose relay reports itself, and is complete at 1 s."""
    shard = Shard()
    shard.feed(
        join("shop", 0, timeline=RELAYED), rdata("shop", 1, epoch=1), opened("shop", heartbeat=30, blocked=blocked)
    )
    return shard


def test_a_relay_that_sends_no_heartbeat_is_listed_although_nothing_waits() -> None:
    """What its database holds back is in no record. It counts only while a pipeline reads all of its partition."""
    shard = relayed()
    assert open_ranges.find_open_ranges(shard.states, 66.0, read_status=READS) == []
    found = open_ranges.find_open_ranges(shard.states, 1081.0, read_status=READS)
    assert gaps.to_text(found, 1081.0).splitlines() == [
        "events: shop: no heartbeat for 18 min; position 1",
        "    Start the relay of shop if it does not run; the end of its log shows the cause.",
    ]
    bridged = open_ranges.find_open_ranges(shard.states, 1081.0, bridged_streams={STREAM}, read_status=READS)
    assert [it.advice for it in bridged] == [
        "Start the bridge to Synapse if it does not run; the end of its log shows the cause."
    ]
    for reading in (None, ReadStatus(1030.0, frozenset()), ReadStatus(0.0, frozenset({0}))):
        assert open_ranges.find_open_ranges(shard.states, 1081.0, read_status=reading) == []


def test_a_writer_that_promised_no_heartbeat_is_judged_as_before() -> None:
    """It is quiet, and its stream is complete as far as anybody knows."""
    shard = Shard()
    shard.feed(join("shop", 0), rdata("shop", 1, epoch=1), opened("shop"))
    assert open_ranges.find_open_ranges(shard.states, 1e6, read_status=READS) == []


def test_what_a_relay_holds_back_is_listed_with_its_cause() -> None:
    """With the remedy that the relay sent; other writers of the stream need not wait for anything."""
    shard = relayed(blocked="sequence append_ids_1 has CACHE 20: run alter sequence append_ids_1 cache 1")
    found = open_ranges.find_open_ranges(shard.states, 61.0, read_status=READS)
    assert gaps.to_text(found, 61.0).splitlines() == [
        "events: shop: blocked for 60 s; position 1",
        "    sequence append_ids_1 has CACHE 20: run alter sequence append_ids_1 cache 1.",
    ]


def test_the_writers_of_a_relay_live_as_it_does() -> None:
    """Another name of the same start, for which the linear position waits: with heartbeats a transaction is open, and
    without them the relay is to be started, not the writer retired."""
    shard = Shard()
    shard.feed(
        join("shop", 0, timeline=RELAYED),
        join("till", 0, timeline=RELAYED),
        opened("shop", heartbeat=30),
        position("shop", 0, 9, epoch=1),
    )
    shard.now = 900_000
    shard.feed(opened("shop", heartbeat=30))
    (found,) = open_ranges.find_open_ranges(shard.states, 960.0, read_status=READS)
    assert (found.writer, found.verdict, found.verb) == ("till", "alive", "tidemark relay blockers")
    found, source = open_ranges.find_open_ranges(shard.states, 1000.0, read_status=READS)
    assert (found.writer, found.verdict, found.verb) == ("till", "no heartbeat", "")
    assert (source.writer, source.verdict) == ("shop", "no heartbeat")
