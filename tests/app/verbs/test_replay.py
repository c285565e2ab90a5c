"""`tidemark replay` of what a pipeline read from real topics, and `tidemark tail`, which records it."""

import json
import re
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.app.recording import STREAM, Recording, fact
from tests.terminals import shown_on_a_terminal
from tidemark.app.cli import main
from tidemark.app.verbs.kafka_records import from_lines, to_line
from tidemark.sinks.postgres.inspect import BatchHistory
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.wire.records import Retire, Skip


def run(recording: Recording, *words: str) -> Result:
    done = CliRunner(env=recording.variables).invoke(main, words)
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return done


def recorded(recording: Recording, path: Path) -> list[str]:
    done = run(recording, "tail", "--all", "--json")
    path.write_text(done.output)
    return done.output.splitlines()


def test_what_was_recorded_gives_the_history_again(recording: Recording, tmp_path: Path) -> None:
    """However the batches were cut, with an operator's act and what came late; what no batch has read is left out."""
    recording.send_bytes((b"not json", STREAM))
    skip = Skip(stream=STREAM, writer="b", prev=8, id=10, by="ann", why="lost")
    refused = Skip(stream=STREAM, writer="b", prev=90, id=99, by="ann", why="mistyped")
    recording.batch(fact("a", 13, 12), acts=[refused, skip])
    recording.batch(fact("b", 9, 8), Retire(stream=STREAM, writer="b", epoch=1, id=13), fact("a", 15, 13))
    recording.send(fact("a", 16, 15))
    expected = "17 records reproduce the stored history of 1 of 1 stream (5 batches)\n"
    assert (run(recording, "replay").output, run(recording, "replay").exit_code) == (expected, 0)
    file = tmp_path / "recorded"
    lines = recorded(recording, file)
    assert json.loads(lines[0])["value"].startswith('{"kind":"JOIN"')
    file.write_text("\n".join([*reversed(lines), *lines]))
    assert run(recording, "replay", str(file)).output == expected
    told = json.loads(run(recording, "replay", str(file), "--json").output)
    assert (told["equal"], told["parted"], told["records"]) == ([STREAM], [], 17)
    assert "RDATA of a in events: {" in run(recording, "tail", "--last", "1").output
    none = run(recording, "tail", "none")
    assert (none.stdout, "none of the last 10 records of each partition is of stream none" in none.stderr) == ("", True)
    assert "no record in Kafka is of stream none" in run(recording, "tail", "none", "--all").stderr


REPLAY = "import sys; from tidemark.app.cli import main; main(['replay', *sys.argv[1:]])"


def test_a_terminal_gets_a_bar_over_what_is_read_and_over_what_is_applied(recording: Recording, tmp_path: Path) -> None:
    """Records of Kafka, or bytes of a file; then the records that are applied. A pipe gets no bar."""
    file = tmp_path / "recorded"
    lines = recorded(recording, file)
    size, number = file.stat().st_size, len(lines)
    shown = shown_on_a_terminal(REPLAY, environment=recording.variables)
    assert re.search(rf"reading Kafka .*\b{number}/{number}\b", shown)
    assert re.search(rf"applying .*\b{number}/{number}\b.* records/s", shown)
    shown = shown_on_a_terminal(REPLAY, str(file), environment=recording.variables)
    assert re.search(rf"reading the file .*\b{size}/{size}\b.* bytes/s", shown)
    assert re.search(rf"applying .*\b{number}/{number}\b", shown)
    assert run(recording, "replay", str(file)).stderr == ""


def test_what_comes_meanwhile_is_not_held_against_the_records(recording: Recording) -> None:
    """The history is that of before Kafka is read: a pipeline that goes on parts from nothing."""
    with BatchHistory.open(lambda: recording.variables["TIDEMARK_POSTGRES_DSN"]) as past:
        recording.batch(fact("a", 13, 12))
        held, upto = past.stream(STREAM), past.next_offsets()
    assert held is not None
    assert len(held.batches) == 3
    with BatchHistory.open(lambda: recording.variables["TIDEMARK_POSTGRES_DSN"]) as past:
        assert sum(past.next_offsets().values()) == sum(upto.values()) + 1


def test_the_first_record_where_they_part_is_shown(recording: Recording, sql: psycopg.Connection) -> None:
    """A history that somebody changed, and an end; exit code 1 for scripts."""
    sql.execute("update tidemark.packed_advances set facts = array[3]::bigint[] where batch = 3")
    wrong = run(recording, "replay")
    first, record, last = wrong.output.splitlines()
    assert (wrong.exit_code, first) == (
        1,
        "events: differs at the record below: after batch 3 of 2026-09-21 14:16:20.000Z a is 5 by facts 4"
        " (committed), empty 1 (rolled back, or not used by this writer) in the history and by facts 3 (committed),"
        " empty 1 (rolled back, or not used by this writer) in the replay",
    )
    assert f"{recording.facts}/0 6 RUN of a in events: " in record
    assert last == "10 records reproduce the stored history of 0 of 1 stream (3 batches)"
    sql.execute("update tidemark.packed_advances set facts = array[2]::bigint[] where batch = 3")
    sql.execute("update tidemark.stream_positions set position = 11 where writer = 'a'")
    end = json.loads(run(recording, "replay", "--json").output)["parted"][0]
    assert (end["writer"], end["history"], end["replayed"], end["batch"]) == ("a", 11, 12, None)


