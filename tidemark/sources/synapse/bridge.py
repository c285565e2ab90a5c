"""`tidemark synapse`: what the workers of a Synapse write, told to Kafka as they complete it (docs/how-to/synapse.md).

While a server is away it waits, for as long as that takes. What it holds in memory is bounded: the rest waits in
Synapse's database. One of several speaks, the others wait for its session to end.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import structlog

from tidemark.common.errors import Refused, Retry, Unavailable
from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.sources.producer import RecordProducer
from tidemark.sources.synapse import queries, state, timelines
from tidemark.sources.synapse.channel import ChannelEvent, SynapseChannel
from tidemark.sources.synapse.evidence import HeadSamples
from tidemark.sources.synapse.metrics import BridgeMetrics
from tidemark.sources.synapse.oversized import OversizedRecords
from tidemark.sources.synapse.queries import TableWriter
from tidemark.sources.synapse.state import SCHEMA, SynapseServer
from tidemark.sources.synapse.streams import BridgedStream, StreamTelling
from tidemark.sources.transactions import OpenTransaction, Reports, durable, end_one, history, running
from tidemark.streaming.wire import records

log = structlog.get_logger(__name__)

MOST_UNSENT = 20_000
"""Records that wait for Kafka's acknowledgement; the rest waits in Synapse's database."""
SHORTEST, LONGEST = 0.01, 0.05
_WATCHED_EVERY = 1.0
_ASKED_AFTER, _ASKED_EVERY = 10.0, 60.0
"""Seconds for which nobody is asked again how far it is, at first and in the end: each answer is a line of every writer
of every stream."""
_DEEP_EVERY, _NEWEST = 60, 1000
"""Of so many looks at facts that were published, one is at all that are remembered, the others at the newest."""
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_TURN = 1.0
_PATIENCE = 30.0
LOCK_TIMEOUT = "10s"


class SynapseBridge:
    """Runs in the thread that calls `run`, until `halt` is set."""

    def __init__(
        self,
        synapse: PostgresSession,
        own: PostgresSession,
        channel: SynapseChannel,
        producer: Callable[[], RecordProducer],
        streams: Sequence[BridgedStream],
        metrics: BridgeMetrics,
        halt: threading.Event,
    ) -> None:
        self._synapse = synapse
        self._own = own
        self._channel = channel
        self._make_producer = producer
        self._producer: RecordProducer
        self._connected = False
        """Whether there is a producer, and nothing has failed since it was made."""
        self._streams = streams
        self._names = [each.name for each in streams]
        self._metrics = metrics
        self._halt = halt
        self._tellings: dict[str, StreamTelling] = {}
        self._heads: dict[str, int] = {}
        """The highest ID of each stream that was seen to be given out, on connections before too."""
        self._sent: dict[str, int] = {}
        """By stream the highest number of the outbox that was sent on this connection."""
        self._done: list[int] = []
        self._flying = 0
        self._oversized = OversizedRecords(metrics.oversized)
        self._reports = Reports({})
        self._watches = 0
        self._asked, self._patience = 0.0, _ASKED_AFTER

    def run(self) -> None:
        """Raises `Stop` where a person must decide, and what a server refuses before it ever worked."""
        pause, problem, worked = _PAUSE, "", False
        while not self._halt.is_set():
            try:
                with self._own.use() as own:
                    SCHEMA.check(own)
                    if self._has_its_turn(own):
                        with self._synapse.use() as synapse:
                            synapse.execute("select set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
                            self._begin(synapse, own)
                            worked = True
                            if problem:
                                log.info("Synapse is told again")
                            pause, problem = _PAUSE, ""
                            self._work(synapse, own)
            except (Retry, Refused) as error:
                if isinstance(error, Refused) and not worked:
                    raise
                if problem != (problem := str(error)):
                    log.warning("Synapse is not told", problem=problem)
                self._own.close()
                self._synapse.close()
                self._connected = False
                self._halt.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            finally:
                self._metrics.rest()

    def _has_its_turn(self, own: Connection) -> bool:
        """Wait until no other bridge of these streams is connected. Not in the server: that would hold a snapshot."""
        waits = False
        while not self._halt.is_set():
            if state.has_turn(own, self._names):
                self._metrics.standby.set(0)
                return True
            if not waits:
                log.info("Another bridge speaks; waiting for its end")
            waits = True
            self._metrics.standby.set(1)
            self._halt.wait(_TURN)
        return False

    def _begin(self, synapse: Connection, own: Connection) -> None:
        """Send what another one left, and learn how the streams stand."""
        if not self._connected:
            self._producer = self._make_producer()
            self._connected = True
        self._sent, self._done, self._flying = dict.fromkeys(self._names, 0), [], 0
        self._oversized.forget()
        found = history(synapse, self._synapse.where, "events")
        queries.check_server(synapse, self._channel.name)
        server = SynapseServer(found.database, durable(synapse), self._channel.name)
        self._server = server
        self._tellings = {}
        for each in self._streams:
            head = queries.head(synapse, each.stream)
            read = partial(queries.identities, synapse, each.stream)
            seen = self._heads.get(each.name, 0)
            known = timelines.begin(own, each.stream, each.name, server, head, read, seen)
            self._heads[each.name] = head
            writers = {*each.writers} or queries.writers(synapse, each.stream)
            samples = HeadSamples.load(own, each.name)
            self._tellings[each.stream.name] = StreamTelling(each, server, known, writers, head, samples)
        self._send(own)
        self._producer.deliver(_PATIENCE)
        self._settle(own)
        self._reports = Reports({})
        self._channel.take()
        self._channel.ask()
        self._asked = time.monotonic()

    def _work(self, synapse: Connection, own: Connection) -> None:
        pause, watched = SHORTEST, 0.0
        self._metrics.speaking.set(1)
        while not self._halt.is_set():
            self._metrics.heartbeat.set_to_current_time()
            heard = self._hear()
            if self._flying < MOST_UNSENT and self._round(synapse, own):
                self._send(own)
                heard = True
            self._producer.backlog()
            if not self._flying or self._done:
                self._metrics.sent.set_to_current_time()
            now = time.monotonic()
            if now - watched >= _WATCHED_EVERY:
                self._settle(own)
                self._watch(synapse, own)
                watched = now
            pause = SHORTEST if heard else min(pause * 1.2, LONGEST)
            self._halt.wait(pause)
        self._producer.flush(_PATIENCE)
        self._settle(own)

    def _hear(self) -> bool:
        heard = self._channel.take()
        for each in heard:
            if isinstance(each, ChannelEvent):
                for telling in self._tellings.values():
                    telling.decider.asked_all() if each is ChannelEvent.ASKED else telling.decider.doubt()
            elif (of := self._tellings.get(each.stream)) is not None:
                of.hear(each)
        return bool(heard)

    def _round(self, synapse: Connection, own: Connection) -> bool:
        """Whether something is to be sent."""
        asked = [each for each in self._tellings.values() if each.decider.wants_look]
        if asked:
            heads = self._see(synapse, asked)
            end_one(synapse)
            runs = running(synapse)
            who = queries.table_writers(synapse, [each.of.stream for each in asked], runs) if runs else []
            for each in asked:
                name = each.of.stream.name
                each.decider.look(heads[name], frozenset(it.number for it in who if name in it.streams))
        moved = False
        for each in self._tellings.values():
            if each.held or each.of.name in self._oversized:
                continue
            before = each.known
            for advance in each.round(synapse, own):
                self._metrics.facts.labels(each.of.name).inc(len(advance.facts))
                if advance.unseen:
                    self._metrics.unseen.labels(each.of.name).inc()
            moved |= each.known is not before
        return moved

    def _see(self, synapse: Connection, tellings: Iterable[StreamTelling]) -> dict[str, int]:
        """How far IDs are given out, by stream. Raises `SequenceWentBack`."""
        found = {each.of.stream.name: each for each in tellings}
        heads = queries.heads(synapse, [each.of.stream for each in found.values()])
        for name, each in found.items():
            self._heads[each.of.name] = max(heads[name], each.head)
            each.see(heads[name])
        return heads

    def _send(self, own: Connection) -> None:
        sent = {name: number for name, number in self._sent.items() if name not in self._oversized}
        for each in self._oversized.fitting(state.unsent(own, sent), self._producer, time.monotonic()):
            self._sent[each.stream] = each.number
            self._flying += 1
            self._producer.send_all(each.stream, [each.value], partial(self._acknowledged, each.number))

    def _acknowledged(self, number: int) -> None:
        self._done.append(number)
        self._flying -= 1

    def _settle(self, own: Connection) -> None:
        if self._done:
            done, self._done = self._done, []
            state.acknowledged(own, done)

    def _watch(self, synapse: Connection, own: Connection) -> None:
        """For people: who holds which stream, and what they ordered. Everybody is asked where somebody seems missed."""
        self._metrics.listening.set(self._channel.connected)
        self._metrics.lines.set(self._channel.lines)
        if (producer := self._oversized.larger(self._make_producer, time.monotonic())) is not None:
            self._producer.deliver(_PATIENCE)
            self._producer = producer
            self._oversized.forget()
            self._send(own)
        self._look_back(synapse, own)
        heads = self._see(synapse, self._tellings.values())
        now, held = time.monotonic(), set[str]()
        for name, each in self._tellings.items():
            self._metrics.waited_for(each.of.name, each.told, heads[name], now)
            if any(at < heads[name] for at in each.told.values()):
                held.add(name)
        ordered = [each.retire(own) for each in self._tellings.values()]
        if any(ordered):
            self._channel.ask()
        unfounded = False
        for each in self._tellings.values():
            unfounded |= not each.founded
            self._metrics.silent.labels(each.of.name).set(0 if each.founded else len(each.silent))
        if not (held or unfounded):
            self._patience = _ASKED_AFTER
        elif now - self._asked >= self._patience:
            self._asked, self._patience = now, min(2 * self._patience, _ASKED_EVERY)
            self._channel.ask()
            for each in self._tellings.values():
                if not each.founded:
                    log.info("Waiting for the word of every writer", stream=each.of.name, silent=each.silent)
        self._report(queries.table_writers(synapse, [self._tellings[name].of.stream for name in held]) if held else [])

    def _look_back(self, synapse: Connection, own: Connection) -> None:
        """Whether the database is still the one that was told of, and no fact came where everything was told.

        Raises `Unavailable` if it is another one."""
        if history(synapse, self._synapse.where, "events").database != self._server.database:
            raise Unavailable("Postgres", self._synapse.where, "the database is another one than a moment ago")
        clock, deep = queries.now(synapse), self._watches % _DEEP_EVERY == 0
        self._watches += 1
        for each in self._tellings.values():
            each.check_sequence(synapse)
            each.age(synapse, own, clock)
            late = each.audit(synapse, own, None if deep else _NEWEST)
            if late:
                self._metrics.late.labels(each.of.name).inc(len(late))
                self._send(own)
            each.name_contradictions()

    def _report(self, found: Sequence[TableWriter]) -> None:
        now, opened = datetime.now(UTC), list[OpenTransaction]()
        holders = {name: each.known.holder for name, each in self._tellings.items() if each.known is not None}
        for each in found:
            for name in sorted(each.streams & holders.keys()):
                told = self._tellings[name].of.name
                opened.append(replace(each.transaction, stream=told, writer=holders[name].writer))
        self._metrics.open.show(((each.stream,), each.age(now)) for each in opened)
        # In one name, whoever holds: who was told in another would stand there for ever.
        known = [each.known for each in self._tellings.values() if each.known is not None]
        self._reports.tellers = {it.name: (first, it.epochs[first]) for it in known for first in [min(it.told)]}
        for report in self._reports.due(opened, now):
            self._producer.send(report.stream, records.encode(report))
