"""`tidemark trace` on real servers: the life of an ID, and what is said of one that has none."""

import json
import re

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.app.recording import STREAM, Recording, fact
from tidemark.app.cli import main
from tidemark.app.stack.processes import free_port
from tidemark.app.verbs.trace import meaning_of
from tidemark.streaming.wire.records import FactRun, Join, Rdata, Record, Retire, Skip, Void, encode_row

S = STREAM


def traced(recording: Recording, *words: str, **changed: str) -> Result:
    return CliRunner(env=recording.variables | changed).invoke(main, ["trace", S, *words])


def lines(done: Result, topic: str) -> list[str]:
    """Without the times of this run, which Kafka and Redis gave."""
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    text = re.sub(r"2026-09-21 14:(\d\d):20.000Z", r"minute \1", done.output).replace(topic, "facts")
    return [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d.\d{3}Z", "now", line) for line in text.splitlines()]


def test_the_life_of_an_id_is_told_from_its_record_to_where_it_shows(recording: Recording) -> None:
    """Also of one among many in a record; what its writer sent is shown so that no terminal obeys it."""
    assert lines(traced(recording, "4"), recording.facts) == [
        "events 4: the linear position 8 has passed this ID",
        "  now POSITION of b (epoch 1) at facts/0 5: this writer has no fact with this ID",
        '      {"kind":"POSITION","stream":"events","writer":"b","epoch":1,"prev":3,"id":5}',
        "  now RUN of a (epoch 1) at facts/0 6: has the fact of this ID",
        '      {"kind":"RUN","stream":"events","writer":"a","epoch":1,"prev":1,"ids":[2,4],"rows":[[],["x\\x9b2J"]]}',
        "  minute 16 settled in batch 3: a (epoch 1) moved from 1 to 5: facts 2 (committed), empty 1 (rolled back,"
        " or not used by this writer)",
        "    the batch read facts/0 6",
        "  in the gap 2..4 of a, open from minute 15 to minute 16 (60 s): its IDs completed",
        "  minute 16 the linear position passed the ID in batch 3, to 5",
        "  now published in Redis (by its clock)",
    ]
    assert "RUN of a (epoch 1) at facts/0 6: the ID was rolled back" in "\n".join(
        lines(traced(recording, "2"), recording.facts)
    )
    held = lines(traced(recording, "5"), recording.facts)
    assert "  above the gap 2..4 of a, open from minute 15 to minute 16 (60 s): its IDs completed" in held
    late = lines(traced(recording, "3"), recording.facts)
    assert late[-3:] == [
        "  minute 16 the linear position passed the ID in batch 3, to 5",
        "    to see what blocked the stream until then: tidemark explain events --at 2026-09-21T14:15:20.000Z",
        "  now published in Redis (by its clock)",
    ]
    told = json.loads(traced(recording, "5", "--json").output)
    assert (told["writer"], told["passed"], [it["meaning"] for it in told["records"]]) == (
        "a",
        True,
        ["fact", "announced"],
    )


def test_what_is_not_settled_is_told_with_who_holds_it(recording: Recording) -> None:
    """An ID that nobody completed, one that waits above it, one that no batch has read, and one that was refused."""
    owed = lines(traced(recording, "9"), recording.facts)
    assert [line for line in owed if " at facts/" not in line and "{" not in line] == [
        "events 9: the linear position 8 has not passed this ID yet",
        "  no record of facts/0 has the ID (offsets 0..9 read)",
        "  minute 17 passed by a writer in batch 4: a (epoch 1) moved from 5 to 12: empty 7 (rolled back, or not"
        " used by this writer)",
        "    the batch read facts/0 7..9",
        "  in the gap 9..10 of b, open from minute 17 until now",
        "  b (epoch 1) the ID is in 9..10, open since minute 17",
        "  to see the remedy: tidemark gaps events",
    ]
    waits = lines(traced(recording, "12"), recording.facts)
    assert "  b (epoch 1) has completed the ID; below the ID, 9..10 is open since minute 17" in waits
    recording.send(fact("b", 13, 12))
    recording.send_bytes((b'{"kind":"RDATA","id":14,', S))
    unread = traced(recording, "13")
    assert (unread.exit_code, "has the fact of this ID, not read by a batch yet" in unread.output) == (1, True)
    assert unread.output.startswith("events 13: not allocated; highest ID 12,")
    assert "unreadable, but contains the number" in traced(recording, "14").output
    assert traced(recording, "-3").output == "events -3: wrong sign: the highest ID is 12\n"


def test_what_an_operator_did_to_it_and_what_came_late_is_told(recording: Recording) -> None:
    """With the reason, and what to type."""
    recording.batch(acts=[Skip(stream=S, writer="b", prev=8, id=10, by="ann", why="lost\x1b[2J")])
    recording.batch(fact("b", 9, 8))
    told = lines(traced(recording, "9"), recording.facts)
    assert [line for line in told if "SKIP" in line or "late" in line] == [
        "  minute 19 late completion 1 of b (epoch 1): ID 9, facts 1 (skipped); not resolved",
        "  minute 18 SKIP of b (epoch 1), 9..10, by ann: lost\\x1b[2J",
    ]


def test_what_retention_removed_and_servers_that_are_away_are_said(recording: Recording) -> None:
    """The rest is told all the same."""
    place = TopicPartition(recording.facts, 0, 7)
    admin = AdminClient(recording.connection.client_settings())
    for done in admin.delete_records([place]).values():
        done.result(60)
    told = lines(traced(recording, "4"), recording.facts)
    assert "  no record of facts/0 has the ID (no offset read)" in told
    assert "  retention removed offsets below 7, which may have contained the record" in told
    assert "  minute 16 the linear position passed the ID in batch 3, to 5" in told
    nowhere = f"127.0.0.1:{free_port()}"
    alone = traced(recording, "4", TIDEMARK_KAFKA_BOOTSTRAP_SERVERS=nowhere, TIDEMARK_REDIS_URL=f"redis://{nowhere}/0")
    assert alone.exit_code == 0
    assert [line.split(":")[1] for line in alone.output.splitlines() if "  unknown: " in line] == [
        " records", " dead letters", " Redis",
    ]  # fmt: skip
    assert CliRunner(env=recording.variables).invoke(main, ["trace", "none", "4"]).exit_code == 1


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (Rdata(stream=S, writer="a", id=-4, row=encode_row(1)), None),
        (Rdata(stream=S, writer="a", id="batch", row=encode_row(1)), None),
        (Rdata(stream=S, writer="a", id=4, row=encode_row(1)), "fact"),
        (Rdata(stream=S, writer="a", id=6, row=encode_row(1)), None),
        (Void(stream=S, writer="a", prev=3, id=6), "passed"),
        (FactRun(stream=S, writer="a", prev=3, ids=[4, 6], rows=[[], [encode_row(1)]]), "void"),
        (FactRun(stream=S, writer="a", prev=4, ids=[6], rows=[]), None),
        (Join(stream=S, writer="a", id=4), "settled"),
        (Retire(stream=S, writer="a", id=3), None),
        (Skip(stream=S, writer="a", prev=4, id=9), None),
    ],
)
def test_what_a_record_says_of_an_id(record: Record, says: str | None) -> None:
    """Its own edge completes it; a wider one says whose it is not."""
    assert meaning_of(record, 4) == says
