"""Faults of the sources of facts: tables and sequences of the services' database, the facts topic, the control topic.

Most of these faults do not end by themselves. A thread acts as the operator: it reads the logs of the relay and the
readers, and runs the remedies that the log messages name. If no message names the remedy of a fault, the stream stays
blocked until the end of the simulation, and the verification fails.
"""

import heapq
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue

import psycopg
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from psycopg import sql

from tidemark.app.settings import Settings
from tidemark.app.simulation import sql_readers, workload
from tidemark.app.simulation.script import Fault, PlannedFault, SimulatedStream
from tidemark.app.simulation.sql_readers import SqlPlace
from tidemark.app.simulation.streams import StreamsVerification, StreamsWorkload
from tidemark.app.simulation.workload import SimulationDatabases
from tidemark.common.errors import TidemarkError
from tidemark.common.log import get_logger
from tidemark.sources.writer import Writer

log = get_logger(__name__)

TICK_SECONDS = 0.2
REMEDY_INTERVAL_SECONDS = 1.0
RETRY_SECONDS = 2.0  # until a job is tried again after an error, such as a server that does not answer
MAX_SET_BACK_IDS, MAX_JUMP_IDS = 30, 1000  # maximum number of IDs by which a sequence is set back or forward
KAFKA_TIMEOUT_SECONDS = 10.0
TOPIC_LIMIT_BYTES = 400_000  # the outbox accepts facts of twice this size
_RETRYABLE_ERRORS = (psycopg.Error, KafkaException, TidemarkError, OSError)
_RELAY_TABLES = ("append_outbox", "append_progress", "append_streams", "append_writers", "append_sent")
_RELAY_TABLES_TO_RESTORE = ("append_outbox", "append_progress", "append_writers", "append_sent")
_HIDDEN_ROWS_MESSAGE = re.compile(r'(ALTER TABLE ("[^"]+"(?:\."[^"]+")?) DISABLE ROW LEVEL SECURITY)')
_SEQUENCE_MESSAGE = re.compile(
    r"sequence (\S+) of stream (\S+): .*run: (ALTER SEQUENCE .* NO CYCLE|SELECT setval\(.*?\))"
)
_SETVAL_STATEMENT = re.compile(r"SELECT setval\('.*', (-?\d+)\)")
_CONTINUES_MESSAGE = re.compile(r"A stream continues .*stream=(\S+)")
_OVERSIZED_MESSAGE = re.compile(r"raise max\.message\.bytes of the topic to at least (\d+)")
_WENT_BACK_MESSAGE = re.compile(r"select tidemark_reader\.seek\('([^']+)', '([^']+)', 'm(-?\d+)'\)")
_LATE_MESSAGE = re.compile(
    r"facts of writer '?(\S+?)'? came late in \((-?\d+), (-?\d+)\] of stream .*"
    r"select tidemark_reader\.pass_late\('([^']+)', '([^']+)'\)"
)
_NUL_OVERRIDES = {
    "SKIP by": '{"kind":"SKIP","stream":"%s","writer":"%s","prev":0,"id":1,"by":"x\\u0000y","why":"a test"}',
    "SKIP why": '{"kind":"SKIP","stream":"%s","writer":"%s","prev":0,"id":1,"by":"me","why":"x\\u0000y"}',
    "RETIRE by": '{"kind":"RETIRE","stream":"%s","writer":"%s","id":1,"by":"\\u0000","why":"a test"}',
    "JOIN why": '{"kind":"JOIN","stream":"%s","writer":"%s","id":1,"by":"me","why":"\\u0000"}',
}


@dataclass(order=True)
class _Job:
    """Work for a fault.

    Attributes:
        due_at: when the work is due, in seconds of `time.monotonic`.
        number: orders jobs with the same `due_at`.
        fault: the kind of the fault.
        work: does the work. Returns the target of the fault as text when the fault is injected, or a second job that
            finishes the fault.
    """

    due_at: float
    number: int
    fault: Fault = field(compare=False)
    work: Callable[[], "str | _Job"] = field(compare=False)


