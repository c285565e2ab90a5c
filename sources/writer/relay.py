"""The one thread of a writer that decides what became of each of its IDs, and sends that to Kafka.

An ID is decided after its transaction has ended, by the outbox: a row is there, or it is not. Nothing that the service
remembers counts, because a savepoint may have been rolled back and a commit's answer may have been lost. Whatever does
not work is tried again: Kafka and Postgres may be away for as long as they like, and what is kept meanwhile is small.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime

import psycopg
import structlog

from tidemark.sources.producer import RecordProducer
from tidemark.sources.writer import history, outbox, sequences
from tidemark.sources.writer.chain import SettledSpan
from tidemark.sources.writer.fence import hold, make_durable
from tidemark.sources.writer.metrics import Meters
from tidemark.sources.writer.pending import PendingTransaction, StreamHandle
from tidemark.sources.writer.records import RecordBuilder
from tidemark.streaming.errors import HistoryChanged, Stop, Unavailable, WriterFenced
from tidemark.streaming.postgres_session import Connection, PostgresSession

log = structlog.get_logger(__name__)

PACE = 0.05
"""Seconds between two readings of the outbox, at least: what ends in between shares one query and one commit."""
HEARTBEAT = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
_UNSETTLED = 0.1
"""Seconds between two polls of Kafka for acknowledgements, or of Postgres for unclear transactions."""
MOST_UNACKNOWLEDGED = 5_000
"""Records that wait for Kafka's acknowledgement; past it the rest waits in the outbox and costs no memory."""


@dataclass(slots=True, eq=False)
class _Parcel:
    """Spans of one stream that were sent and are not all acknowledged (`left` records), or not yet deleted."""

    handle: StreamHandle
    spans: list[SettledSpan]
    records: list[bytes]
    left: int

    def acknowledged(self) -> None:
        self.left -= 1


