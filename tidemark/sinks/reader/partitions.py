"""A reader with partitions: each partition has a place, and the running copies share the partitions. No sockets.

All rows with the same key are in one partition (`tidemark_reader.partition_of`), and each partition is read in order.
Each running copy sends heartbeats to the table `tidemark_reader.copies`, and takes its share of the partitions by its
rank among the copies. If two copies read the same partition for a moment, the result is still correct: each batch locks
the place of its partition, and a copy loads the place again if another copy has moved it (`read_loop`).
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from psycopg import sql

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import BadSetting, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.reader.checkpoint import CheckpointStore
from tidemark.sinks.reader.read_loop import BUSY_PAUSE_SECONDS, Portion, ReadConfig, ReadProgram, Steps
from tidemark.sinks.reader.requests import (
    Answer,
    AwaitEntry,
    BeginTransaction,
    CloseSessions,
    Pause,
    PlaceBusy,
    Request,
    RunSql,
    fetch_rows,
)
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token

log = get_logger(__name__)

HEARTBEAT_SECONDS = 1.0  # between two heartbeats of a copy
DEAD_AFTER_SECONDS = 5.0  # without a heartbeat, after which a copy no longer counts
MAX_PARTITIONS = 1000

_HEARTBEAT = """
with heartbeat as (
    insert into tidemark_reader.copies (reader, stream, copy) values ({reader}, {stream}, {copy})
    on conflict (reader, stream, copy) do update set seen_at = clock_timestamp()
), deleted as (
    delete from tidemark_reader.copies where reader = {reader} and stream = {stream} and copy <> {copy}
        and seen_at < clock_timestamp() - make_interval(secs => {dead_after})
)
select array(
    select copy from tidemark_reader.copies where reader = {reader} and stream = {stream}
        and seen_at >= clock_timestamp() - make_interval(secs => {dead_after})
    union select {copy} order by 1
) as copies, (
    select jsonb_object_agg(reader, linear) from tidemark_reader.places
    where stream = {stream} and reader = any({names}) and version > 0
) as places
"""


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How the rows of a table are divided into `partitions`: the column `key` determines the partition of a row."""

    partitions: int
    key: str

    def table(self, table: Table, partition: int) -> Table:
        """Return `table` with a condition for the rows of one partition. `partition` is its number, from 0."""
        text = sql.SQL("(('x' || left(md5(coalesce({}::text, '')), 8))::bit(32)::bigint % {}) = {}").format(
            sql.Identifier(self.key), self.partitions, partition
        )
        condition: Any = text.as_string()
        return replace(table, where=condition if table.where is None else f"({table.where}) and {condition}")

    def name(self, reader: str, partition: int) -> str:
        """Return the name of a partition's place, such as `mailer[3/8]`. The same as `tidemark_reader.place_name`."""
        return f"{reader}[{partition}/{self.partitions}]"


def make_partitioning(partitions: int | None, key: str | None, config: ReadConfig) -> Partitioning | None:
    """Return the partitioning of a reader; None if `partitions` and `key` are None. Raises `BadSetting`."""
    if partitions is None and key is None:
        return None
    if partitions is None or key is None:
        raise BadSetting("partitions", "give both partitions and key, such as partitions=8, key='customer', or neither")
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise BadSetting("partitions", f"give a number from 1 to {MAX_PARTITIONS}")
    if config.mode != "linear":
        raise BadSetting("partitions", "need mode='linear'")
    return Partitioning(partitions, key)


@dataclass
class _PartitionProgram:
    """One partition: its number, its program, and the request at which the program is suspended.

    `suspended_request` is None before the first step. The request was not carried out yet if it is a
    `BeginTransaction`. Other requests are answered with None when the program continues.
    """

    number: int
    program: ReadProgram
    steps: Steps = field(init=False)
    suspended_request: AwaitEntry | PlaceBusy | BeginTransaction | None = None

    def __post_init__(self) -> None:
        self.steps = self.program.steps()


