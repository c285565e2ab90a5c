"""Publishes one stream of Synapse.

The stream begins when all its writers have announced a position, and their earlier transactions have ended. Then the
publisher writes the records of proven advances to the bridge's outbox.
"""

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

MAX_LATE_FACTS = 500
"""The largest number of late facts that are published in one transaction."""


@dataclass(frozen=True, slots=True)
class BridgedStream:
    """A stream that the bridge sends.

    Attributes:
        stream: the stream of Synapse.
        name: the stream's name in Kafka.
        writers: the writers that an operator named; empty for the writers that the database names. The stream begins
            when all these writers have announced a position.
    """

    stream: SynapseStream
    name: str
    writers: Sequence[str] = ()


class StreamPublisher:
    """Publishes one stream, during one connection to each database.

    Args:
        bridged: the stream.
        server: Synapse's database.
        known: the progress and the published facts; None if the stream has not begun.
        writers: the writers that must announce a position before the stream begins.
        head: the highest ID that was given out (a magnitude).
        samples: the stream's highest IDs at earlier times, which limit the age of a row.

    Attributes:
        progress: the progress of the stream; None until the stream begins.
        published: the published facts; None until the stream begins.
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
        self.progress: StreamProgress | None = None
        self.published: PublishedFacts | None = None
        if known is not None:
            self.progress, self.published = known
        self.head = head
        self._samples = samples
        self.blocked_reason = ""
        """Why the stream is blocked until an operator acts; empty if the stream is not blocked."""
        self._requested_retirements: set[str] = set()
        self._logged_positions: Mapping[str, int] = {}
        """Discarded positions that were logged."""
        sent_upto = dict.fromkeys(writers, 0) if self.progress is None else self.progress.sent_upto
        retired, backlog = (
            ({}, {}) if self.progress is None else (self.progress.retired_at_ids, self.progress.backlog_starts)
        )
        self.decider = StreamDecider(
            sent_upto,
            keeps_rows=bridged.stream.keeps_rows,
            retired_positions=retired.items(),
            writers_with_backlog=backlog,
        )
        self.decider.add_unknown(writers)

    def update_head(self, head: int) -> None:
        """Record the highest ID that was given out. Raises `SequenceWentBack` if `head` is lower than before."""
        if head < self.head:
            raise SequenceWentBack(self.bridged.stream.sequence, self.head, head)
        self.head = head

    @property
    def has_begun(self) -> bool:
        """Whether the stream has begun: all writers have joined."""
        return self.progress is not None

    @property
    def silent_writers(self) -> list[str]:
        """Writers that have not announced a position yet."""
        return sorted(name for name, announced in self.decider.announced_positions.items() if not announced)

    @property
    def sent_upto(self) -> Mapping[str, int]:
        """Writer -> its published position; empty until the stream begins."""
        return self.decider.sent_upto if self.has_begun else {}

    def start_retirements(self, own: Connection) -> bool:
        """Start the retirements that were requested since the last call.

        Returns whether there were any. Then the caller must request the positions of all workers.
        """
        requested = {*state.read_requested_retirements(own, self.bridged.name)} if self.has_begun else set[str]()
        added = requested - self._requested_retirements
        for writer in sorted(added):
            log.info("Retiring a writer of Synapse", stream=self.bridged.name, writer=writer)
            self.decider.retire(writer)
        self._requested_retirements = requested
        return bool(added)

    def _finish_retirements(self, own: Connection) -> bool:
        """Retire the retiring writers whose facts are all published, and cancel the retirement of writers that are
        alive.

        Returns whether a writer has retired.
        """
        assert self.progress is not None
        retiring = self.decider.retiring_writers
        for writer in sorted(self._requested_retirements - retiring.keys()):
            log.warning(
                "The retirement of a writer of Synapse is cancelled, because the writer is alive",
                stream=self.bridged.name,
                writer=writer,
            )
            state.cancel_retirement(own, self.bridged.name, writer)
        ended = [writer for writer, at in retiring.items() if at is not None]
        for writer in ended:
            self.progress = state.retire(own, self.progress, writer)
            self.decider.forget(writer)
            id = self.progress.retired_at_ids[writer]
            log.info("A writer of Synapse has retired", stream=self.bridged.name, writer=writer, id=id)
        self._requested_retirements &= {writer for writer, at in retiring.items() if at is None}
        return bool(ended)

    def receive(self, command: PositionCommand | RdataCommand) -> None:
        """Apply a line of the channel that names this stream."""
        if isinstance(command, PositionCommand):
            self.decider.apply_position(command.writer, abs(command.prev), abs(command.id))
        else:
            self.decider.apply_rdata(command.writer, None if command.id is None else abs(command.id), command.row)

    def publish(self, synapse: Connection, own: Connection) -> list[ProvenAdvance]:
        """Decide what may be published now, and write the records to the outbox. Returns the published advances.

        Begins the stream if possible. If there are unknown writers, or retiring writers can retire, only lets these
        writers join or retire. Otherwise publishes backlogs, and the advances of one range of IDs.

        Raises:
            SequenceWentBack: the sequence is lower than before.
            PrerequisitePending: another bridge has moved the stream.
        """
        if self.progress is None:
            self._create(synapse, own)
        if (
            self.progress is None
            or self._add_unknown_writers(own)
            or (self._requested_retirements and self._finish_retirements(own))
        ):
            return []
        assert self.published is not None
        for writer in self.decider.sendable_backlogs:
            self._send_backlog(synapse, own, writer)
        if (ids := self.decider.range_to_read()) is None:
            return []
        head, facts = tables.read_facts(synapse, self.bridged.stream, *ids)
        self.update_head(head)
        advances = self.decider.apply_facts(ids, head, facts)
        if advances:
            lsn = flush_wal(synapse)
            self.progress = state.advance_stream(own, self.progress, self.published, advances, lsn, self.head)
        else:
            self._add_unknown_writers(own)
        return advances

    def check_sequence(self, synapse: Connection) -> None:
        """Set `blocked_reason` if the stream's sequence does not give out IDs one by one; otherwise clear
        `blocked_reason`. Logs each change."""
        if (problem := tables.read_sequence_problem(synapse, self.bridged.stream)) != self.blocked_reason:
            self.blocked_reason = problem
            if problem:
                log.error("A stream of Synapse is blocked", stream=self.bridged.name, problem=problem)
            else:
                log.info("A stream of Synapse is no longer blocked", stream=self.bridged.name)

    def update_retention(self, synapse: Connection, own: Connection, now: int) -> None:
        """Update the ID up to which Synapse may have deleted rows, and store a sample of the highest ID.

        Does nothing if Synapse deletes no rows of the stream because of their age.

        Args:
            synapse: Synapse's database.
            own: the bridge's database.
            now: the clock of Synapse's Postgres, in ms since 1970.
        """
        if self.bridged.stream.kept_seconds is not None:
            self.decider.kept_above = self._samples.kept_above(now, self.bridged.stream.kept_seconds)
            if self.has_begun:
                self._samples.note(own, now, self.head, self.bridged.stream.kept_seconds)

    def audit(self, synapse: Connection, own: Connection, fact_count: int | None = None) -> list[StreamFact]:
        """Compare Synapse's tables with the published facts. If facts at or below published positions are not
        published, publish them as late, at most `MAX_LATE_FACTS` in a call, and log an error.

        Returns the late facts. A full audit also deletes old stored facts.

        Args:
            synapse: Synapse's database.
            own: the bridge's database.
            fact_count: compare only this many of the newest published facts; None for a full audit of all stored facts.

        Raises:
            FactsReplaced: other rows have IDs that were published.
        """
        if self.progress is None:
            return []
        assert self.published is not None
        low = self.published.since_id if fact_count is None else self.published.id_below_newest(fact_count)
        sent_upto = {
            writer: at
            for writer, at in self.progress.all_sent_upto.items()
            if writer not in self.progress.backlog_starts
        }
        table = self.decider.with_writers(
            tables.read_marks(synapse, self.bridged.stream, low, self.progress.max_sent_upto)
        )
        self.decider.add_unknown(fact.writer for fact in table)
        if replaced := self.published.find_replaced(table):
            raise FactsReplaced(self.bridged.name, replaced[0].id)
        missing = {fact.id for fact in self.published.find_unpublished(table, sent_upto)}
        late = list[StreamFact]()
        for id in sorted(missing)[:MAX_LATE_FACTS]:
            late += self.decider.with_writers(tables.read_facts(synapse, self.bridged.stream, id - 1, id)[1])
        if late:
            flush_wal(synapse)
            state.publish_late(own, self.progress, self.published, late)
            log.error(
                "Facts appeared in Synapse's tables at or below published positions, and are published as late. Check"
                " whether two processes have the same worker_name, and whether a sequence was set back",
                stream=self.bridged.name, ids=[fact.id for fact in late][:20], count=len(missing),
            )  # fmt: skip
        if fact_count is None:
            evidence.trim(own, self.bridged.name, self.published)
        return late

    def log_discarded_positions(self) -> None:
        """Log each writer whose announced position was discarded. Logs each discarded position once."""
        discarded = self.decider.discarded_positions
        for writer, announced in discarded.items():
            if self._logged_positions.get(writer) != announced:
                log.error(
                    "A worker of Synapse announces IDs that the sequence has not given out, so its position does not"
                    " advance. Restart the worker, and check whether the sequence was set back",
                    stream=self.bridged.name, writer=writer, announced=announced,
                    sequence=self.bridged.stream.sequence, given_out=self.head,
                )  # fmt: skip
        self._logged_positions = discarded

    def _create(self, synapse: Connection, own: Connection) -> None:
        """Begin the stream if all writers have announced a position and their earlier transactions have ended.
        Otherwise do nothing."""
        for unknown_writer in sorted(self.decider.unknown_writers):
            self.decider.add_writer(unknown_writer, 0)
        if self.decider.find_floor() is None or not self.decider.announced_positions.keys() >= {*self.bridged.writers}:
            return
        self.update_head(tables.read_head(synapse, self.bridged.stream))
        self.decider.discard_beyond(self.head)
        if (floor := self.decider.find_floor()) is None:
            return  # a worker announced an ID that the sequence has not given out
        writers = self.decider.announced_positions.keys()
        self.progress, self.published = state.create_stream(
            own, self.bridged.stream, self.bridged.name, self._server, writers, floor, self.head
        )
        self.decider.begin(floor)
        log.info(
            "Starting to publish a stream of Synapse; facts up to the floor are only in Synapse's table",
            stream=self.bridged.name,
            floor=floor,
            writers=sorted(writers),
        )

    def _add_unknown_writers(self, own: Connection) -> bool:
        """Let unknown writers join. Returns whether there were any."""
        writers = sorted(self.decider.unknown_writers)
        for unknown_writer in writers:
            assert self.progress is not None
            at, kept_above = self.decider.linear, self.decider.kept_above
            self.progress = state.add_writer(own, self.progress, unknown_writer, at, kept_above=kept_above)
            at = self.progress.sent_upto[unknown_writer]
            self.decider.add_writer(unknown_writer, at)
            log.info("A writer of Synapse joins", stream=self.bridged.name, writer=unknown_writer, id=at)
        return bool(writers)

    def _send_backlog(self, synapse: Connection, own: Connection, writer: str) -> None:
        """Publish the backlog of a writer as late."""
        assert self.progress is not None
        assert self.published is not None
        _, facts = tables.read_facts(
            synapse, self.bridged.stream, self.progress.backlog_starts[writer], self.progress.sent_upto[writer], writer
        )
        flush_wal(synapse)
        self.progress = state.send_backlog(own, self.progress, self.published, writer, facts)
        self.decider.note_backlog_sent(writer)
        if facts:
            log.warning(
                "A writer of Synapse has joined; its facts up to the ID of its JOIN are published as late facts",
                stream=self.bridged.name,
                writer=writer,
            )
