"""`tidemark explain` on a real database: who held a line that is past, from when to when, and what let it go."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.resources import files

import psycopg
import pytest
from click.testing import CliRunner, Result

from tests.fix_synapse import begun_by_a_bridge
from tests.sinks.given import NOW
from tests.sinks.reader.given import Pipeline
from tests.streaming.builders import STREAM, Record, Shard, forced, join, packets, position, rdata, retire, sent, skip
from tidemark.app.cli import main
from tidemark.app.verbs.explain import Explanation, to_text
from tidemark.sinks.port import Batch
from tidemark.sinks.postgres.inspect import BatchAdvance, LinearStay
from tidemark.streaming.values.limits import Evidence

Explain = Callable[..., Result]


def minute(number: int, seconds: float = 0) -> str:
    """The time of a batch, from 1 on, and so many seconds later."""
    return datetime.fromtimestamp(NOW / 1000 + 60 * number + seconds, UTC).isoformat()


def told(pipeline: Pipeline, *story: list[Record]) -> None:
    """Commit what the query makes of each minute's records."""
    shard, offset = Shard(now=NOW), 0
    for number, records in enumerate(story, 1):
        shard.now += 59_000
        effects = shard.feed_packets(packets(sent(records, offset)))
        offset += len(records)
        pipeline.store.apply(Batch("query", number, pipeline.lease.token, [effects]))


@pytest.fixture
def explain(dsn: str) -> Explain:
    return lambda *words: CliRunner().invoke(main, ["explain", STREAM, *words], env={"TIDEMARK_POSTGRES_DSN": dsn})


@pytest.fixture
def eventful(pipeline: Pipeline) -> None:
    """Eight minutes of a stream."""
    told(
        pipeline,
        [join("a", 0), join("b", 0)],
        [rdata("a", 1, 0, epoch=1), position("b", 0, 1, epoch=1)],
        [rdata("b", 3, 1, epoch=1), rdata("a", 5, 4, epoch=1)],
        [rdata("a", 4, 1, epoch=1)],
        [rdata("b", 8, 3, epoch=1)],
        [position("a", 5, 9, epoch=1)],
        [rdata("b", 12, 10, epoch=1), position("a", 9, 12, epoch=1), join("c", 12)],
        [skip("b", 8, 10)],
    )


@pytest.mark.usefixtures("eventful")
def test_a_gap_is_told_with_its_writer_its_times_and_what_closed_it(explain: Explain) -> None:
    """With the offsets of the batch that let the line go on, and the evidence in the words of the design."""
    done = explain("--at", minute(3, 30))
    assert done.output.splitlines() == [
        "events: stuck at 1 from 2026-09-21 14:16:20.000Z to 2026-09-21 14:17:20.000Z (60 s)",
        "  idle before, from 2026-09-21 14:15:20.000Z: no higher ID was allocated",
        "  blocked by a (epoch 1): IDs 2..4 open from 2026-09-21 14:16:20.000Z to 2026-09-21 14:17:20.000Z: its IDs"
        " were committed",
        "  unblocked by batch 4 (tidemark.facts/0 6): the linear position moved to 5",
        "    a (epoch 1) moved from 1 to 5: facts 2 (committed)",
    ]


@pytest.mark.usefixtures("eventful")
def test_a_silent_writer_has_no_gap_and_is_told_all_the_same(explain: Explain) -> None:
    """What it said in the end was an announcement."""
    lines = explain("--at", minute(5, 30)).output.splitlines()
    assert lines[1:] == [
        "  idle before, from 2026-09-21 14:17:20.000Z: no higher ID was allocated",
        "  blocked by a (epoch 1): no record beyond ID 5",
        "  unblocked by batch 6 (tidemark.facts/0 8): the linear position moved to 8",
        "    a (epoch 1) moved from 5 to 9: empty 4 (rolled back, or not used by this writer)",
    ]


@pytest.mark.usefixtures("eventful")
def test_an_operator_who_let_it_go_is_named_with_the_reason(explain: Explain) -> None:
    """A writer that came only then did not hold it before."""
    lines = explain("--at", minute(7, 30)).output.splitlines()
    assert lines[1:] == [
        "  blocked by b (epoch 1): IDs 9..10 open from 2026-09-21 14:20:20.000Z to 2026-09-21 14:21:20.000Z: an"
        " operator settled its IDs",
        "  unblocked by batch 8 (tidemark.control/0 up to 12): the linear position moved to 12",
        "    b (epoch 1) moved from 8 to 12: facts 1 (committed), skipped 2 (settled by an operator)",
        "    SKIP of b (epoch 1) up to ID 10, by ann: because",
    ]


