"""The one thread of a writer that decides what became of its IDs, and tells it to Kafka.

An ID is decided after its transaction has ended, by the outbox: a row is there, or it is not. Nothing that the service
remembers counts, because a savepoint may have been rolled back and a commit's answer may have been lost. Whatever does
not work is tried again: Kafka and Postgres may be away for as long as they like, and what is kept meanwhile is small.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psycopg
import structlog

from tidemark.sources.producer import RecordProducer
from tidemark.sources.writer import outbox, sequences
from tidemark.sources.writer.chain import SettledSpan
from tidemark.sources.writer.fence import hold, make_durable, require_epoch
from tidemark.sources.writer.metrics import Meters
from tidemark.sources.writer.pending import PendingTransaction, StreamHandle
from tidemark.sources.writer.records import RecordBuilder
from tidemark.sources.writer.session import Session
from tidemark.streaming.errors import Stop, Unavailable, WriterFenced

log = structlog.get_logger(__name__)

PACE = 0.05
"""Seconds from one look at the outbox to the next, at least: what ends in between shares one query and one commit."""
HEARTBEAT = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
_UNSETTLED = 0.1
"""Seconds between two looks at what Kafka acknowledged, or at transactions whose end is not known."""
MOST_UNACKNOWLEDGED = 5_000
"""Records that wait for Kafka's acknowledgement; past it the rest waits in the outbox and costs no memory."""


@dataclass(slots=True, eq=False)
class _Parcel:
    """Spans of one stream that were sent and are not all acknowledged (`left` records), or not yet deleted."""

    outlet: StreamHandle
    spans: list[SettledSpan]
    records: list[bytes]
    left: int

    def acknowledged(self) -> None:
        self.left -= 1


