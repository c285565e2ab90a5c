"""Publishes one stream of Synapse: begins when all writers are known, then turns evidence into records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemark.common.errors import FactsReplaced, SequenceWentBack
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection
from tidemark.sources.synapse import evidence, state, tables
from tidemark.sources.synapse.decider import ProvenAdvance, StreamDecider, StreamFact
from tidemark.sources.synapse.evidence import HeadSamples, PublishedFacts
from tidemark.sources.synapse.state import StreamProgress, SynapseServer
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.sources.transactions import flush_wal
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand

log = get_logger(__name__)

MOST_LATE = 500
"""The largest number of late facts that are published in one transaction."""


@dataclass(frozen=True, slots=True)
class BridgedStream:
    """`name`: the stream's name on Kafka. `writers`: the writers that an operator named; the stream begins when all of
    them have announced a position. Empty: the writers that the database names."""

    stream: SynapseStream
    name: str
    writers: Sequence[str] = ()


class StreamPublisher:
    """Publishes one stream, with one connection to each database. `known` and `published` are None until all writers
    have joined. `head`: the highest known ID that was given out."""

    def __init__(
        self,
        bridged: BridgedStream,
        seen: SynapseServer,
        known: tuple[StreamProgress, PublishedFacts] | None,
        writers: Iterable[str],
        head: int,
        samples: HeadSamples,
    ) -> None:
        self.of = bridged
        self._seen = seen
        self.known: StreamProgress | None = None
        self.published: PublishedFacts | None = None
        if known is not None:
            self.known, self.published = known
        self.head = head
        self._samples = samples
        self.blocked_reason = ""
        """The reason why nothing of the stream is published, if an operator has to act."""
        self._retiring: set[str] = set()
        self._beyond: Mapping[str, int] = {}
        sent_upto = dict.fromkeys(writers, 0) if self.known is None else self.known.sent_upto
        retired, backlog = ({}, {}) if self.known is None else (self.known.retired, self.known.backlog)
        self.decider = StreamDecider(
            sent_upto, keeps=bridged.stream.keeps, retired=retired.items(), with_backlog=backlog
        )
        self.decider.add_unknown(writers)

    def see(self, head: int) -> None:
        """Update the highest ID that was given out. Raises `SequenceWentBack`."""
        if head < self.head:
            raise SequenceWentBack(self.of.stream.sequence, self.head, head)
        self.head = head

    @property
    def has_begun(self) -> bool:
        return self.known is not None

    @property
    def silent(self) -> list[str]:
        """Writers that have not announced a position yet."""
        return sorted(name for name, reported in self.decider.reported_positions.items() if not reported)

    @property
    def sent_upto(self) -> Mapping[str, int]:
        """By writer, the highest published ID; empty until all writers have joined."""
        return self.decider.sent_upto if self.has_begun else {}

    def retire(self, own: Connection) -> bool:
        """Start the requested retirements. Returns whether all workers must be asked now."""
        asked = {*state.ordered_retirements(own, self.of.name)} if self.has_begun else set[str]()
        added = asked - self._retiring
        for writer in sorted(added):
            log.info("A writer of Synapse is to retire", stream=self.of.name, writer=writer)
            self.decider.retire(writer)
        self._retiring = asked
        return bool(added)

    def _retire(self, own: Connection) -> bool:
        """Whether a writer has retired."""
        assert self.known is not None
        retiring = self.decider.retiring
        for writer in sorted(self._retiring - retiring.keys()):
            log.warning("A writer of Synapse is alive, and does not retire", stream=self.of.name, writer=writer)
            state.cancel_retirement(own, self.of.name, writer)
        ended = [writer for writer, at in retiring.items() if at is not None]
        for writer in ended:
            self.known = state.retire(own, self.known, writer)
            self.decider.forget(writer)
            id = self.known.retired[writer]
            log.info("A writer of Synapse has retired", stream=self.of.name, writer=writer, id=id)
        self._retiring &= {writer for writer, at in retiring.items() if at is None}
        return bool(ended)

    def receive(self, command: PositionCommand | RdataCommand) -> None:
        if isinstance(command, PositionCommand):
            self.decider.announced(command.writer, abs(command.prev), abs(command.id))
        else:
            self.decider.completed(command.writer, None if command.id is None else abs(command.id), command.row)

    def round(self, synapse: Connection, own: Connection) -> list[ProvenAdvance]:
        """Store the records of everything that may be published now; returns the advances."""
        if self.known is None:
            self._create(synapse, own)
        if self.known is None or self._add_unknown_writers(own) or (self._retiring and self._retire(own)):
            return []
        assert self.published is not None
        for writer in self.decider.backlog:
            self._send_backlog(synapse, own, writer)
        if (asked := self.decider.asked()) is None:
            return []
        head, facts = tables.facts(synapse, self.of.stream, *asked)
        self.see(head)
        advances = self.decider.read(asked, head, facts)
        if advances:
            lsn = flush_wal(synapse)
            self.known = state.advance_stream(own, self.known, self.published, advances, lsn, self.head)
        else:
            self._add_unknown_writers(own)
        return advances

    def check_sequence(self, synapse: Connection) -> None:
        """Block the stream while its sequence does not give out IDs one by one, in order."""
        if (unfit := tables.unfit(synapse, self.of.stream)) != self.blocked_reason:
            self.blocked_reason = unfit
            if unfit:
                log.error("A stream of Synapse is blocked", stream=self.of.name, problem=unfit)
            else:
                log.info("A stream of Synapse continues", stream=self.of.name)

    def age(self, synapse: Connection, own: Connection, now: int) -> None:
        """Update the ID up to which Synapse may have deleted rows by `now`, its server's clock in ms."""
        if self.of.stream.kept_for is not None:
            self.decider.kept_above = self._samples.kept_above(now, self.of.stream.kept_for)
            if self.has_begun:
                self._samples.note(own, now, self.head, self.of.stream.kept_for)

    def audit(self, synapse: Connection, own: Connection, newest: int | None = None) -> list[StreamFact]:
        """Publish facts that appeared at or below published positions as late.

        Args:
            synapse: Synapse's database.
            own: the bridge's database.
            newest: compare only this many of the newest published facts; None: all remembered facts.

        Raises:
            FactsReplaced: other rows have IDs that were published.
        """
        if self.known is None:
            return []
        assert self.published is not None
        low = self.published.since if newest is None else self.published.above(newest)
        sent_upto = {writer: at for writer, at in self.known.all_sent_upto.items() if writer not in self.known.backlog}
        table = self.decider.owned(tables.identities(synapse, self.of.stream, low, self.known.reach))
        self.decider.add_unknown(fact.writer for fact in table)
        if other := self.published.replaced(table):
            raise FactsReplaced(self.of.name, other[0].id)
        missing = {fact.id for fact in self.published.unpublished(table, sent_upto)}
        late = list[StreamFact]()
        for id in sorted(missing)[:MOST_LATE]:
            late += self.decider.owned(tables.facts(synapse, self.of.stream, id - 1, id)[1])
        if late:
            flush_wal(synapse)
            state.publish_late(own, self.known, self.published, late)
            log.error(
                "Synapse's tables have facts where everything was published: they are published as late. Two processes"
                " had one worker_name, or a sequence was set back",
                stream=self.of.name, ids=[fact.id for fact in late][:20], count=len(missing),
            )  # fmt: skip
        if newest is None:
            evidence.forget(own, self.of.name, self.published)
        return late

    def name_contradictions(self) -> None:
        """Log writers whose announced position was discarded."""
        beyond = self.decider.beyond
        for writer, announced in beyond.items():
            if self._beyond.get(writer) != announced:
                log.error(
                    "A worker of Synapse announces IDs that the sequence has not given out, so its position does not"
                    " advance. Restart the worker, and check whether the sequence was set back",
                    stream=self.of.name, writer=writer, announced=announced,
                    sequence=self.of.stream.sequence, given_out=self.head,
                )  # fmt: skip
        self._beyond = beyond

    def _create(self, synapse: Connection, own: Connection) -> None:
        for unknown_writer in sorted(self.decider.unknown_writers):
            self.decider.add_writer(unknown_writer, 0)
        if self.decider.floor() is None or not self.decider.reported_positions.keys() >= {*self.of.writers}:
            return
        self.see(tables.head(synapse, self.of.stream))
        self.decider.check(self.head)
        if (floor := self.decider.floor()) is None:
            return  # a worker announced an ID that the sequence has not given out
        writers = self.decider.reported_positions.keys()
        self.known, self.published = state.create_stream(
            own, self.of.stream, self.of.name, self._seen, writers, floor, self.head
        )
        self.decider.begin(floor)
        log.info("Telling a stream of Synapse", stream=self.of.name, floor=floor, writers=sorted(writers))

    def _add_unknown_writers(self, own: Connection) -> bool:
        """Whether unknown writers were found."""
        writers = sorted(self.decider.unknown_writers)
        for unknown_writer in writers:
            assert self.known is not None
            at, kept_above = self.decider.linear, self.decider.kept_above
            self.known = state.add_writer(own, self.known, unknown_writer, at, kept_above=kept_above)
            at = self.known.sent_upto[unknown_writer]
            self.decider.add_writer(unknown_writer, at)
            log.info("A writer of Synapse joins", stream=self.of.name, writer=unknown_writer, id=at)
        return bool(writers)

    def _send_backlog(self, synapse: Connection, own: Connection, writer: str) -> None:
        assert self.known is not None
        assert self.published is not None
        _, facts = tables.facts(
            synapse, self.of.stream, self.known.backlog[writer], self.known.sent_upto[writer], writer
        )
        flush_wal(synapse)
        self.known = state.send_backlog(own, self.known, self.published, writer, facts)
        self.decider.backlog_sent(writer)
        if facts:
            log.warning("A writer of Synapse has events below where it joined", stream=self.of.name, writer=writer)