def test_of_a_stream_that_a_bridge_tells_its_own_verb_is_shown(explain: Explain, pipeline: Pipeline, dsn: str) -> None:
    """Below why the line stands."""
    told(pipeline, [join("a", 0), join("b", 0)], [rdata("b", 3, 0, epoch=1)])
    assert 'If it is gone for good: tidemark retire --id=0 --by "$USER"' in explain().output
    begun_by_a_bridge(dsn, STREAM, "a", "b")
    assert explain().output.splitlines()[-1] == (
        "    Start a, or the relay of its database. If it is gone for good: tidemark synapse retire a events"
    )


@pytest.mark.usefixtures("eventful")
def test_a_line_with_nothing_beyond_it_was_held_by_nobody(explain: Explain) -> None:
    """Nor is it told of between two times."""
    lines = explain().output.splitlines()
    assert lines[0].startswith("events: idle at 12 from 2026-09-21 14:21:20.000Z until now (")
    assert lines[1:] == ["  had nothing to wait for: no higher ID was allocated"]


def test_a_stream_is_idle_until_a_higher_id_is_known(explain: Explain, pipeline: Pipeline) -> None:
    """The time before does not count as blocked. Programs get both times."""
    told(
        pipeline,
        [join("a", 0)],
        [rdata("a", 1, 0, epoch=1)],
        [],
        [],
        [rdata("a", 3, 2, epoch=1)],
        [],
        [rdata("a", 2, 1, epoch=1)],
        [rdata("a", 4, 3, epoch=1)],
    )
    idle = "from 2026-09-21 14:15:20.000Z"
    assert explain("--at", minute(3, 30)).output.splitlines() == [
        f"events: idle at 1 {idle} to 2026-09-21 14:18:20.000Z (3 min)",
        "  had nothing to wait for: no higher ID was allocated",
        "  then blocked: tidemark explain events --at 2026-09-21T14:18:20.000Z",
    ]
    blocked = [
        "events: stuck at 1 from 2026-09-21 14:18:20.000Z to 2026-09-21 14:20:20.000Z (2 min)",
        "  idle before, from 2026-09-21 14:15:20.000Z: no higher ID was allocated",
        "  blocked by a (epoch 1): ID 2 open from 2026-09-21 14:18:20.000Z to 2026-09-21 14:20:20.000Z: its IDs were"
        " committed",
        "  unblocked by batch 7 (tidemark.facts/0 3): the linear position moved to 3",
        "    a (epoch 1) moved from 1 to 3: facts 2 (committed)",
    ]
    assert explain("--at", "2026-09-21T14:18:20.000Z").output.splitlines() == blocked
    assert explain("--between", minute(0), minute(20)).stdout.splitlines() == blocked
    none = "the stream was not blocked for ten seconds or longer in this time\n"
    assert explain("--between", minute(2), minute(4)).output == none
    assert explain("--at", minute(7, 30)).output.splitlines() == [
        "events: idle at 3 from 2026-09-21 14:20:20.000Z to 2026-09-21 14:21:20.000Z (60 s)",
        "  had nothing to wait for: no higher ID was allocated",
        "  moved by batch 8 (tidemark.facts/0 4): the linear position moved to 4",
        "    a (epoch 1) moved from 3 to 4: facts 1 (committed)",
    ]
    (stay,) = json.loads(explain("--at", minute(3, 30), "--json").output)["stays"]
    assert (stay["idle"], stay["blockers"], stay["stay"]["is_since_known"]) == (True, [], True)
    assert datetime.fromisoformat(stay["stay"]["blocked_since"]) == datetime.fromisoformat(minute(5))


