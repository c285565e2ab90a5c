"""The common part of both writers: configuration, start, the relay, stop. Each runs transactions in its own way."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import psycopg
import structlog
from prometheus_client import REGISTRY, CollectorRegistry
from psycopg.pq import TransactionStatus

from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import FOR_EVER, RecordProducer
from tidemark.sources.topics import Topics
from tidemark.sources.writer import fence, history, sequences
from tidemark.sources.writer.chain import ReservationChain
from tidemark.sources.writer.database import SCHEMA, session_of
from tidemark.sources.writer.fence import Holder
from tidemark.sources.writer.metrics import Meters
from tidemark.sources.writer.pending import PendingTransaction, StreamHandle, reserve_call, reserve_statement
from tidemark.sources.writer.relay import FIRST_PAUSE, LONGEST_PAUSE, Relay
from tidemark.sources.writer.sequences import Stream, named
from tidemark.streaming.direction import Direction, DirectionName
from tidemark.streaming.errors import HistoryChanged, Retry, Stopping, TidemarkError, WriterFenced
from tidemark.streaming.postgres_session import Connection

log = structlog.get_logger(__name__)

_SAY_EVERY = 10.0


@dataclass(frozen=True, slots=True)
class _Life:
    """One epoch of this process: another one follows where the database turns out to have another history."""

    epoch: int
    handles: Mapping[str, StreamHandle]
    relay: Relay


class WriterCore:
    """One per process and instance: whoever starts the same instance again fences this one. `clock` gives seconds since
    1970: epochs are at least its milliseconds, so that they rise also over a restore of the database.

    Start (entering the block) waits until every transaction of the instance's earlier epoch has ended, and says whose
    it waits for; it raises `Unavailable` where Kafka or Postgres does not answer within `patience` seconds, and the
    `Stop` that names what a person must mend. Stop (leaving it) waits up to `patience` for this process's transactions
    and for Kafka; what is left then is announced by the next start. Not to be forked.

    Where the database was restored or failed over, the writer joins anew by itself, as a start would.
    """

    def __init__(
        self,
        dsn: str,
        kafka: KafkaConnection | str,
        *,
        instance: str,
        streams: Iterable[str | Stream],
        direction: DirectionName = "forward",
        topic: str = "tidemark.facts",
        patience: float = 30.0,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.instance = instance
        self.streams = {stream.name: stream for stream in named(streams, instance, direction)}
        self._kafka = KafkaConnection(kafka) if isinstance(kafka, str) else kafka
        self._topic = topic
        self._patience = patience
        self._clock = clock
        self._process = 0
        self._session = session_of(dsn, f"tidemark writer {instance}")
        self._meters = Meters(registry, instance)
        self._life: _Life | None = None
        self._last: int | None = None
        """The last epoch that this process began, whether or not it came to join in it."""
        self._open = 0
        self._idle = threading.Condition()
        self._stopping = threading.Event()
        self._retiring = False

    @property
    def epoch(self) -> int:
        """The living epoch, 0 before the start."""
        return self._life.epoch if self._life is not None else 0

    def retire(self) -> None:
        """This instance ends for good: when it stops, it says so, and holds the linear position back no more."""
        self._retiring = True

    def _producer(self) -> RecordProducer:
        return RecordProducer(self._kafka, self._topic, give_up_after=FOR_EVER)

    # -- start

    def _start(self) -> None:
        try:
            self._join(_LogsHolders(self.instance))
        except BaseException:
            self._session.close()
            raise

    def _join(self, stuck: Callable[[Connection, list[Holder]], None]) -> None:
        self._process = os.getpid()
        Topics(self._kafka, self._patience).describe([self._topic])
        with self._session.use() as connection:
            SCHEMA.check(connection)
            oids = sequences.require(connection, self.streams.values())
            before = fence.registered(connection, self.instance)
        wanted = {name: (oids[name], stream.towards) for name, stream in self.streams.items()}
        left = {name: known for name, known in before.items() if name not in wanted}
        begun = fence.raise_epoch(self._session, self.instance, wanted | left, self._clock(), stuck, self._last)
        self._last = begun.epoch
        if begun.database is None:
            log.warning(
                "This database does not tell its history: a failover will not be noticed before the next start",
                instance=self.instance,
                do="grant execute on function pg_control_system() to the owner of the schema tidemark",
            )
        producer = self._producer()
        joined = fence.settle(self._session, producer, self.instance, begun, wanted | left, self._patience)
        if left:
            self._leave(producer, begun.epoch, left, joined.starts)
        handles = {
            name: self._handle(begun.epoch, name, oid, towards, joined.starts[name])
            for name, (oid, towards) in wanted.items()
        }
        writer = self._session, self._producer, self.instance, begun.epoch
        relay = Relay(*writer, handles, self._meters, joined.server, self._join_anew)
        for name, handle in handles.items():
            self._meters.watch(name, handle.chain, partial(relay.oldest_unacknowledged, name))
        self._life = _Life(begun.epoch, handles, relay)
        relay.start()
        log.info(
            "Joined",
            instance=self.instance,
            epoch=begun.epoch,
            announced_before=joined.leftovers,
            streams=joined.starts,
        )

    def _join_anew(self) -> None:
        """On the thread of the relay that ended; until it has come about, transactions are refused."""

        def stuck(connection: Connection, holders: list[Holder]) -> None:
            if self._stopping.is_set():
                raise Stopping(f"writer {self.instance} was told to stop")
            logs(connection, holders)

        ended, logs, pause, problem = self._life, _LogsHolders(self.instance), FIRST_PAUSE, ""
        assert ended is not None
        while not self._stopping.wait(pause):
            try:
                self._join(stuck)
            except WriterFenced as error:
                ended.relay.fence(error)
            except (TidemarkError, psycopg.Error) as error:
                if problem != (problem := str(error)):
                    log.warning("Cannot join yet", instance=self.instance, problem=problem)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            break

    def _handle(self, epoch: int, name: str, oid: int, towards: Direction, start: int) -> StreamHandle:
        call = reserve_call(self.instance, epoch, name, oid, towards)
        latency = self._meters.reservation(name)
        return StreamHandle(name, oid, towards, ReservationChain(start), call, reserve_statement(call), latency)

    def _leave(self, producer: RecordProducer, epoch: int, streams: fence.Streams, starts: Mapping[str, int]) -> None:
        """Streams that this instance wrote in an earlier epoch and writes no more must not wait for it."""
        ids = {name: starts[name] for name in streams}
        fence.retire(producer, self.instance, epoch, streams, ids, self._patience)
        with self._session.use() as connection:
            connection.execute(
                "update tidemark.writer_streams set retired = true where instance = %s and stream = any(%s)",
                [self.instance, list(streams)],
            )

    # -- transactions

    def _pending(self) -> PendingTransaction:
        life = self._life
        if life is None:
            raise RuntimeError("use the writer as a context manager: `with Writer(...) as writer`")
        if self._process != os.getpid():
            # Nobody would announce what this copy reserves; the heartbeat of the other would say that it is not there.
            raise RuntimeError(f"writer {self.instance} was made before a fork: make it in the process that writes")
        if life.relay.over is not None:
            raise life.relay.over.with_traceback(None)
        with self._idle:
            if self._stopping.is_set():
                raise Stopping(f"writer {self.instance} was told to stop")
            self._open += 1
        return PendingTransaction(self.instance, life.epoch, life.handles)

    def _ended(self, pending: PendingTransaction, status: int) -> None:
        """The caller's block is over, and its connection is in `status` (of libpq)."""
        with self._idle:
            self._open -= 1
            if self._stopping.is_set():
                self._idle.notify_all()
        life = self._life
        if life is None or pending.epoch != life.epoch or not len(pending):
            return  # what an earlier epoch left is in the outbox, or is nothing
        if status == TransactionStatus.IDLE:
            pending.end()
            life.relay.wake()
        else:  # a savepoint in the caller's transaction, or the connection is gone and perhaps the commit was not
            life.relay.unclear(pending)

    def _over(self) -> history.Over | None:
        """Why the transaction that just broke cannot be repeated in its epoch, as far as can be known now."""
        try:
            with self._session.use() as connection:
                history.require(connection, self.instance, self.epoch)
        except (WriterFenced, HistoryChanged) as error:
            return error
        except Retry:
            pass
        return None

    def _told(self, over: history.Over, pending: PendingTransaction) -> history.Over:
        """What to raise for `over`. Who is fenced by the new epoch of this very process may go on in that."""
        life = self._life
        assert life is not None
        if life.epoch == pending.epoch and not isinstance(life.relay.over, HistoryChanged):
            if isinstance(over, HistoryChanged):
                life.relay.changed(over)
            return over
        return HistoryChanged(self.instance, f"epoch {pending.epoch} is over")

    # -- stop

    def _stop(self) -> None:
        deadline = time.monotonic() + self._patience
        with self._idle:
            self._stopping.set()
            self._idle.wait_for(lambda: not self._open, self._patience)
        life = self._ending(deadline)
        try:
            if life.relay.over is not None:
                return
            if life.relay.busy():
                left = {name: handle.chain.in_flight for name, handle in life.handles.items()}
                log.warning("Stopped before all was announced: the next start will announce it", in_flight=left)
            elif self._retiring:
                ids = {name: handle.chain.last for name, handle in life.handles.items()}
                streams = {name: (handle.oid, handle.towards) for name, handle in life.handles.items()}
                fence.retire(self._producer(), self.instance, life.epoch, streams, ids, self._patience)
        finally:
            self._session.close()

    def _ending(self, deadline: float) -> _Life:
        """The last life, ended as soon as it has nothing to tell."""
        while True:
            life = self._life
            assert life is not None
            while life.relay.busy() and life.relay.over is None and time.monotonic() < deadline:
                life.relay.wake()
                time.sleep(0.02)
            life.relay.stop()
            if life is self._life:  # it may have been about to join anew
                return life


class _LogsHolders:
    """Logs whose transactions are waited for: at once, whenever they change, and every 10 s."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._said = -_SAY_EVERY
        self._pids: list[int | None] = []

    def __call__(self, connection: Connection, holders: list[Holder]) -> None:
        pids, now = [holder.pid for holder in holders], time.monotonic()
        if pids == self._pids and now < self._said + _SAY_EVERY:
            return
        self._pids, self._said = pids, now
        log.warning(
            "Waiting for transactions of this writer's earlier epoch",
            instance=self._instance,
            transactions=[str(holder) for holder in holders],
            do=f"end them, or run `tidemark writer fence {self._instance} --terminate`",
        )
