"""The common part of both writers: configuration, start, the relay, stop. Each runs transactions in its own way."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

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
from tidemark.sources.writer.relay import Relay
from tidemark.sources.writer.sequences import Stream, named
from tidemark.streaming.direction import Direction, DirectionName
from tidemark.streaming.errors import HistoryChanged, Retry, Stopping, WriterFenced
from tidemark.streaming.postgres_session import Connection

log = structlog.get_logger(__name__)

_SAY_EVERY = 10.0


class WriterCore:
    """One per process and instance: whoever starts the same instance again fences this one. `clock` gives seconds since
    1970: epochs are at least its milliseconds, so that they rise also over a restore of the database.

    Start (entering the block) waits until every transaction of the instance's earlier epoch has ended, and says whose
    it waits for; it raises `Unavailable` where Kafka or Postgres does not answer within `patience` seconds, and the
    `Stop` that names what a person must mend. Stop (leaving it) waits up to `patience` for this process's transactions
    and for Kafka; what is left then is announced by the next start. Not to be forked.
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
        self.epoch = 0
        self._kafka = KafkaConnection(kafka) if isinstance(kafka, str) else kafka
        self._topic = topic
        self._patience = patience
        self._clock = clock
        self._process = 0
        self._session = session_of(dsn, f"tidemark writer {instance}")
        self._meters = Meters(registry, instance)
        self._handles: dict[str, StreamHandle] = {}
        self._relay: Relay | None = None
        self._open = 0
        self._idle = threading.Condition()
        self._stopping = False
        self._retiring = False

    def retire(self) -> None:
        """This instance ends for good: when it stops, it says so, and holds the linear position back no more."""
        self._retiring = True

    def _producer(self) -> RecordProducer:
        return RecordProducer(self._kafka, self._topic, give_up_after=FOR_EVER)

    # -- start

    def _start(self) -> None:
        try:
            self._join()
        except BaseException:
            self._session.close()
            raise

    def _join(self) -> None:
        self._process = os.getpid()
        Topics(self._kafka, self._patience).describe([self._topic])
        with self._session.use() as connection:
            SCHEMA.check(connection)
            oids = sequences.require(connection, self.streams.values())
            before = fence.registered(connection, self.instance)
        wanted = {name: (oids[name], stream.towards) for name, stream in self.streams.items()}
        left = {name: known for name, known in before.items() if name not in wanted}
        begun = fence.raise_epoch(
            self._session, self.instance, wanted | left, self._clock(), _LogsHolders(self.instance)
        )
        self.epoch = begun.epoch
        if begun.database is None:
            log.warning(
                "This database does not tell its history: a failover will not be noticed before the next start",
                instance=self.instance,
                do="grant execute on function pg_control_system() to the owner of the schema tidemark",
            )
        producer = self._producer()
        joined = fence.settle(self._session, producer, self.instance, begun, wanted | left, self._patience)
        if left:
            self._leave(producer, left, joined.starts)
        self._handles = {
            name: self._handle(name, oid, towards, joined.starts[name]) for name, (oid, towards) in wanted.items()
        }
        self._relay = Relay(
            self._session, self._producer, self.instance, self.epoch, self._handles, self._meters, joined.server
        )
        for name, handle in self._handles.items():
            self._meters.watch(name, handle.chain, partial(self._relay.oldest_unacknowledged, name))
        self._relay.start()
        log.info(
            "Joined", instance=self.instance, epoch=self.epoch, announced_before=joined.leftovers, streams=joined.starts
        )

    def _handle(self, name: str, oid: int, towards: Direction, start: int) -> StreamHandle:
        call = reserve_call(self.instance, self.epoch, name, oid, towards)
        latency = self._meters.reservation(name)
        return StreamHandle(name, oid, towards, ReservationChain(start), call, reserve_statement(call), latency)

    def _leave(self, producer: RecordProducer, streams: fence.Streams, starts: Mapping[str, int]) -> None:
        """Streams that this instance wrote in an earlier epoch and writes no more must not wait for it."""
        ids = {name: starts[name] for name in streams}
        fence.retire(producer, self.instance, self.epoch, streams, ids, self._patience)
        with self._session.use() as connection:
            connection.execute(
                "update tidemark.writer_streams set retired = true where instance = %s and stream = any(%s)",
                [self.instance, list(streams)],
            )

    # -- transactions

    def _pending(self) -> PendingTransaction:
        if self._relay is None:
            raise RuntimeError("use the writer as a context manager: `with Writer(...) as writer`")
        if self._process != os.getpid():
            # Nobody would announce what this copy reserves; the heartbeat of the other would say that it is not there.
            raise RuntimeError(f"writer {self.instance} was made before a fork: make it in the process that writes")
        if self._relay.over is not None:
            raise self._relay.over
        with self._idle:
            if self._stopping:
                raise Stopping(f"writer {self.instance} was told to stop")
            self._open += 1
        return PendingTransaction(self.instance, self.epoch, self._handles)

    def _ended(self, pending: PendingTransaction, status: int) -> None:
        """The caller's block is over, and its connection is in `status` (of libpq)."""
        with self._idle:
            self._open -= 1
            if self._stopping:
                self._idle.notify_all()
        if self._relay is None or not len(pending):
            return
        if status == TransactionStatus.IDLE:
            pending.end()
            self._relay.wake()
        else:  # a savepoint in the caller's transaction, or the connection is gone and perhaps the commit was not
            self._relay.unclear(pending)

    def _over(self) -> history.Over | None:
        """Why the transaction that just broke cannot be repeated, as far as can be known now."""
        try:
            with self._session.use() as connection:
                history.require(connection, self.instance, self.epoch)
        except (WriterFenced, HistoryChanged) as error:
            return error
        except Retry:
            pass
        return None

    # -- stop

    def _stop(self) -> None:
        deadline = time.monotonic() + self._patience
        relay = self._relay
        assert relay is not None
        with self._idle:
            self._stopping = True
            self._idle.wait_for(lambda: not self._open, self._patience)
        while relay.busy() and relay.over is None and time.monotonic() < deadline:
            relay.wake()
            time.sleep(0.02)
        relay.stop()
        try:
            if relay.over is not None:
                return
            if relay.busy():
                left = {name: handle.chain.in_flight for name, handle in self._handles.items()}
                log.warning("Stopped before all was announced: the next start will announce it", in_flight=left)
            elif self._retiring:
                ids = {name: handle.chain.last for name, handle in self._handles.items()}
                streams = {name: (handle.oid, handle.towards) for name, handle in self._handles.items()}
                fence.retire(self._producer(), self.instance, self.epoch, streams, ids, self._patience)
        finally:
            self._session.close()


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
