"""An act on its way: noted in a real Postgres, sent to a real Kafka, and what a batch that reads it says of it."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT

import psycopg
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from psycopg.conninfo import make_conninfo

from tests.sinks.given import NOW, batch, stream
from tests.streaming.builders import STREAM, Shard, join, rdata
from tidemark.app.cli import main
from tidemark.app.stack.processes import KafkaServer, free_port
from tidemark.common.environment import child_environment
from tidemark.common.errors import BadRecord
from tidemark.sinks.port import Batch
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.operators import OverrideLog
from tidemark.sinks.postgres.store import Postgres
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics, topic_plans
from tidemark.streaming.core.effects import NextOffset, OperatorOverride, ShardEffects
from tidemark.streaming.wire.records import Record, Skip, Topic, read

BY = ("--by", "ada", "--why", "host is gone")


class Operator:
    """Runs `tidemark` against one database and its own topics, at no terminal."""

    def __init__(self, dsn: str, kafka: str, prefix: str) -> None:
        self._kafka, self._prefix = kafka, prefix
        self.control = f"{prefix}.control"
        self._variables = {
            "TIDEMARK_POSTGRES_DSN": dsn,
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka,
            "TIDEMARK_KAFKA_FACTS_TOPIC": f"{prefix}.facts",
            "TIDEMARK_KAFKA_CONTROL_TOPIC": self.control,
            "TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC": f"{prefix}.dead",
        }

    def run(self, *words: str) -> Result:
        return CliRunner(env=self._variables).invoke(main, [*words, *BY])

    def as_user(self, dsn: str) -> "Operator":
        return Operator(dsn, self._kafka, self._prefix)

    def typed(self, answer: str, *words: str) -> tuple[int, str]:
        """At a terminal: the exit code, and what stands on the screen."""
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "tidemark.app.cli", *words, *BY]
        environment = child_environment(self._variables)
        with subprocess.Popen(command, env=environment, stdin=theirs, stdout=PIPE, stderr=STDOUT) as process:
            os.write(ours, f"{answer}\n".encode())
            said, _ = process.communicate(timeout=60)
        os.close(ours)
        os.close(theirs)
        return process.returncode, said.decode()

    def interrupted(self, *words: str, at: bytes = b"Type the") -> tuple[int, str]:
        """Ctrl-C at what it says: the exit code, and what stands on the screen."""
        ours, theirs = pty.openpty()
        # A shell starts its background jobs deaf to Ctrl-C, and this test may run in one.
        hear = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        program = f"{hear}; from tidemark.app.cli import main; main({[*words, *BY]})"
        environment = child_environment(self._variables)
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, env=environment, stdin=theirs, stdout=PIPE, stderr=STDOUT) as process:
            assert process.stdout is not None
            said = b""
            while at not in said and (more := os.read(process.stdout.fileno(), 1000)):
                said += more
            rest = _pressed(process)
        os.close(ours)
        os.close(theirs)
        return process.returncode, (said + rest).decode()

    def to_a_full_disk(self, *words: str) -> tuple[int, str]:
        """The exit code where standard output can take nothing, and what stands on the screen."""
        command = [sys.executable, "-m", "tidemark.app.cli", *words]
        environment = child_environment(self._variables)
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, env=environment, stdout=full, stderr=PIPE, timeout=60, check=False)
        return done.returncode, done.stderr.decode()

    def sent(self) -> list[Record]:
        """All records on the control topic."""
        settings = KafkaConnection(self._kafka).client_settings() | {
            "group.id": "looks",
            "enable.partition.eof": "true",
        }
        with closing(Consumer(settings)) as consumer:
            consumer.assign([TopicPartition(self.control, 0, OFFSET_BEGINNING)])
            found = []
            while (message := consumer.poll(30)) is not None and message.error() is None:
                found.append(read(message.value(), message.key(), Topic.CONTROL))
        return found


def _pressed(process: subprocess.Popen[bytes]) -> bytes:
    """What it says after Ctrl-C. It is pressed again where nothing comes of it, as people do: Python misses a signal
    that comes just before it begins to read."""
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[0]
    process.kill()
    pytest.fail(f"it goes on after Ctrl-C: {process.communicate()[0]!r}")


@pytest.fixture
def operator(store: Postgres, lease: Lease, dsn: str, kafka: KafkaServer, prefix: str) -> Operator:
    """Of a stream in which a stands at 2 and owes 3 and 4, and b at 6. No pipeline runs."""
    shard = Shard()
    shard.feed(join("a", 2, epoch=7), join("b", 2), rdata("a", 5, 4, epoch=7), rdata("b", 6, 2, epoch=1))
    store.apply(batch(1, stream(STREAM, state=shard.states[STREAM]), token=lease.token))
    Topics(KafkaConnection(kafka.bootstrap_servers)).create_missing(
        topic_plans(f"{prefix}.facts", f"{prefix}.control", f"{prefix}.dead", 4)
    )
    return Operator(dsn, kafka.bootstrap_servers, prefix)


@pytest.fixture
def refusing(operator: Operator, store: Postgres, lease: Lease, dsn: str) -> Iterator[None]:
    """A pipeline that reads what is sent to the control topic, and refuses all of it."""
    ended = threading.Event()

    def read() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not ended.wait(0.05):
                sent = connection.execute('select topic, partition, "offset" + 1 from tidemark.overrides').fetchone()
                if sent is not None and sent[0] is not None:
                    store.apply(Batch("query", 2, lease.token, [ShardEffects(0, NOW, [], [], [NextOffset(*sent)])]))
                    return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        yield
        ended.set()
        reading.result()


def test_an_act_whose_output_is_lost_still_ends_with_its_exit_code(operator: Operator, sql: psycopg.Connection) -> None:
    """Exit code 1 would say that it was refused, and somebody would do it again."""
    assert operator.to_a_full_disk("retire", STREAM, "b", "--yes", "--json", "--wait", "0", *BY)[0] == 3
    assert sql.execute("select kind from tidemark.overrides").fetchall() == [("RETIRE",)]


def test_what_is_not_confirmed_is_neither_noted_nor_sent(operator: Operator, sql: psycopg.Connection) -> None:
    """At no terminal `--yes` is asked for, and exit code 2 says so; what it would do was shown."""
    done = operator.run("skip", STREAM, "a", "3..4")
    assert (done.exit_code, "add --yes" in done.output) == (2, True)
    assert "a moves from 2 to 5: facts 1, skipped 2" in done.output
    assert operator.run("skip", STREAM, "a", "3..4", "--dry-run", "--yes").exit_code == 0
    assert sql.execute("select 1 from tidemark.overrides").fetchall() == []
    assert operator.sent() == []


@pytest.mark.parametrize("words", [("retire", "b"), ("fence", "a"), ("join", "a", "--id", "2")], ids=str)
def test_a_dry_run_prints_one_object(operator: Operator, words: tuple[str, ...]) -> None:
    """With the record that would be sent, and without a position in Kafka."""
    verb, writer, *more = words
    done = operator.run(verb, STREAM, writer, *more, "--force", "--dry-run", "--json")
    printed = json.loads(done.stdout)
    assert (printed["act"]["writer"], printed["sent"], printed["outcome"]) == (writer, None, None)


def test_an_act_that_no_batch_reads_is_sent_and_ends_with_exit_code_3(
    operator: Operator, sql: psycopg.Connection
) -> None:
    """It is noted as the user that Postgres let in, whatever `--by` says, and will be applied when it is read."""
    done = operator.run("skip", STREAM, "a", "3..4", "--yes", "--json", "--wait", "0")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["outcome"], told["sent"]["offset"]) == (3, "not seen", 0)
    assert "do not send the override again" in told["result"]
    (noted,) = sql.execute(
        "select epoch, prev, id, by, seen_as = session_user, outcome from tidemark.overrides"
    ).fetchall()
    assert noted == (7, 2, 4, "ada", True, None)
    assert operator.sent() == [Skip(stream=STREAM, writer="a", epoch=7, prev=2, id=4, by="ada", why="host is gone")]


@pytest.mark.usefixtures("refusing")
def test_an_act_that_the_pipeline_refuses_ends_with_exit_code_1(operator: Operator, sql: psycopg.Connection) -> None:
    """Its state had moved on since the trial; that is noted too."""
    done = operator.run("retire", STREAM, "b", "--yes")
    assert (done.exit_code, "the pipeline refused the override" in done.stdout) == (1, True)
    assert sql.execute("select kind, outcome from tidemark.overrides").fetchall() == [("RETIRE", "refused")]


def test_who_may_not_note_an_act_does_not_send_one(operator: Operator, dsn: str, sql: psycopg.Connection) -> None:
    """A reader is told which role is missing; with it nobody can say that somebody else acted."""
    sql.execute("create role carl login password 'carl' in role tidemark_reader")
    try:
        as_carl = make_conninfo(dsn, user="carl", password="carl")
        done = operator.as_user(as_carl).run("retire", STREAM, "b", "--yes")
        assert (done.exit_code, "tidemark_operator" in done.output) == (2, True)
        assert operator.sent() == []
        sql.execute("grant tidemark_operator to carl")
        assert operator.as_user(as_carl).run("retire", STREAM, "b", "--yes", "--wait", "0").exit_code == 3
        assert sql.execute("select by, seen_as from tidemark.overrides").fetchall() == [("ada", "carl")]
        with psycopg.connect(as_carl, autocommit=True) as connection:
            for forged in (
                "insert into tidemark.overrides (kind, stream, writer, epoch, prev, id, by, why, seen_as)"
                " values ('SKIP', 's', 'w', 0, 0, 1, 'x', 'y', 'zoe')",
                "update tidemark.overrides set seen_as = 'zoe'",
                "update tidemark.overrides set by = 'zoe'",
                "delete from tidemark.overrides",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(forged)
    finally:
        sql.execute("drop owned by carl")
        sql.execute("drop role carl")


def test_one_record_is_replayed_once(operator: Operator, dsn: str, sql: psycopg.Connection) -> None:
    """By where it stood first, whichever of its letters is meant; what was refused leaves no act."""
    replayed = OperatorOverride("a", 7, "REPLAY", 5, 6, "ada", "mended")
    with session_of(dsn, "test") as session:
        acts = OverrideLog(session)
        first = acts.note_replay(STREAM, replayed, ("facts", 2, 40))
        with pytest.raises(BadRecord, match=f"this record was replayed before, as override {first.number}"):
            acts.note_replay(STREAM, replayed, ("facts", 2, 40))
        other = acts.note_replay(STREAM, replayed, ("facts", 2, 41))
        assert acts.replays() == {("facts", 2, 40): first.number, ("facts", 2, 41): other.number}
    assert sql.execute("select number from tidemark.overrides order by 1").fetchall() == [
        (first.number,),
        (other.number,),
    ]


def test_a_terminal_is_asked_for_the_writers_name(operator: Operator, sql: psycopg.Connection) -> None:
    """Anything else sends nothing."""
    code, said = operator.typed("zoe", "retire", STREAM, "b")
    assert (code, "Type the writer's name to confirm (b)" in said, "nothing was changed" in said) == (1, True, True)
    assert sql.execute("select 1 from tidemark.overrides").fetchall() == []
    code, said = operator.typed("b", "retire", STREAM, "b", "--wait", "0")
    assert (code, "logged as override 1 by database user postgres" in said) == (3, True)


def test_nothing_is_noted_where_kafka_is_away(operator: Operator, dsn: str, sql: psycopg.Connection) -> None:
    """An act without an outcome would be looked for by somebody."""
    away = Operator(dsn, f"127.0.0.1:{free_port()}", "nowhere")
    done = away.run("skip", STREAM, "a", "3..4", "--yes")
    assert (done.exit_code, "; nothing was logged or sent" in done.output) == (1, True)
    assert sql.execute("select 1 from tidemark.overrides").fetchall() == []


def test_nothing_is_sent_where_postgres_is_read_only(operator: Operator, dsn: str) -> None:
    """As a standby is, or a server in maintenance: what is not noted is not done, but what only asks is answered."""
    standby = operator.as_user(make_conninfo(dsn, options="-c default_transaction_read_only=on"))
    done = standby.run("skip", STREAM, "a", "3..4", "--yes")
    assert (done.exit_code, "read-only transaction" in done.output) == (1, True), done.output
    assert operator.sent() == []
    assert standby.run("skip", STREAM, "a", "3..4", "--dry-run").exit_code == 0


def test_a_full_disk_is_told_in_one_line(operator: Operator) -> None:
    """Whatever asks, for people or for programs."""
    for words in (("gaps", "--json"), ("status",)):
        told = "Error: the output cannot be written: No space left on device\n"
        assert operator.to_a_full_disk(*words) == (1, told)


def test_what_an_operator_says_is_words(operator: Operator) -> None:
    """Neither nothing nor what a terminal would obey."""
    for text in (" ", "\u200b", "ada\x1b[2J", "two\nlines"):
        done = CliRunner().invoke(main, ["skip", STREAM, "a", "3..4", "--why", "lost", "--by", text])
        assert (done.exit_code, "without control characters" in done.output) == (2, True), text
    assert CliRunner().invoke(main, ["reseed", "--why", " "]).exit_code == 2


def test_ctrl_c_and_the_end_of_input_at_the_question_send_nothing(operator: Operator, sql: psycopg.Connection) -> None:
    """The one is 130, as shells have it, the other 1."""
    code, said = operator.interrupted("skip", STREAM, "a", "3..4")
    assert (code, "nothing was changed" in said, "Traceback" in said) == (130, True, False)
    code, said = operator.typed("\x04", "skip", STREAM, "a", "3..4")
    assert (code, "nothing was changed" in said) == (1, True)
    assert sql.execute("select 1 from tidemark.overrides").fetchall() == []


def test_ctrl_c_while_the_effect_is_awaited_takes_nothing_back(operator: Operator) -> None:
    """Whoever is in a hurry is told so, and where to look; it is sent once."""
    code, said = operator.interrupted("skip", STREAM, "a", "3..4", "--yes", at=b"logged as override")
    assert (code, len(operator.sent())) == (130, 1)
    sent = "the override was sent, Ctrl-C does not recall it: see `tidemark overrides show 1`"
    assert said.splitlines()[-1] == sent