@pytest.mark.parametrize(
    ("beyond", "end", "outcome", "evidence"),
    [
        (rdata("a", 4, 3, epoch=1), rdata("a", 3, 1, epoch=1), "its IDs were committed", "facts 2 (committed)"),
        (
            position("a", 3, 4, epoch=1),
            position("a", 1, 3, epoch=1),
            "its IDs were rolled back, or not used by this writer",
            "empty 3 (rolled back, or not used by this writer)",
        ),
        (
            rdata("a", 4, 3, epoch=1),
            position("a", 1, 3, epoch=1),
            "its IDs completed (tidemark trace events 3 shows how)",
            "facts 1 (committed), empty 2 (rolled back, or not used by this writer)",
        ),
    ],
)
def test_the_evidence_says_what_happened_to_missing_ids(
    explain: Explain, pipeline: Pipeline, beyond: Record, end: Record, outcome: str, evidence: str
) -> None:
    """A sum of two kinds of evidence does not say which ID has which."""
    told(pipeline, [join("a", 0)], [rdata("a", 1, 0, epoch=1)], [beyond], [end])
    lines = explain("--at", minute(3, 30)).output.splitlines()
    assert lines[2].endswith(f"to 2026-09-21 14:17:20.000Z: {outcome}")
    assert lines[-1].endswith(evidence)


def test_the_beginning_of_the_history_is_named(explain: Explain, pipeline: Pipeline, sql: psycopg.Connection) -> None:
    """Also of a stay that began before it, and in the error of a time before it."""
    told(
        pipeline,
        [join("a", 0), join("b", 0)],
        [rdata("a", 1, 0, epoch=1), position("b", 0, 1, epoch=1)],
        [rdata("b", 3, 1, epoch=1)],
        [rdata("b", 5, 3, epoch=1)],
        [rdata("a", 4, 1, epoch=1)],
    )
    sql.execute("delete from tidemark.packed_advances where time < %s", [minute(4)])
    early = explain("--at", minute(3, 30))
    assert (early.exit_code, early.stderr) == (
        1,
        "Error: the stored history of events begins at 2026-09-21 14:17:20.000Z, after the given time\n",
    )
    lines = explain("--at", minute(4, 30)).output.splitlines()
    assert lines[:2] == [
        "events: stuck at 1 from 2026-09-21 14:17:20.000Z or earlier (the stored history begins then) to"
        " 2026-09-21 14:18:20.000Z (60 s)",
        "  blocked by a (epoch 1): no record beyond ID 1",
    ]
    sql.execute("delete from tidemark.packed_advances")
    nothing = explain()
    assert nothing.exit_code == 1
    assert "the stored history of events has no move of the linear position: " in nothing.stderr


def test_a_stream_that_is_blocked_by_ids_without_a_history_is_not_idle(
    explain: Explain, pipeline: Pipeline, sql: psycopg.Connection
) -> None:
    """The time of its last advance is then the earliest possible one."""
    told(
        pipeline,
        [join("a", 0), join("b", 0)],
        [rdata("a", 1, 0, epoch=1), position("b", 0, 1, epoch=1)],
        [rdata("b", 3, 1, epoch=1)],
    )
    sql.execute("delete from tidemark.packed_advances where time >= %s", [minute(3)])
    lines = explain().output.splitlines()
    known = "events: stuck at 1; the stored history shows only that the last advance was at 2026-09-21 14:15:20.000Z ("
    assert lines[0].startswith(known)
    assert lines[0].endswith(" ago)")
    assert lines[1].startswith("events: a: ")
    assert not json.loads(explain("--json").output)["stays"][0]["idle"]


@pytest.mark.usefixtures("eventful")
def test_between_two_times_every_wait_is_told(explain: Explain) -> None:
    """In their order; programs get the same."""
    lines = explain("--between", minute(0), minute(20)).stdout.splitlines()
    assert [line.split(" from ")[0] for line in lines if not line.startswith(" ")] == [
        f"events: stuck at {line}" for line in (1, 5, 8)
    ]
    found = json.loads(explain("--between", minute(3, 1), minute(5, 1), "--json").output)["stays"]
    assert [it["stay"]["linear"] for it in found] == [1, 5]
    assert found[0]["blockers"][0]["gap"]["top"] == 4
    assert (
        explain("--between", minute(8), minute(20)).output
        == "the stream was not blocked for ten seconds or longer in this time\n"
    )