class PartitionedReadProgram:
    """Reads the partitions of this copy in turn. Has the public attributes of `ReadProgram` that the readers use.

    Each partition has a `ReadProgram`. A program is suspended when it would wait, and after each batch. It then has no
    open transaction.

    `promised` is the token that all partitions, also those of other copies, had reached at the last heartbeat.
    """

    def __init__(self, config: ReadConfig, partitioning: Partitioning) -> None:
        self._config = config
        self._partitioning = partitioning
        self._copy = uuid4().hex
        self._partitions = [
            _PartitionProgram(
                number,
                ReadProgram(
                    replace(
                        config,
                        reader=partitioning.name(config.reader, number),
                        table=partitioning.table(config.table, number),
                    )
                ),
            )
            for number in range(partitioning.partitions)
        ]
        self._current = self._partitions[0]
        self._own_partitions: Sequence[_PartitionProgram] = ()
        self._heartbeat_at = -HEARTBEAT_SECONDS
        self._wait_log = WaitLog()
        self.promised = ZERO

    @property
    def checkpoint_store(self) -> CheckpointStore:
        """The checkpoint store of the partition that runs, or ran last."""
        return self._current.program.checkpoint_store

    @property
    def partition(self) -> int:
        """The number of the partition that runs, or ran last."""
        return self._current.number

    @property
    def complete_token(self) -> Token:
        """The token up to which the stream was complete at the last read of positions by any partition."""
        tokens = (partition.program.complete_token for partition in self._partitions)
        return max(tokens, key=lambda token: abs(token.linear))

    def steps(self) -> Steps:
        """Yield requests and portions. Never ends. Raises only errors of the kind `Stop`."""
        while True:
            if time.monotonic() - self._heartbeat_at >= HEARTBEAT_SECONDS:
                yield from self._take_share()
            has_moved = False
            for partition in self._own_partitions:
                has_moved |= yield from self._run(partition)
            if not has_moved:
                yield from self._wait()

    def _run(self, partition: _PartitionProgram) -> Generator[Request | Portion, Answer, bool]:
        """Run the program of a partition until the program would wait, or begins the next batch.

        Returns:
            Whether the program has handed over rows or moved its place.
        """
        step: Request | Portion
        if isinstance(partition.suspended_request, BeginTransaction):
            step = partition.suspended_request
        else:
            step = next(partition.steps) if partition.suspended_request is None else partition.steps.send(None)
        before, self._current = partition.program.promised, partition
        has_moved = False
        while not isinstance(step, AwaitEntry | PlaceBusy):
            has_moved |= isinstance(step, Portion) or partition.program.promised != before
            if has_moved and isinstance(step, BeginTransaction):
                break
            try:
                answer = yield step
            except Unavailable as problem:
                step = partition.steps.throw(problem)
            else:
                step = partition.steps.send(answer)
        partition.suspended_request = step
        return has_moved

    def _wait(self) -> Generator[Request | Portion, Answer, None]:
        """Wait until the stream's Redis list has an entry that a partition has not read, at most `HEARTBEAT_SECONDS`.

        Of the partitions that wait for an entry, the first one has read the list before the others in this round. The
        others have read at least the same entries. So an entry that any partition has not read ends the wait.

        If no partition waits for an entry, pause: another copy has locked the places, or this copy has no partition.
        """
        waits = [partition.suspended_request for partition in self._own_partitions]
        entry = next((request for request in waits if isinstance(request, AwaitEntry)), None)
        if entry is None:
            yield Pause(BUSY_PAUSE_SECONDS if waits else HEARTBEAT_SECONDS)
            return
        seconds = BUSY_PAUSE_SECONDS if any(isinstance(request, PlaceBusy) for request in waits) else entry.seconds
        try:
            yield replace(entry, seconds=min(seconds, HEARTBEAT_SECONDS))
        except Unavailable as problem:
            yield Pause(self._wait_log.pause_after(problem))
        else:
            self._wait_log.note_success()

    def _take_share(self) -> Generator[Request | Portion, Answer, None]:
        """Send the heartbeat of this copy, take its share of the partitions, and move `promised`."""
        try:
            yield from self.checkpoint_store.create_schema()
            (row,) = yield from fetch_rows(
                RunSql(
                    "place",
                    sql.SQL(_HEARTBEAT).format(
                        reader=self._config.reader,
                        stream=self._config.stream,
                        copy=self._copy,
                        names=[partition.program.checkpoint_store.reader for partition in self._partitions],
                        dead_after=DEAD_AFTER_SECONDS,
                    ),
                )
            )
        except Unavailable as problem:
            yield CloseSessions()
            yield Pause(self._wait_log.pause_after(problem))
            return
        self._wait_log.note_success()
        self._heartbeat_at = time.monotonic()
        stored: dict[str, int] = row["places"] or {}
        if len(stored) == len(self._partitions):
            self.promised = Token.of(min(stored.values(), key=abs), {})
        copies: list[str] = row["copies"]
        rank = copies.index(self._copy)
        own = [partition for partition in self._partitions if partition.number % len(copies) == rank]
        if [*map(id, own)] != [*map(id, self._own_partitions)]:
            self._own_partitions = own
            log.info(
                "This process now reads these partitions of the reader",
                reader=self._config.reader,
                stream=self._config.stream,
                copies=len(copies),
                partitions=[partition.number for partition in own],
            )
