"""`tidemark status` as people and programs read it."""

import json
from datetime import UTC, datetime

from tests.app.sidecar.given import At, moved
from tests.streaming.builders import STREAM, Shard, behind_a_dead_writer, join, opened, packing, position, rdata
from tidemark.app.diagnosis.health import PipelineCondition
from tidemark.app.verbs import status
from tidemark.sinks.postgres.positions import RequeueStatus
from tidemark.sinks.postgres.status import BridgeStatus, Condition, ReadStatus, SinkFault
from tidemark.streaming.values.limits import Bounds

WELL = PipelineCondition(Condition("host:1", 12.0, 1.0, []), {("facts", 0): 0}, None)


def test_a_stream_that_a_sink_cannot_show_is_named_with_the_answer() -> None:
    """The fault stands below the table and in the JSON of its stream, and of no other."""
    states = {name: moved(name, 7, w=At(0, 7)).state for name in ("orders", "}x")}
    faults = [SinkFault("redis", "}x", "WRONGTYPE", datetime.fromtimestamp(1000, UTC))]
    found = status.stream_statuses(states, None, faults)
    assert status.to_table(found, 1060.0).splitlines()[-1] == "}x: missing in redis for 60 s: WRONGTYPE"
    told = {it["stream"]: it["not_shown"] for it in json.loads(status.to_json(found, 1060.0, WELL))["streams"]}
    assert told["orders"] == []
    assert [(it["sink"], it["problem"]) for it in told["}x"]] == [("redis", "WRONGTYPE")]


def test_the_transactions_that_hold_a_stream_are_named() -> None:
    """Where a writer shows what blocks its open IDs, the table and the JSON say so; of the others they say nothing."""
    states = {
        "orders": moved("orders", 7, shop=At(0, 7, pending=9, transactions=("pid 7: insert", "pid 8"))).state,
        "items": moved("items", 3, shop=At(0, 3)).state,
    }
    found = status.stream_statuses(states)
    assert status.to_table(found, 0.0).splitlines()[-2:] == [
        "orders: open transaction of shop: pid 7: insert",
        "orders: open transaction of shop: pid 8",
    ]
    told = {it["stream"]: it["open_transactions"] for it in json.loads(status.to_json(found, 0.0, WELL))["streams"]}
    assert told == {"orders": {"shop": ["pid 7: insert", "pid 8"]}, "items": {}}


def test_a_dead_writer_is_named_without_a_gap() -> None:
    """The line stands below what is allocated: for whom it waits, since when, and when that writer was last seen."""
    states = {"events": Shard().left_by_a_dead_writer().state, "quiet": moved("quiet", 3, shop=At(0, 3)).state}
    found = status.stream_statuses(states)
    assert status.to_table(found, 302.0).splitlines()[-2:] == [
        "events: blocked for 5 min, lag 13 IDs",
        "events: waiting for w1: no record for 5 min (last position 7)",
    ]
    events, quiet = json.loads(status.to_json(found, 302.0, WELL))["streams"]
    assert events["linear_lag"] == behind_a_dead_writer(age_seconds=300.0)
    assert [it["last_seen"] for it in events["writers"]] == [
        "1970-01-01T00:00:01Z",
        "1970-01-01T00:00:02Z",
    ]
    assert quiet["linear_lag"] is None


def test_whether_a_bridge_tells_a_stream_is_said() -> None:
    """Since when it does; of one that has stopped, when it last told anything; and nothing of other streams."""
    states = {name: Shard().left_by_a_dead_writer().state for name in ("stopped", "spoken", "guarded", "afar")}
    states["new"] = moved("new", 3, shop=At(0, 3)).state
    bridges = {
        "stopped": BridgeStatus(False, None),
        "spoken": BridgeStatus(True, datetime.fromtimestamp(2, UTC)),
        "guarded": BridgeStatus(True, None),
        "afar": BridgeStatus(None, None),
    }
    found = status.stream_statuses(states, bridges=bridges)
    assert [line for line in status.to_table(found, 302.0).splitlines() if "bridge" in line] == [
        "afar: sent by a bridge to Synapse; this replica cannot show whether the bridge runs: use the primary",
        "guarded: sent by a bridge to Synapse",
        "spoken: sent by a bridge to Synapse, connected for 5 min",
        "stopped: the bridge to Synapse is not connected; last record 5 min ago",
    ]
    bridges = {"new": BridgeStatus(False, None)}
    text = status.to_table(status.stream_statuses(states, bridges=bridges), 302.0)
    assert "new: the bridge to Synapse is not connected; no record was ever read" in text
    told = {it["stream"]: it["bridge"] for it in json.loads(status.to_json(found, 302.0, WELL))["streams"]}
    assert (told["spoken"], told["new"]) == ({"is_connected": True, "since": "1970-01-01T00:00:02Z"}, None)


