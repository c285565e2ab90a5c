"""Publishes one stream of Synapse. Waits until all writers are known, then makes records from the evidence."""

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

MAX_LATE = 500
"""The maximum of late facts that are published in one transaction."""


@dataclass(frozen=True, slots=True)
class BridgedStream:
    """A stream that the bridge sends.

    Attributes:
        stream: the stream of Synapse.
        name: its name in Kafka.
        writers: the writers that an operator named. The stream begins when all of them have announced a position.
            Empty: the writers that the database names.
    """

    stream: SynapseStream
    name: str
    writers: Sequence[str] = ()


class StreamPublisher:
    """Publishes one stream, for the time of one connection to each database.

    Args:
        bridged: the stream.
        server: Synapse's database.
        known: the progress and the published facts; None until all writers have joined.
        writers: the writers to wait for.
        head: the highest ID that was given out.
        samples: the stream's highest ID at earlier times; they limit the age of a row.
    """

    def __init__(
        self,
        bridged: BridgedStream,
        server: SynapseServer,
        known: tuple[StreamProgress, PublishedFacts] | None,
        writers: Iterable[str],
        head: int,
        samples: HeadSamples,
    ) -> None:
        self.bridged = bridged
        self._server = server
        self.known: StreamProgress | None = None
        self.published: PublishedFacts | None = None
        if known is not None:
            self.known, self.published = known
        self.head = head
        self._samples = samples
        self.blocked_reason = ""
        """If an operator must act before the stream can go on: the reason. Otherwise empty."""
        self._retiring: set[str] = set()
        self._discarded: Mapping[str, int] = {}
        """Discarded positions that were logged."""
        sent_upto = dict.fromkeys(writers, 0) if self.known is None else self.known.sent_upto
        retired, backlog = ({}, {}) if self.known is None else (self.known.retired, self.known.backlog)
        self.decider = StreamDecider(
            sent_upto, keeps_rows=bridged.stream.keeps_rows, retired=retired.items(), with_backlog=backlog
        )
        self.decider.add_unknown(writers)

    def update_head(self, head: int) -> None:
        """Update the highest ID that was given out. Raises `SequenceWentBack`."""
        if head < self.head:
            raise SequenceWentBack(self.bridged.stream.sequence, self.head, head)
        self.head = head

    @property
    def has_begun(self) -> bool:
        """Whether all writers have joined."""
        return self.known is not None

    @property
    def silent(self) -> list[str]:
        """Writers that have not announced a position yet."""
        return sorted(name for name, reported in self.decider.reported_positions.items() if not reported)

    @property
    def sent_upto(self) -> Mapping[str, int]:
        """By writer, the highest published ID; empty until all writers have joined."""
        return self.decider.sent_upto if self.has_begun else {}

    def start_retirements(self, own: Connection) -> bool:
        """Start the requested retirements. Returns whether the positions of all workers must be requested now."""
        requested = {*state.requested_retirements(own, self.bridged.name)} if self.has_begun else set[str]()
        added = requested - self._retiring
        for writer in sorted(added):
            log.info("Retiring a writer of Synapse", stream=self.bridged.name, writer=writer)
            self.decider.retire(writer)
        self._retiring = requested
        return bool(added)

    def _finish_retirements(self, own: Connection) -> bool:
        """Retire the writers whose facts are all published, and cancel the retirement of writers that are alive.
        Returns whether a writer has retired."""
        assert self.known is not None
        retiring = self.decider.retiring
        for writer in sorted(self._retiring - retiring.keys()):
            log.warning(
                "The retirement of a writer of Synapse is cancelled, because the writer is alive",
                stream=self.bridged.name,
                writer=writer,
            )
            state.cancel_retirement(own, self.bridged.name, writer)
        ended = [writer for writer, at in retiring.items() if at is not None]
        for writer in ended:
            self.known = state.retire(own, self.known, writer)
            self.decider.forget(writer)
            id = self.known.retired[writer]
            log.info("A writer of Synapse has retired", stream=self.bridged.name, writer=writer, id=id)
        self._retiring &= {writer for writer, at in retiring.items() if at is None}
        return bool(ended)

    def receive(self, command: PositionCommand | RdataCommand) -> None:
        if isinstance(command, PositionCommand):
            self.decider.apply_position(command.writer, abs(command.prev), abs(command.id))
        else:
            self.decider.apply_rdata(command.writer, None if command.id is None else abs(command.id), command.row)

    def publish(self, synapse: Connection, own: Connection) -> list[ProvenAdvance]:
        """Write the records of everything that may be published now to the outbox. Returns the advances."""
        if self.known is None:
            self._create(synapse, own)
        if self.known is None or self._add_unknown_writers(own) or (self._retiring and self._finish_retirements(own)):
            return []
        assert self.published is not None
        for writer in self.decider.backlog:
            self._send_backlog(synapse, own, writer)
        if (ids := self.decider.range_to_read()) is None:
            return []
        head, facts = tables.facts(synapse, self.bridged.stream, *ids)
        self.update_head(head)
        advances = self.decider.apply_facts(ids, head, facts)
        if advances:
            lsn = flush_wal(synapse)
            self.known = state.advance_stream(own, self.known, self.published, advances, lsn, self.head)
        else:
            self._add_unknown_writers(own)
        return advances

    def check_sequence(self, synapse: Connection) -> None:
        """Block the stream while the settings of its sequence are not those of Synapse."""
        if (problem := tables.sequence_problem(synapse, self.bridged.stream)) != self.blocked_reason:
            self.blocked_reason = problem
            if problem:
                log.error("A stream of Synapse is blocked", stream=self.bridged.name, problem=problem)
            else:
                log.info("A stream of Synapse is no longer blocked", stream=self.bridged.name)

    def update_retention(self, synapse: Connection, own: Connection, now: int) -> None:
        """Update the ID up to which Synapse may have deleted rows. `now`: the clock of Synapse's Postgres in ms."""
        if self.bridged.stream.kept_seconds is not None:
            self.decider.kept_above = self._samples.kept_above(now, self.bridged.stream.kept_seconds)
            if self.has_begun:
                self._samples.note(own, now, self.head, self.bridged.stream.kept_seconds)

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
        table = self.decider.with_writers(tables.identities(synapse, self.bridged.stream, low, self.known.reach))
        self.decider.add_unknown(fact.writer for fact in table)
        if replaced := self.published.replaced(table):
            raise FactsReplaced(self.bridged.name, replaced[0].id)
        missing = {fact.id for fact in self.published.unpublished(table, sent_upto)}
        late = list[StreamFact]()
        for id in sorted(missing)[:MAX_LATE]:
            late += self.decider.with_writers(tables.facts(synapse, self.bridged.stream, id - 1, id)[1])
        if late:
            flush_wal(synapse)
            state.publish_late(own, self.known, self.published, late)
            log.error(
                "Facts appeared in Synapse's tables below published positions, and are published as late. Check whether"
                " two processes have the same worker_name, and whether a sequence was set back",
                stream=self.bridged.name, ids=[fact.id for fact in late][:20], count=len(missing),
            )  # fmt: skip
        if newest is None:
            evidence.trim(own, self.bridged.name, self.published)
        return late

    def log_discarded_positions(self) -> None:
        """Log the writers whose announced position was discarded, once for each position."""
        discarded = self.decider.discarded_positions
        for writer, announced in discarded.items():
            if self._discarded.get(writer) != announced:
                log.error(
                    "A worker of Synapse announces IDs that the sequence has not given out, so its position does not"
                    " advance. Restart the worker, and check whether the sequence was set back",
                    stream=self.bridged.name, writer=writer, announced=announced,
                    sequence=self.bridged.stream.sequence, given_out=self.head,
                )  # fmt: skip
        self._discarded = discarded

    def _create(self, synapse: Connection, own: Connection) -> None:
        """Begin the stream, if the positions of all writers are known."""
        for unknown_writer in sorted(self.decider.unknown_writers):
            self.decider.add_writer(unknown_writer, 0)
        if self.decider.floor() is None or not self.decider.reported_positions.keys() >= {*self.bridged.writers}:
            return
        self.update_head(tables.head(synapse, self.bridged.stream))
        self.decider.check(self.head)
        if (floor := self.decider.floor()) is None:
            return  # a worker announced an ID that the sequence has not given out
        writers = self.decider.reported_positions.keys()
        self.known, self.published = state.create_stream(
            own, self.bridged.stream, self.bridged.name, self._server, writers, floor, self.head
        )
        self.decider.begin(floor)
        log.info(
            "A stream of Synapse begins; older facts are only in the table",
            stream=self.bridged.name,
            floor=floor,
            writers=sorted(writers),
        )

    def _add_unknown_writers(self, own: Connection) -> bool:
        """Let unknown writers join. Returns whether there were any."""
        writers = sorted(self.decider.unknown_writers)
        for unknown_writer in writers:
            assert self.known is not None
            at, kept_above = self.decider.linear, self.decider.kept_above
            self.known = state.add_writer(own, self.known, unknown_writer, at, kept_above=kept_above)
            at = self.known.sent_upto[unknown_writer]
            self.decider.add_writer(unknown_writer, at)
            log.info("A writer of Synapse joins", stream=self.bridged.name, writer=unknown_writer, id=at)
        return bool(writers)

    def _send_backlog(self, synapse: Connection, own: Connection, writer: str) -> None:
        assert self.known is not None
        assert self.published is not None
        _, facts = tables.facts(
            synapse, self.bridged.stream, self.known.backlog[writer], self.known.sent_upto[writer], writer
        )
        flush_wal(synapse)
        self.known = state.send_backlog(own, self.known, self.published, writer, facts)
        self.decider.backlog_sent(writer)
        if facts:
            log.warning(
                "A writer of Synapse has facts below the ID at which it joined", stream=self.bridged.name, writer=writer
            )