class Relay:
    """Begins with `start`. `wake`, `changed`, `unclear`, `over`, `busy` are for any thread; the rest is its own.

    `over` says why nothing can be written in this epoch any more; if that is the database, the thread joins anew.
    """

    def __init__(
        self,
        session: PostgresSession,
        producer: Callable[[], RecordProducer],
        instance: str,
        epoch: int,
        handles: Mapping[str, StreamHandle],
        meters: Meters,
        server: datetime,
        join_anew: Callable[[], None],
    ) -> None:
        self.over: history.Over | None = None
        self._found: HistoryChanged | None = None  # by a transaction
        self._session = session
        self._make_producer = producer
        self._producer = producer()
        self._instance = instance
        self._epoch = epoch
        self._handles = handles
        self._builders = {
            name: RecordBuilder(instance, epoch, name, handle.towards) for name, handle in handles.items()
        }
        self._meters = meters
        self._join_anew = join_anew
        self._unclear: list[PendingTransaction] = []
        self._parcels: list[_Parcel] = []
        self._refused = False
        self._announced = {name: handle.chain.last for name, handle in handles.items()}
        self._server = session.life, server  # number of the connection and begin of the server that were looked at last
        self._beat = time.monotonic() + HEARTBEAT
        self._began = 0.0
        self._wake = threading.Event()
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tidemark-writer-{instance}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is not announced is found in the outbox by the next start."""
        self._halt.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """Transactions have ended."""
        if not self._wake.is_set():
            self._wake.set()

    def changed(self, error: HistoryChanged) -> None:
        self._found = error
        self._wake.set()

    def unclear(self, pending: PendingTransaction) -> None:
        """Take a transaction of which it is not known whether it has ended: the server is asked."""
        self._unclear.append(pending)
        self._wake.set()

    def busy(self) -> bool:
        """Whether anything is in flight, or ended and not acknowledged."""
        chains = [handle.chain for handle in self._handles.values()]
        return bool(self._unclear) or any(chain.in_flight or chain.unacknowledged for chain in chains)

    def oldest_unacknowledged(self, stream: str) -> float | None:
        """When the oldest of what Kafka has not acknowledged ended (time.monotonic)."""
        sent = [span.since for parcel in [*self._parcels] if parcel.handle.name == stream for span in parcel.spans]
        waiting = self._handles[stream].chain.oldest_ended()
        return min([*sent, *([] if waiting is None else [waiting])], default=None)

    # -- its own thread

    def _run(self) -> None:
        pause, problem = FIRST_PAUSE, ""
        while not self._halt.is_set() and self.over is None:
            try:
                self._round()
            except WriterFenced as error:
                self.fence(error)
            except HistoryChanged as error:
                self.over = error
                log.error("This is not the database that it was: joining anew", problem=str(error))
                with suppress(Unavailable, Stop):
                    self._producer.flush(LONGEST_PAUSE)  # what is on its way would come as a zombie behind the JOIN
                self._join_anew()
            except (Unavailable, Stop, psycopg.Error) as error:
                if problem != (problem := str(error)):
                    log.warning("Facts wait in the outbox", instance=self._instance, problem=problem)
                self._halt.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if problem:
                    log.info("Facts go out again", instance=self._instance)
                pause, problem = FIRST_PAUSE, ""
                self._rest()

    def fence(self, error: WriterFenced) -> None:
        """End it: another process has taken over."""
        self.over = error
        self._meters.fenced()
        log.error("This writer was replaced: nothing can be written any more", problem=str(error))

    def _rest(self) -> None:
        until_beat = max(0.0, self._beat - time.monotonic())
        self._wake.wait(min(until_beat, _UNSETTLED) if self._unclear or self._parcels else until_beat)
        self._halt.wait(max(0.0, self._began + PACE - time.monotonic()))
        self._wake.clear()

    def _round(self) -> None:
        self._began = time.monotonic()
        if self._found is not None:
            raise self._found
        self._clear_up()
        if time.monotonic() >= self._beat:
            self._announce_allocated()
            self._beat = time.monotonic() + HEARTBEAT
        self._poll_producer()
        self._send_ended()

    def _clear_up(self) -> None:
        """Find out which unclear transactions have ended; how does not matter, the outbox shows it."""
        for pending in [*self._unclear]:
            with self._session.use() as connection:
                try:
                    row = connection.execute("select pg_xact_status(%s::xid8)", [pending.xid]).fetchone()
                except psycopg.errors.InvalidParameterValue:
                    row = None  # "in the future": the server crashed before that number was durable
            if row is None or row[0] != "in progress":
                self._unclear.remove(pending)
                pending.end()

    def _announce_allocated(self) -> None:
        calm = {name: handle.chain.calm() for name, handle in self._handles.items()}
        with self._session.use() as connection:
            allocated = self._allocated(connection)
            history.require(connection, self._instance, self._epoch)
        history.require_kept(self._builders, self._announced, allocated)
        now = time.monotonic()
        for name, last in allocated.items():
            if self._handles[name].chain.announce(last, calm[name], now):
                self._meters.heartbeat(name)

    def _allocated(self, connection: Connection) -> dict[str, int]:
        return sequences.allocated(connection, {name: (it.oid, it.towards) for name, it in self._handles.items()})

    def _poll_producer(self) -> None:
        """Learn what Kafka has acknowledged."""
        with self._sending():
            self._producer.backlog()

    def _send_ended(self) -> None:
        done = [parcel for parcel in self._parcels if not parcel.left]
        taken: dict[str, list[SettledSpan]] = {}
        if sum(parcel.left for parcel in self._parcels) < MOST_UNACKNOWLEDGED:
            taken = {name: spans for name, handle in self._handles.items() if (spans := handle.chain.take())}
        if not done and not taken:
            return
        try:
            found = self._decide(done, taken)
        except BaseException:
            for name, spans in taken.items():
                for span in spans:
                    self._handles[name].chain.put_back(span)
            raise
        for name, spans in taken.items():
            self._announced[name] = max([self._announced[name], *(span.id for span in spans)])
        self._parcels = [parcel for parcel in self._parcels if parcel not in done]
        for parcel in done:
            for span in parcel.spans:
                parcel.handle.chain.acknowledged(span)
        packed = [self._pack(self._handles[name], spans, found[name]) for name, spans in taken.items()]
        self._parcels += packed
        with self._sending():
            self._send(packed)

    def _decide(
        self, done: Sequence[_Parcel], taken: Mapping[str, list[SettledSpan]]
    ) -> dict[str, list[outbox.OutboxFacts]]:
        """Delete what Kafka has, read what there is of `taken`; both stand for good when this returns."""
        with self._session.use() as connection, connection.transaction():
            # A process that is stopped in here holds rows of the outbox, and its successor wants to delete them.
            hold(connection, self._instance)
            deleted: dict[str, list[_Parcel]] = defaultdict(list)
            for parcel in done:
                deleted[parcel.handle.name].append(parcel)
            for name, parcels in deleted.items():
                outbox.delete(connection, self._builders[name], [span for parcel in parcels for span in parcel.spans])
            found = {name: outbox.read(connection, self._builders[name], spans) for name, spans in taken.items()}
            # After the reading: had a successor taken over, announced these facts and deleted them, its epoch would
            # show here. Without this, what it deleted would look as if it had been rolled back.
            self._look(connection)
            make_durable(connection)
        return found

    def _look(self, connection: Connection) -> None:
        """Raise where the epoch, or the history that it began in, is over."""
        server = self._session.life, history.require(connection, self._instance, self._epoch)
        if server != self._server:  # behind a pooler the connection may outlive the server
            history.require_kept(self._builders, self._announced, self._allocated(connection))
            for handle in self._handles.values():
                handle.chain.doubt_voids()
            self._server = server

    def _pack(self, handle: StreamHandle, spans: Sequence[SettledSpan], found: Sequence[outbox.OutboxFacts]) -> _Parcel:
        sent, records = list[SettledSpan](), list[bytes]()
        for span, of in zip(spans, found, strict=True):
            voids = handle.chain.voids(span)
            whole = span
            if not of.whole:
                last = of.facts[-1].id
                voids = [void for void in voids if void < last]
                whole, rest = span.cut(last, len(of.facts) + len(voids))
                handle.chain.put_back(rest)
                self._began = 0.0  # there is more: go on at once
                self._wake.set()
            sent.append(whole)
            records += self._builders[handle.name].span(whole, of.facts, voids)
        return _Parcel(handle, sent, records, len(records))

    def _send(self, parcels: Iterable[_Parcel]) -> None:
        for parcel in parcels:
            self._producer.send_all(parcel.handle.name, parcel.records, parcel.acknowledged)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Where Kafka refuses a record, all that is open is sent anew: once more is a duplicate, never is a loss.

        The very same records: other edges for the same IDs would be in conflict with those that did arrive.
        """
        try:
            if self._refused:
                self._producer = self._make_producer()
                self._refused = False
                self._send(parcel for parcel in self._parcels if parcel.left)
            yield
        except (Unavailable, Stop):
            self._parcels = [
                replace(parcel, left=len(parcel.records)) if parcel.left else parcel for parcel in self._parcels
            ]
            self._refused = True
            raise