class SourceFaults:
    """Injects faults of sources, and runs their remedies, on a second thread while the context is open.

    Only the thread of the fault injector may call the methods. No method waits for a server; the end of the context
    waits for the thread.
    """

    def __init__(
        self,
        settings: Settings,
        databases: SimulationDatabases,
        streams: Sequence[SimulatedStream],
        writer: str,
        verification: StreamsVerification,
    ) -> None:
        """
        Args:
            settings: the settings of the local stack.
            databases: DSNs, and the folder of the logs.
            streams: the streams that get faults.
            writer: the writer of the oversized facts. The operator overrides with a NUL character name this writer.
            verification: paused while tables or sequences are set back, and prepared for the IDs that are given out
                again.
        """
        self._settings = settings
        self._dsn = databases.facts_dsn
        self._streams = {stream.name: stream for stream in streams}
        self._writer = writer
        self._verification = verification
        self._log_files = [
            _LogFile(databases.home.log(f"simulate-{name}")) for name in ("relay", *StreamsWorkload.readers)
        ]
        self._planned_faults: SimpleQueue[PlannedFault] = SimpleQueue()
        self._injected_faults: SimpleQueue[tuple[Fault, str]] = SimpleQueue()
        self._jobs: list[_Job] = []
        self._job_numbers = count()
        self._earliest_remedy_times: dict[str, float] = {}
        """Table, sequence, or `topic` -> the earliest time by `time.monotonic` at which the remedy of its fault may
        run."""
        self._remedies: dict[str, tuple[str, str]] = {}
        """Stream, or `table` and the name of a table -> the sequence or table, and the SQL statement to run."""
        self._place_remedies: dict[tuple[str, str], Callable[[psycopg.Connection, str, SqlPlace], bool]] = {}
        """(stream, place of a reader in SQL) -> the remedy that a message named."""
        self._needed_topic_bytes = 0
        self._sent_override_count = 0
        self._remedies_run_at = 0.0
        self._injection_end_requested = threading.Event()
        self._thread_stop_requested = threading.Event()
        self._failure: BaseException | None = None
        self.pending_count = 0
        """Number of calls of `begin` whose fault is not injected yet."""
        self._thread = threading.Thread(target=self._run, name="source-faults", daemon=True)

    def __enter__(self) -> "SourceFaults":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread_stop_requested.set()
        self._thread.join(4 * KAFKA_TIMEOUT_SECONDS)

    @property
    def sent_override_count(self) -> int:
        """The number of sent operator overrides with a NUL character that Kafka has acknowledged."""
        return self._sent_override_count

    def begin(self, planned: PlannedFault) -> None:
        """Queue a fault for the second thread, and return at once."""
        self.pending_count += 1
        self._planned_faults.put(planned)

    def take_injected(self) -> Iterator[tuple[Fault, str]]:
        """Yield the faults that were injected since the last call, each with its target as text.

        If an error has ended the second thread, raises this error.
        """
        if self._failure is not None:
            raise self._failure
        while True:
            try:
                yield self._injected_faults.get_nowait()
            except Empty:
                return

    def end(self) -> None:
        """Inject no more faults, and return at once. Faults that are not injected yet are dropped.

        From now on, a remedy runs as soon as a log message names the remedy: the duration of the fault does not count.
        """
        self._injection_end_requested.set()

    def _run(self) -> None:
        try:
            while not self._thread_stop_requested.wait(TICK_SECONDS):
                self._step()
        except BaseException as error:
            self._failure = error
            raise

    def _step(self) -> None:
        """Run the jobs that are due; after `end`, drop all jobs. Every `REMEDY_INTERVAL_SECONDS`, also run the
        remedies."""
        now = time.monotonic()
        if self._injection_end_requested.is_set():
            self._jobs.clear()
            self._earliest_remedy_times.clear()
            self.pending_count = 0
        else:
            self._take_planned(now)
        while self._jobs and self._jobs[0].due_at <= time.monotonic() and not self._injection_end_requested.is_set():
            self._run_job(heapq.heappop(self._jobs))
        if now - self._remedies_run_at >= REMEDY_INTERVAL_SECONDS:
            self._remedies_run_at = now
            self._run_remedies(now)

    def _take_planned(self, now: float) -> None:
        """Make jobs of the faults that `begin` has queued."""
        while True:
            try:
                planned = self._planned_faults.get_nowait()
            except Empty:
                return
            heapq.heappush(self._jobs, self._new_job(now, planned.fault, partial(self._inject, planned)))

    def _new_job(self, due_at: float, fault: Fault, work: "Callable[[], str | _Job]") -> _Job:
        return _Job(due_at, next(self._job_numbers), fault, work)

    def _run_job(self, job: _Job) -> None:
        """Run a job. If it fails with one of `_RETRYABLE_ERRORS`, run it again after `RETRY_SECONDS`."""
        try:
            target = job.work()
        except _RETRYABLE_ERRORS as problem:
            text = " ".join(str(problem).split())[:300]
            log.warning("Could not inject a fault; trying again", fault=job.fault.value, problem=text)
            job.due_at = time.monotonic() + RETRY_SECONDS
            heapq.heappush(self._jobs, job)
            return
        if isinstance(target, _Job):
            heapq.heappush(self._jobs, target)
        else:
            self.pending_count -= 1
            self._injected_faults.put((job.fault, target))

    def _inject(self, planned: PlannedFault) -> "str | _Job":
        """Inject a fault. Returns its target as text, or a job that finishes the fault."""
        names = [*self._streams]
        stream, fraction = names[int(planned.choice * len(names))], planned.choice * len(names) % 1
        match planned.fault:
            case Fault.ROW_SECURITY:
                return self._hide_rows(planned, stream)
            case Fault.SEQUENCE_BACK:
                return self._set_sequence_back(stream, 1 + int(fraction * MAX_SET_BACK_IDS))
            case Fault.SEQUENCE_JUMP:
                return self._advance_sequence(stream, 1 + int(fraction * MAX_JUMP_IDS))
            case Fault.SEQUENCE_CACHE:
                return self._set_sequence_cache(planned, stream)
            case Fault.RESTORE_IN_PLACE:
                return self._back_up_tables(planned)
            case Fault.OVERSIZED:
                return self._append_oversized(planned, stream, fraction)
            case Fault.CONTROL_NUL:
                return self._send_override(stream, fraction)
        raise ValueError(f"{planned.fault} is not a fault of sources")

    @contextmanager
    def _connect(self) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self._dsn, autocommit=True, connect_timeout=5) as connection:
            connection.execute("set lock_timeout = '3s'")
            connection.execute("set statement_timeout = '30s'")
            connection.execute("set search_path = tidemark, demo")
            yield connection

    def _hide_rows(self, planned: PlannedFault, stream: str) -> str:
        """Enable row level security for the outbox (with probability 1/2) or for another table.

        Returns the name of the table.
        """
        others = (*(f"tidemark.{table}" for table in _RELAY_TABLES[1:]), f"demo.{stream}")
        scaled_choice = planned.choice * 2
        table = "tidemark.append_outbox" if scaled_choice < 1 else others[int((scaled_choice - 1) * len(others))]
        with self._connect() as connection:
            connection.execute(
                sql.SQL("alter table {} enable row level security").format(sql.Identifier(*table.split(".")))
            )
        self._earliest_remedy_times[table.split(".")[1]] = time.monotonic() + planned.duration_seconds
        return table

    def _set_sequence_back(self, stream: str, id_count: int) -> str:
        """Set the stream's sequence back by `id_count` IDs, but not below 1, so that these IDs are given out again.

        Uses RESTART if `id_count` is odd, otherwise `setval`. Returns the target as text.
        """
        with self._verification.paused(), self._connect() as connection:
            name, head = _read_sequence_and_head(connection, stream)
            to = max(1, head - id_count)
            self._verification.note_sequence_set_back(stream, min(to, _read_floor(connection, stream)))
            if id_count % 2:
                connection.execute(f"alter sequence {name} restart with {self._to_signed(stream, to + 1)}".encode())
            else:
                connection.execute("select setval(%s, %s)", [name, self._to_signed(stream, to)])
        return f"{stream}, from {head} back to {to} with {'RESTART' if id_count % 2 else 'setval'}"

    def _advance_sequence(self, stream: str, id_count: int) -> str:
        """Set the stream's sequence forward, so that the next `id_count` IDs are skipped. Returns the target as
        text."""
        with self._connect() as connection:
            name, head = _read_sequence_and_head(connection, stream)
            connection.execute("select setval(%s, %s)", [name, self._to_signed(stream, head + id_count)])
        return f"{stream}, {id_count} IDs"

    def _set_sequence_cache(self, planned: PlannedFault, stream: str) -> str:
        """Set a cache of 20 IDs for the stream's sequence. Returns the name of the stream."""
        with self._connect() as connection:
            name, _ = _read_sequence_and_head(connection, stream)
            connection.execute(f"alter sequence {name} cache 20".encode())
        self._earliest_remedy_times[name] = time.monotonic() + planned.duration_seconds
        return stream

    def _back_up_tables(self, planned: PlannedFault) -> _Job:
        """Copy the tables of the relay and the services to the schema `simulate_backup`. Returns the job that restores
        these tables."""
        with self._connect() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read")
            connection.execute("drop schema if exists simulate_backup cascade")
            connection.execute("create schema simulate_backup")
            for table, copy in self._tables_and_copies():
                connection.execute(sql.SQL("create table {} as table {}").format(copy, table))
            sequences_and_heads = {stream: _read_sequence_and_head(connection, stream) for stream in self._streams}
        restore = partial(self._restore_tables, planned, sequences_and_heads)
        return self._new_job(time.monotonic() + planned.duration_seconds, planned.fault, restore)

    def _restore_tables(self, planned: PlannedFault, sequences_and_heads: dict[str, tuple[str, int]]) -> "str | _Job":
        """Restore the backup in one transaction, while services, relay and readers are connected.

        The verification is paused meanwhile. `sequences_and_heads` is stream -> (name of the sequence, last ID at the
        time of the backup). Returns the target as text. If the backup is missing, restores nothing, makes a new backup,
        and returns the job that restores the new backup.
        """
        saved = [*self._tables_and_copies()]
        with self._verification.paused(), self._connect() as connection:
            backup = connection.execute("select to_regnamespace('simulate_backup') is not null").fetchone()
            if backup != (True,):  # the whole server was restored meanwhile, from a backup without the schema
                return self._back_up_tables(planned)
            with connection.transaction():
                locked = sql.SQL(", ").join(table for table, _ in saved)
                connection.execute(sql.SQL("lock table {} in exclusive mode").format(locked))
                for table, copy in saved:
                    connection.execute(sql.SQL("delete from {}").format(table))
                    connection.execute(sql.SQL("insert into {} select * from {}").format(table, copy))
                reached = {
                    stream: (_read_floor(connection, stream), head) for stream, (_, head) in sequences_and_heads.items()
                }
                self._verification.prepare_restored_tables(connection, reached)
                for stream, (name, head) in sequences_and_heads.items():
                    connection.execute("select setval(%s, %s)", [name, self._to_signed(stream, max(1, head))])
            connection.execute("drop schema simulate_backup cascade")
        return "the services' tables and sequences"

    def _tables_and_copies(self) -> Iterator[tuple[sql.Identifier, sql.Identifier]]:
        """Yield the name of each table to restore, and the name of its copy."""
        for schema, name in [
            *(("tidemark", table) for table in _RELAY_TABLES_TO_RESTORE),
            *(("demo", name) for name in self._streams),
        ]:
            yield sql.Identifier(schema, name), sql.Identifier("simulate_backup", f"{schema}_{name}")

    def _append_oversized(self, planned: PlannedFault, stream: str, fraction: float) -> str:
        """Lower the size limit of the facts topic, and append a fact that is too large. Returns the target as text.

        `fraction`, in [0, 1), chooses the size: 1.1 to 2 times the limit.
        """
        self._set_topic_limit(TOPIC_LIMIT_BYTES)
        size = int(TOPIC_LIMIT_BYTES * (1.1 + 0.9 * fraction))
        with self._connect() as connection, connection.transaction():
            id = Writer(self._writer).append(connection, stream, {"part": 1, "pad": os.urandom(size // 2).hex()})
            connection.execute(
                sql.SQL("insert into {} (stream_id, part, writer, written_at) values (%s, 1, %s, now())").format(
                    sql.Identifier("demo", stream)
                ),
                [id, self._writer],
            )
        self._earliest_remedy_times["topic"] = time.monotonic() + planned.duration_seconds
        return f"{stream}, ID {id}, {size} bytes"

    def _set_topic_limit(self, limit_bytes: int) -> None:
        """Set `max.message.bytes` of the facts topic, and wait for Kafka's answer. Raises `KafkaException`."""
        entry = ConfigEntry("max.message.bytes", str(limit_bytes), incremental_operation=AlterConfigOpType.SET)
        topic = ConfigResource(ResourceType.TOPIC, self._settings.kafka_facts_topic, incremental_configs=[entry])
        admin = AdminClient(self._settings.kafka.client_settings())
        for answer in admin.incremental_alter_configs([topic], request_timeout=KAFKA_TIMEOUT_SECONDS).values():
            answer.result(2 * KAFKA_TIMEOUT_SECONDS)

    def _send_override(self, stream: str, fraction: float) -> str:
        """Send an operator override with a NUL character to the control topic. Returns the target as text.

        `fraction`, in [0, 1), chooses the kind of the override. Raises `OSError` if Kafka does not acknowledge the
        override within `KAFKA_TIMEOUT_SECONDS`.
        """
        errors: list[object] = []
        producer = Producer(self._settings.kafka.producer_settings())
        kind, value = [*_NUL_OVERRIDES.items()][int(fraction * len(_NUL_OVERRIDES))]
        producer.produce(
            self._settings.kafka_control_topic,
            key=stream,
            value=value % (stream, self._writer),
            on_delivery=lambda error, _: errors.append(error),
        )
        producer.flush(KAFKA_TIMEOUT_SECONDS)
        if errors != [None]:
            problem = errors[0] if errors else f"no answer within {KAFKA_TIMEOUT_SECONDS:g} s"
            raise OSError(f"Kafka did not acknowledge the operator override: {problem}")
        self._sent_override_count += 1
        return f"{stream}, {kind}"

    def _run_remedies(self, now: float) -> None:
        """Read the new log messages, and run the remedies that they name, of faults whose duration is over.

        Moves at most one place of a reader in SQL. A remedy that fails with one of `_RETRYABLE_ERRORS` is run again at
        the next call.
        """
        for log_file in self._log_files:
            for line in log_file.read_new_lines():
                self._find_remedy(line)
        try:
            for subject, (named, statement) in [*self._remedies.items()]:
                if now >= self._earliest_remedy_times.get(named, 0.0):
                    self._run_remedy(subject, statement)
                    del self._remedies[subject]
            if (
                self._place_remedies
            ):  # one per call: there may be many, and other remedies must not wait for all of them
                self._run_place_remedy(*next(iter(self._place_remedies)))
            if self._needed_topic_bytes and now >= self._earliest_remedy_times.get("topic", 0.0):
                self._set_topic_limit(self._needed_topic_bytes)
                log.info(
                    "The simulated operator raised max.message.bytes of the facts topic", bytes=self._needed_topic_bytes
                )
                self._needed_topic_bytes = 0
        except _RETRYABLE_ERRORS as problem:
            log.warning("Could not run a remedy; trying again", problem=" ".join(str(problem).split())[:300])

    def _find_remedy(self, line: str) -> None:
        """If this line of a log names a remedy, store the remedy for `_run_remedies`. If the line says that a stream
        continues, drop the stream's remedy."""
        if match := _HIDDEN_ROWS_MESSAGE.search(line):
            table = match[2].rpartition(".")[2].strip('"')
            self._remedies[f"table {table}"] = (table, match[1])
        elif match := _SEQUENCE_MESSAGE.search(line):
            self._remedies[match[2]] = (match[1], match[3])
        elif match := _CONTINUES_MESSAGE.search(line):
            self._remedies.pop(match[1], None)
        elif match := _WENT_BACK_MESSAGE.search(line):
            self._place_remedies[match[1], match[2]] = partial(sql_readers.move_back, back_to=int(match[3]))
        elif match := _LATE_MESSAGE.search(line):
            self._place_remedies[match[4], match[5]] = partial(
                sql_readers.handle_late, writer=match[1], prev=int(match[2]), id=int(match[3])
            )
        elif match := _OVERSIZED_MESSAGE.search(line):
            self._needed_topic_bytes = max(self._needed_topic_bytes, int(match[1]))

    def _run_remedy(self, subject: str, statement: str) -> None:
        """Run the SQL statement of a remedy. If it sets the sequence of the stream `subject`, first note in the
        verification that IDs may be given out again."""
        with self._verification.paused(), self._connect() as connection:
            if match := _SETVAL_STATEMENT.match(statement):  # the floor may be below the ID in the message
                back = min(abs(int(match[1])), _read_floor(connection, subject))
                self._verification.note_sequence_set_back(subject, back)
            connection.execute(statement.encode())
        log.info("The simulated operator ran a remedy", statement=statement)

    def _run_place_remedy(self, stream: str, name: str) -> None:
        """Run the remedy of a place of a reader in SQL, and forget the remedy."""
        remedy, sql_place = self._place_remedies[stream, name], sql_readers.find_place(name)
        if sql_place is not None:
            with self._verification.paused(), self._connect() as connection:
                if remedy(connection, stream, sql_place):
                    log.info("The simulated operator moved a reader in SQL", reader=name, stream=stream)
        del self._place_remedies[stream, name]

    def _to_signed(self, stream: str, magnitude: int) -> int:
        return -magnitude if self._streams[stream].direction == "backward" else magnitude


def _read_sequence_and_head(connection: psycopg.Connection, stream: str) -> tuple[str, int]:
    """Read the name of the stream's sequence, and the last ID that the sequence gave out (a magnitude)."""
    ((name,),) = connection.execute(
        "select ids::text from tidemark.append_streams where stream = %s", [stream]
    ).fetchall()
    ((head, is_called),) = connection.execute(f"select abs(last_value), is_called from {name}".encode()).fetchall()
    return name, head if is_called else head - 1


def _read_floor(connection: psycopg.Connection, stream: str) -> int:
    """Read the floor of the stream, as a magnitude."""
    return workload.read_floors_and_heads(connection)[stream][0]


class _LogFile:
    """Reads the lines that are appended to a log file after the creation of this object."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._partial_line = b""

    def read_new_lines(self) -> list[str]:
        """Return the complete lines that were appended since the last call, without backslashes before quotation marks.
        Empty if the file does not exist."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            read = file.read()
        self._offset += len(read)
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        return [line.decode(errors="replace").replace("\\'", "'").replace('\\"', '"') for line in lines]
