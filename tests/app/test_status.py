"""`tidemark status` as people and programs read it."""

import json
from datetime import UTC, datetime

from tests.app.sidecar.given import At, moved
from tests.streaming.builders import Shard, join, packing, rdata
from tidemark.app import status
from tidemark.sinks.postgres.recalls import RecallStatus
from tidemark.sinks.postgres.status import SinkFault
from tidemark.streaming.model import Bounds


def test_a_stream_that_a_sink_cannot_show_is_named_with_the_answer() -> None:
    """The fault stands below the table and in the JSON of its stream, and of no other."""
    states = {name: moved(name, 7, w=At(0, 7)).state for name in ("orders", "}x")}
    faults = [SinkFault("redis", "}x", "WRONGTYPE", datetime.fromtimestamp(1000, UTC))]
    found = status.read(states, None, faults)
    assert status.as_table(found, 1060.0).splitlines()[-1] == "}x is not shown in redis, for 60 s: WRONGTYPE"
    told = {it["stream"]: it["not_shown"] for it in json.loads(status.as_json(found, 1060.0))["streams"]}
    assert told["orders"] == []
    assert [(it["sink"], it["problem"]) for it in told["}x"]] == [("redis", "WRONGTYPE")]


def test_the_transactions_that_hold_a_stream_are_named() -> None:
    """Where a writer tells who holds its open IDs, the table and the JSON say so; of the others they say nothing."""
    states = {
        "orders": moved("orders", 7, shop=At(0, 7, pending=9, transactions=("pid 7: insert", "pid 8"))).state,
        "items": moved("items", 3, shop=At(0, 3)).state,
    }
    found = status.read(states)
    assert status.as_table(found, 0.0).splitlines()[-2:] == [
        "orders: open at shop: pid 7: insert",
        "orders: open at shop: pid 8",
    ]
    told = {it["stream"]: it["open_transactions"] for it in json.loads(status.as_json(found, 0.0))["streams"]}
    assert told == {"orders": {"shop": ["pid 7: insert", "pid 8"]}, "items": {}}


def test_what_was_put_off_is_told_with_what_becomes_of_it() -> None:
    """It comes again by itself; or something hinders it, or it is gone and the writer has to join."""
    with packing(0):
        shard = Shard(bounds=Bounds(pending=1))
        full = shard.feed(join("shop", 0), rdata("shop", 3, epoch=1), rdata("shop", 5, epoch=1))
    since = datetime.fromtimestamp(1000, UTC)
    recalls = [
        RecallStatus("events", "web", 3, 0, None, since),
        RecallStatus("events", "app", 3, 0, "no right", since),
        RecallStatus("events", "job", 3, 7, None, since),
        RecallStatus("other", "job", 3, 7, None, since),
    ]
    found = status.read({"events": full.state}, recalls=recalls)
    assert status.as_table(found, 1060.0).splitlines()[-4:] == [
        "events: records of shop are put off: too much of it is pending; they come again",
        "events: records of web that were put off come again, for 60 s",
        "events: records of app that were put off come again, for 60 s: no right",
        "events: up to 7 records of job that were put off are gone from partition 3 (retention, or its limit of size);"
        " what is open waits for its next JOIN",
    ]
    (told,) = json.loads(status.as_json(found, 1060.0))["streams"]
    assert told["put_off"] == ["shop/1"]
    assert [(it["writer"], it["gone"], it["problem"]) for it in told["recalled"]] == [
        ("web", 0, None),
        ("app", 0, "no right"),
        ("job", 7, None),
    ]