def test_a_record_that_is_missing_shows(recording: Recording, tmp_path: Path) -> None:
    """The replay never comes as far as the history went."""
    file = tmp_path / "recorded"
    lines = recorded(recording, file)
    file.write_text("\n".join(line for line in lines if '"RUN' not in json.loads(line)["value"]))
    lost = run(recording, "replay", str(file), "--json")
    assert lost.exit_code == 1
    (parting,) = json.loads(lost.output)["parted"]
    assert (parting["record"], parting["writer"], parting["history"], parting["replayed"]) == (None, "a", 5, 1)


def without_first(recording: Recording, count: int) -> None:
    """As retention removes them."""
    admin = AdminClient(recording.connection.client_settings())
    (done,) = admin.delete_records([TopicPartition(recording.facts, 0, count)]).values()
    done.result()


def test_a_stream_whose_first_records_are_gone_is_compared_from_where_nothing_was_open(
    recording: Recording, sql: psycopg.Connection
) -> None:
    """Retention removed its JOINs; what differs behind that is told as ever."""
    without_first(recording, 2)
    done = run(recording, "replay")
    assert done.output.splitlines() == [
        "events: equal in part: after batch 3 of 2026-09-21 14:16:20.000Z, because the recording begins at offset 2;"
        " linear positions only beyond 5",
        "8 records reproduce the stored history of 1 of 1 stream (1 batch)",
    ]
    assert done.exit_code == 0
    (part,) = json.loads(run(recording, "replay", "--json").output)["parts"].values()
    assert (part["after"]["batch"], part["offset"], part["line_from"]) == (3, 2, 5)
    sql.execute("update tidemark.packed_advances set facts = array[7, 7]::bigint[] where batch = 4")
    assert run(recording, "replay").exit_code == 1
    without_first(recording, 9)
    nothing = run(recording, "replay")
    assert (nothing.exit_code, nothing.output.splitlines()[0]) == (
        3,
        "events: not compared: the recording begins at offset 9, and some ID was open after every later batch",
    )


def test_a_stream_whose_first_days_are_dropped_is_compared_from_there(
    recording: Recording, sql: psycopg.Connection
) -> None:
    """Also where all of its records are there; one without records is named."""
    sql.execute("delete from tidemark.packed_advances where batch = 2")
    sql.execute(
        "insert into tidemark.streams (stream, linear, head, direction, shard, state, updated_at)"
        " select 'idle', linear, head, direction, shard, state, updated_at from tidemark.streams"
    )
    done = run(recording, "replay")
    assert done.output.splitlines() == [
        "events: equal in part: after batch 3 of 2026-09-21 14:16:20.000Z, because older history was dropped; linear"
        " positions only beyond 5",
        "without a record: 1 stream: idle",
        "10 records reproduce the stored history of 1 of 1 stream (1 batch)",
    ]
    assert done.exit_code == 0


def test_a_recording_older_than_the_history_is_compared_to_its_end(recording: Recording, tmp_path: Path) -> None:
    """Batches of after it was made are left out; one of before its last record is not."""
    file = tmp_path / "recorded"
    lines = recorded(recording, file)[:7]
    file.write_text("\n".join(lines))
    assert run(recording, "replay", str(file)).exit_code == 1  # it says that it was made long after the batches
    file.write_text("\n".join(json.dumps(json.loads(line) | {"time": 1}) for line in lines))
    done = run(recording, "replay", str(file))
    assert done.output.splitlines() == [
        "events: equal in part: up to batch 3 of 2026-09-21 14:16:20.000Z, where the recording ends (1 later batch)",
        "7 records reproduce the stored history of 1 of 1 stream (2 batches)",
    ]
    assert done.exit_code == 0


def test_what_is_no_recording_is_refused(recording: Recording, tmp_path: Path) -> None:
    """With the number of the line; and a topic that is not there."""
    file = tmp_path / "recorded"
    recorded(recording, file)
    file.write_text(file.read_text() + "{}\n")
    assert "Error: line 11 is not a record of" in run(recording, "replay", str(file)).output
    mistyped = run(recording, "replay", str(tmp_path / "recordd"))
    assert "is neither an existing file nor the name of a topic" in mistyped.output
    assert run(recording, "replay", "no-such").exit_code in (1, 2)
    assert run(recording, "replay", recording.control).exit_code == 2
    assert run(recording, "replay", "--records", "3").exit_code == 1
    mistyped = run(recording, "replay", "--stream", "event")
    assert (mistyped.exit_code, "there is no stream event" in mistyped.output) == (1, True)


@pytest.mark.parametrize("data", [None, b"", b"text", b"\xff\x00"])
def test_a_line_holds_a_record_byte_for_byte(data: bytes | None) -> None:
    """Also what is no text, and what is not there."""
    it = RecordedMessage("facts", 2, 40, 1000, data, data)
    assert [*from_lines([to_line(it).encode(), b"\n"], ValueError)] == [it]


@pytest.mark.parametrize("field", ['"partition":-1', '"partition":4294967296', '"offset":-3', '"time":1e3', '"key":7'])
def test_a_line_with_what_kafka_never_gives_is_refused(field: str) -> None:
    """Somebody wrote it by hand."""
    fields = {"partition": '"partition":0', "offset": '"offset":0', "time": '"time":0', "topic": '"topic":"facts"'}
    line = "{" + ",".join((fields | {field.split('"')[1]: field}).values()) + "}"
    with pytest.raises(ValueError, match="line 1 is not a record"):
        [*from_lines([line.encode()], ValueError)]