def test_a_line_that_waits_no_longer_than_a_transaction_takes_is_not_told_of() -> None:
    """Under traffic some line always waits for a moment; the JSON has it all the same."""
    found = status.stream_statuses({"events": Shard().left_by_a_dead_writer().state})
    assert len(status.to_table(found, 11.0).splitlines()) == 3
    assert json.loads(status.to_json(found, 11.0, WELL))["streams"][0]["linear_lag"]["ids"] == 13


def test_each_reason_for_which_a_line_waits_has_its_sentence() -> None:
    """A gap, an open transaction, and a writer that never joined; of many only the furthest behind."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), join("z", 0))
    shard.feed(rdata("a", 3, 2, epoch=1), position("z", 0, 9, epoch=1), opened("b", "pid 7"), rdata("new", 11, 10))
    found = status.stream_statuses({"events": shard.states[STREAM]})
    assert [line for line in status.to_table(found, 60.0).splitlines() if "waiting for" in line] == [
        "events: waiting for new (epoch 0): it has not joined; last record 58 s ago",
        "events: waiting for a: IDs beyond 0 are open; last record 58 s ago",
        "events: waiting for b: a transaction is open beyond ID 0; last record 58 s ago",
    ]
    shard.feed(*(join(f"w{number}", 0) for number in range(20)))
    assert "events: and for 13 more writers" in status.to_table(
        status.stream_statuses({"events": shard.states[STREAM]}), 60.0
    )


def test_what_was_put_off_is_told_with_what_becomes_of_it() -> None:
    """It comes again by itself; or something hinders it, or it is gone and the writer has to join."""
    with packing(0):
        shard = Shard(bounds=Bounds(pending=1))
        full = shard.feed(join("shop", 0), rdata("shop", 3, epoch=1), rdata("shop", 5, epoch=1))
    since = datetime.fromtimestamp(1000, UTC)
    requeues = [
        RequeueStatus("events", "web", 3, 0, None, since),
        RequeueStatus("events", "app", 3, 0, "no right", since),
        RequeueStatus("events", "job", 3, 7, None, since),
        RequeueStatus("other", "job", 3, 7, None, since),
    ]
    found = status.stream_statuses({"events": full.state}, requeues=requeues)
    assert status.to_table(found, 1060.0).splitlines()[-4:] == [
        "events: records of shop are deferred, because the writer has too many pending ranges; the pipeline requeues"
        " the records later",
        "events: deferred records of web are being requeued for 60 s",
        "events: deferred records of app are being requeued for 60 s: no right",
        "events: up to 7 deferred records of job are lost from partition 3 (retention, or the size limit of the"
        " topic); the open IDs of the writer wait for its next JOIN",
    ]
    (told,) = json.loads(status.to_json(found, 1060.0, WELL))["streams"]
    assert told["deferred"] == ["shop/1"]
    assert [(it["writer"], it["gone"], it["problem"]) for it in told["requeued"]] == [
        ("web", 0, None),
        ("app", 0, "no right"),
        ("job", 7, None),
    ]


def test_a_relay_without_a_heartbeat_and_what_one_holds_back_are_said() -> None:
    """A stream is called complete only if its source sent something within the time that it promised."""
    states = {}
    for name, blocked in (("orders", ""), ("items", "fact 7 is too large for the Kafka topic")):
        shard = Shard()
        shard.feed(join("shop", 0), rdata("shop", 1, epoch=1), opened("shop", heartbeat=300, blocked=blocked))
        (states[name],) = shard.states.values()
    reading = ReadStatus(0.0, frozenset())
    text = status.to_table(status.stream_statuses(states, read_status=reading), 61.0)
    assert [line for line in text.splitlines() if ": " in line] == [
        "items: the relay shop has sent nothing new for 60 s: fact 7 is too large for the Kafka topic"
    ]
    found = status.stream_statuses(states, read_status=reading)
    assert "orders: no heartbeat from the relay shop for 18 min: is it running?" in status.to_table(found, 1081.0)
    _, orders = json.loads(status.to_json(found, 1081.0, WELL))["streams"]
    assert orders["sources"] == [
        {
            "writer": "shop",
            "heartbeat_seconds": 300,
            "last_seen": "1970-01-01T00:00:01Z",
            "blocked": None,
            "problem": "no heartbeat from the relay shop for 18 min: is it running?",
        }
    ]