class Relay:
    """Begins with `start`. `ended`, `fenced`, `busy` are for any thread; everything else happens on its own."""

    def __init__(
        self,
        session: Session,
        producer: Callable[[], RecordProducer],
        instance: str,
        epoch: int,
        outlets: Mapping[str, StreamHandle],
        meters: Meters,
    ) -> None:
        self.fenced = False
        self._session = session
        self._make_producer = producer
        self._producer = producer()
        self._instance = instance
        self._epoch = epoch
        self._outlets = outlets
        self._voices = {name: RecordBuilder(instance, epoch, name, outlet.towards) for name, outlet in outlets.items()}
        self._meters = meters
        self._unclear: list[PendingTransaction] = []
        self._parcels: list[_Parcel] = []
        self._refused = False
        self._life = session.life
        self._beat = time.monotonic() + HEARTBEAT
        self._began = 0.0
        self._wake = threading.Event()
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tidemark-writer-{instance}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it has not told is found in the outbox by the next start."""
        self._halt.set()
        self._wake.set()
        self._thread.join()

    def wake(self) -> None:
        """Transactions have ended."""
        if not self._wake.is_set():
            self._wake.set()

    def unclear(self, draft: PendingTransaction) -> None:
        """It is not known whether the transaction has ended: found out by asking the server."""
        self._unclear.append(draft)
        self._wake.set()

    def busy(self) -> bool:
        """Whether anything is in flight, or ended and not told."""
        chains = [outlet.chain for outlet in self._outlets.values()]
        return bool(self._unclear) or any(chain.in_flight or chain.untold for chain in chains)

    def oldest_untold(self, stream: str) -> float | None:
        """When the oldest of what Kafka has not acknowledged ended (time.monotonic)."""
        sent = [span.since for parcel in [*self._parcels] if parcel.outlet.name == stream for span in parcel.spans]
        waiting = self._outlets[stream].chain.oldest_ended()
        return min([*sent, *([] if waiting is None else [waiting])], default=None)

    # -- its own thread

    def _run(self) -> None:
        pause, problem = FIRST_PAUSE, ""
        while not self._halt.is_set() and not self.fenced:
            try:
                self._round()
            except WriterFenced as error:
                self.fenced = True
                self._meters.fenced()
                log.error("This writer was replaced: nothing can be written any more", problem=str(error))
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

    def _rest(self) -> None:
        until_beat = max(0.0, self._beat - time.monotonic())
        self._wake.wait(min(until_beat, _UNSETTLED) if self._unclear or self._parcels else until_beat)
        self._halt.wait(max(0.0, self._began + PACE - time.monotonic()))
        self._wake.clear()

    def _round(self) -> None:
        self._began = time.monotonic()
        self._clear_up()
        if time.monotonic() >= self._beat:
            self._announce_heads()
            self._beat = time.monotonic() + HEARTBEAT
        self._hear()
        self._tell()

    def _clear_up(self) -> None:
        """Find out which unclear transactions have ended; how does not matter, the outbox shows it."""
        for draft in [*self._unclear]:
            with self._session.use() as connection:
                try:
                    row = connection.execute("select pg_xact_status(%s::xid8)", [draft.xid]).fetchone()
                except psycopg.errors.InvalidParameterValue:
                    row = None  # "in the future": the server crashed before that number was durable
            if row is None or row[0] != "in progress":
                self._unclear.remove(draft)
                draft.end()

    def _announce_heads(self) -> None:
        calm = {name: outlet.chain.calm() for name, outlet in self._outlets.items()}
        with self._session.use() as connection:
            heads = sequences.heads(connection, {name: (it.oid, it.towards) for name, it in self._outlets.items()})
            require_epoch(connection, self._instance, self._epoch)
        now = time.monotonic()
        for name, head in heads.items():
            if self._outlets[name].chain.announce(head, calm[name], now):
                self._meters.heartbeat(name)

    def _hear(self) -> None:
        """Learn what Kafka has acknowledged."""
        with self._sending():
            self._producer.backlog()

    def _tell(self) -> None:
        done = [parcel for parcel in self._parcels if not parcel.left]
        taken: dict[str, list[SettledSpan]] = {}
        if sum(parcel.left for parcel in self._parcels) < MOST_UNACKNOWLEDGED:
            taken = {name: spans for name, outlet in self._outlets.items() if (spans := outlet.chain.take())}
        if not done and not taken:
            return
        try:
            found = self._decide(done, taken)
        except BaseException:
            for name, spans in taken.items():
                for span in spans:
                    self._outlets[name].chain.put_back(span)
            raise
        self._parcels = [parcel for parcel in self._parcels if parcel not in done]
        for parcel in done:
            for span in parcel.spans:
                parcel.outlet.chain.told(span)
        packed = [self._pack(self._outlets[name], spans, found[name]) for name, spans in taken.items()]
        self._parcels += packed
        with self._sending():
            self._send(packed)

    def _decide(
        self, done: Sequence[_Parcel], taken: Mapping[str, list[SettledSpan]]
    ) -> dict[str, list[outbox.OutboxFacts]]:
        """Delete what was told, read what there is of `taken`; both stand for good when this returns."""
        with self._session.use() as connection:
            if self._session.life != self._life:
                self._life = self._session.life
                for outlet in self._outlets.values():
                    outlet.chain.doubt_voids()
            with connection.transaction():
                # A process that is stopped in here holds rows of the outbox, and its successor wants to delete them.
                hold(connection, self._instance)
                deleted: dict[str, list[_Parcel]] = defaultdict(list)
                for parcel in done:
                    deleted[parcel.outlet.name].append(parcel)
                for name, parcels in deleted.items():
                    outbox.delete(connection, self._voices[name], [span for parcel in parcels for span in parcel.spans])
                found = {name: outbox.read(connection, self._voices[name], spans) for name, spans in taken.items()}
                # After the reading: had a successor taken over, told these facts and deleted them, its epoch would show
                # here. Without this, what it deleted would look as if it had been rolled back.
                require_epoch(connection, self._instance, self._epoch)
                make_durable(connection)
        return found

    def _pack(self, outlet: StreamHandle, spans: Sequence[SettledSpan], found: Sequence[outbox.OutboxFacts]) -> _Parcel:
        told, records = list[SettledSpan](), list[bytes]()
        for span, of in zip(spans, found, strict=True):
            voids = outlet.chain.voids(span)
            whole = span
            if not of.whole:
                last = of.facts[-1].id
                voids = [void for void in voids if void < last]
                whole, rest = span.cut(last, len(of.facts) + len(voids))
                outlet.chain.put_back(rest)
                self._began = 0.0  # there is more: go on at once
                self._wake.set()
            told.append(whole)
            records += self._voices[outlet.name].span(whole, of.facts, voids)
        return _Parcel(outlet, told, records, len(records))

    def _send(self, parcels: Iterable[_Parcel]) -> None:
        for parcel in parcels:
            self._producer.send_all(parcel.outlet.name, parcel.records, parcel.acknowledged)

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