@pytest.mark.usefixtures("eventful")
def test_what_cannot_be_told_is_said(explain: Explain, dsn: str) -> None:
    """Times before the history, streams that are not there, and what is no time."""
    assert explain("--at", minute(-60)).exit_code == 1
    assert explain("--between", minute(-60), minute(1)).exit_code == 1  # nothing is known of that hour
    partly = explain("--between", minute(-60), minute(3), "--json")
    assert partly.stderr == "the stored history of events begins at 2026-09-21 14:15:20.000Z\n"
    assert json.loads(partly.stdout)["stays"]
    assert explain("--at", "yesterday").exit_code == 2
    assert explain("--at", "10:00", "--between", "10:00", "11:00").exit_code == 2
    none = CliRunner().invoke(main, ["explain", "none"], env={"TIDEMARK_POSTGRES_DSN": dsn})
    assert none.exit_code == 1
    assert "there is no stream none; `tidemark status`" in none.output
    mistyped = CliRunner().invoke(main, ["explain", "event"], env={"TIDEMARK_POSTGRES_DSN": dsn})
    assert "there is no stream event; did you mean events? `tidemark status` shows all streams" in mistyped.output


def test_of_what_is_still_to_come_nothing_is_told(explain: Explain, pipeline: Pipeline) -> None:
    """A time that lies ahead is no answer to what was, nor has a line that came just now waited up to then."""
    now = datetime.now(UTC)
    minutes = (now.timestamp() * 1000 - NOW) // 60_000 + 2  # the second batch is not held for ten seconds yet
    told(pipeline, [join("a", 0), join("b", 0), rdata("a", 1, 0, epoch=1), position("b", 0, 1, epoch=1)])
    shard = Shard(now=NOW + int(minutes) * 60_000)
    shard.feed_packets(packets(sent([join("a", 0), join("b", 0)], 0)))
    made = shard.feed_packets(packets(sent([position("b", 0, 2, epoch=1), rdata("a", 3, 0, epoch=1)], 4)))
    pipeline.store.apply(Batch("query", 2, pipeline.lease.token, [made]))
    ahead = [(now + timedelta(hours=hours)).isoformat() for hours in (5, 6)]
    assert explain("--at", ahead[0]).exit_code == explain("--between", *ahead).exit_code == 2
    assert (
        explain("--between", minute(2), ahead[0]).output
        == "the stream was not blocked for ten seconds or longer in this time\n"
    )


def test_a_line_that_went_on_without_an_advance_is_told(
    explain: Explain, pipeline: Pipeline, sql: psycopg.Connection
) -> None:
    """A writer that retires moves the line and no position; before and after, that is told. An older
    pipeline noted no such move."""
    told(pipeline, [join("a", 0), join("b", 0)], [rdata("b", 3, 0, epoch=1)], [retire("a", 0)])
    assert explain("--at", minute(2, 30)).output.splitlines() == [
        "events: stuck at 0 from 2026-09-21 14:15:20.000Z to 2026-09-21 14:16:20.000Z (60 s)",
        "  blocked by a (epoch 1): no record beyond ID 0, until it retired at 2026-09-21 14:16:20.000Z",
        "  unblocked by batch 3 (tidemark.facts/0 3): the linear position moved to 3",
        "    retired: a",
    ]
    after = explain("--at", minute(3, 30)).output
    assert after.startswith("events: idle at 3 from 2026-09-21 14:16:20.000Z until now (")
    sql.execute("delete from tidemark.linear_moves")
    lines = explain("--at", minute(2, 30)).output.splitlines()
    assert lines[0] == "events: stuck at 0 from 2026-09-21 14:15:20.000Z until an unknown time"
    assert lines[-1] == "  the linear position moved to 3; the stored history does not show when or why"


def test_an_operator_who_retires_a_writer_is_named(explain: Explain, pipeline: Pipeline) -> None:
    """The audit has the time of the batch; a later advance hides neither."""
    told(
        pipeline,
        [join("a", 0), join("b", 0)],
        [rdata("b", 3, 0, epoch=1)],
        [forced(retire("a", 0))],
        [rdata("b", 4, 3, epoch=1)],
    )
    lines = explain("--at", minute(2, 30)).output.splitlines()
    assert lines == [
        "events: stuck at 0 from 2026-09-21 14:15:20.000Z to 2026-09-21 14:16:20.000Z (60 s)",
        "  blocked by a (epoch 1): no record beyond ID 0, until it retired at 2026-09-21 14:16:20.000Z",
        "  unblocked by batch 3 (tidemark.control/0 up to 3): the linear position moved to 3",
        "    retired: a",
        "    RETIRE of a (epoch 1) up to ID 0, by ann: because",
    ]


def test_waits_that_retirements_alone_ended_are_told_between_two_times(
    explain: Explain, pipeline: Pipeline, sql: psycopg.Connection
) -> None:
    """One after the other, though no advance tells of either, and also where a writer has come back since."""
    told(
        pipeline,
        [join("a", 0), join("b", 0), join("c", 0)],
        [rdata("c", 2, 0, epoch=1), rdata("b", 5, 0, epoch=1)],
        [retire("a", 0)],
        [retire("c", 2)],
        [join("a", 5, epoch=2)],
    )
    lines = explain("--between", minute(0), minute(20)).stdout.splitlines()
    assert lines == [
        "events: stuck at 0 from 2026-09-21 14:15:20.000Z to 2026-09-21 14:16:20.000Z (60 s)",
        "  blocked by a (epoch 1): no record beyond ID 0, until it retired at 2026-09-21 14:16:20.000Z",
        "  unblocked by batch 3 (tidemark.facts/0 5): the linear position moved to 2",
        "    retired: a",
        "events: stuck at 2 from 2026-09-21 14:16:20.000Z to 2026-09-21 14:17:20.000Z (60 s)",
        "  blocked by c (epoch 1): no record beyond ID 2, until it retired at 2026-09-21 14:17:20.000Z",
        "  unblocked by batch 4 (tidemark.facts/0 6): the linear position moved to 5",
        "    retired: c",
    ]


@pytest.mark.usefixtures("eventful")
def test_what_a_reader_waits_for_is_shown_first(explain: Explain, sql: psycopg.Connection) -> None:
    """A reader that does not run, one that has everything, and the partitions of one."""
    sql.execute((files("tidemark.sinks.reader") / "schema.sql").read_bytes())
    for reader, linear in [("slow", 9), ("quick", 12), ("parts[0/2]", 12), ("parts[1/2]", 5)]:
        sql.execute(
            "insert into tidemark_reader.places (reader, stream, mode, linear, positions, late, must_read, version)"
            " values (%s, %s, 'linear', %s, '{}', 0, '[]', 1)",
            [reader, STREAM, linear],
        )
    lines = explain("--reader", "slow").output.splitlines()
    assert lines[0].startswith("slow is at 9 and events at 12: the reader lags, for ")
    assert lines[1] == "no copy of the reader is connected to the database with its place: start the service"
    assert lines[2].startswith("last commit ")
    assert lines[3].startswith("events: idle at 12 from ")
    lines = explain("--reader", "quick").output.splitlines()
    assert lines[0] == "quick has read everything up to 12, and waits for new facts of events"
    assert lines[2:] == explain().output.splitlines()
    assert [line for line in explain("--reader", "parts").output.splitlines() if line.startswith("parts")][
        1
    ].startswith("parts[1/2] is at 5 and events at 12: the reader lags")
    statuses = json.loads(explain("--reader", "parts", "--json").output)["readers"]
    assert [(status["partition"], status["lag_ids"]) for status in statuses] == [(0, 0), (1, 7)]
    refused = explain("--reader", "nobody")
    assert (refused.exit_code, "there is no reader nobody of events" in refused.output) == (1, True)


def test_text_counts_what_it_leaves_out() -> None:
    """Ten of twelve advances, and ten of twelve names; the text has the number of the others."""
    since, until = (datetime(2026, 11, 27, 20, minute, tzinfo=UTC) for minute in (0, 1))
    names = [f"w{number}" for number in range(12)]
    moved = [BatchAdvance(name, 1, 5, 9, Evidence(4, 0, 0, 0), 9, 7, until) for name in names]
    stay = LinearStay(5, since, until, 9, since, is_since_known=True)
    explanation = Explanation(STREAM, stay, False, [], moved, names, names, [], 7, [])
    lines = to_text([explanation], until).splitlines()
    first = "w0, w1, w2, w3, w4, w5, w6, w7, w8, w9"
    assert lines[-3:] == [
        "    2 more advances",
        f"    retired: {first} and 2 more",
        f"    first record of {first} and 2 more",
    ]
    assert sum(" moved from 5 to 9" in line for line in lines) == 10
