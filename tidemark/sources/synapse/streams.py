"""One stream of Synapse between its evidence and what is told of it: founded, then told, writer by writer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from tidemark.sources.synapse import looks, retirement, state
from tidemark.sources.synapse.decider import StreamDecider
from tidemark.sources.synapse.facts import ProvenAdvance
from tidemark.sources.synapse.state import SynapseServer, ToldWriters
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.sources.transactions import durable
from tidemark.streaming.commands import PositionCommand, RdataCommand
from tidemark.streaming.postgres_session import Connection

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BridgedStream:
    """`name` on Kafka; `writers` are those that a person named: the stream is founded when all of them have spoken.
    Without, all that the database names."""

    stream: SynapseStream
    name: str
    writers: Sequence[str] = ()


class StreamTelling:
    """Of one connection to each database. `known` is None until all writers have joined."""

    def __init__(
        self, of: BridgedStream, seen: SynapseServer, known: ToldWriters | None, writers: Iterable[str]
    ) -> None:
        self.of = of
        self._seen = seen
        self.known = known
        self._retiring: set[str] = set()
        told = dict.fromkeys(writers, 0) if known is None else known.told
        retired, owed = ({}, {}) if known is None else (known.retired, known.owed)
        self.decider = StreamDecider(told, keeps=of.stream.keeps, retired=retired.items(), owing=owed)
        self.decider.meet(writers)

    @property
    def founded(self) -> bool:
        return self.known is not None

    @property
    def silent(self) -> list[str]:
        """Writers that have not said yet how far they are."""
        return sorted(name for name, word in self.decider.words.items() if not word)

    @property
    def told(self) -> Mapping[str, int]:
        """By writer up to where; nothing before all of them have joined."""
        return self.decider.told if self.founded else {}

    def retire(self, own: Connection) -> bool:
        """Begin with what people asked for. Whether everybody is to be asked now."""
        asked = {*retirement.ordered(own, self.of.name)} if self.founded else set[str]()
        found = asked - self._retiring
        for writer in sorted(found):
            log.info("A writer of Synapse is to retire", stream=self.of.name, writer=writer)
            self.decider.retire(writer)
        self._retiring = asked
        return bool(found)

    def _retire(self, own: Connection) -> bool:
        """Whether somebody has retired."""
        assert self.known is not None
        found = self.decider.retiring
        for writer in sorted(self._retiring - found.keys()):
            log.warning("A writer of Synapse lives, and does not retire", stream=self.of.name, writer=writer)
            retirement.stays(own, self.of.name, writer)
        ended = [writer for writer, at in found.items() if at is not None]
        for writer in ended:
            self.known = state.retire(own, self.known, writer)
            self.decider.forget(writer)
            id = self.known.retired[writer]
            log.info("A writer of Synapse has retired", stream=self.of.name, writer=writer, id=id)
        self._retiring &= {writer for writer, at in found.items() if at is None}
        return bool(ended)

    def hear(self, command: PositionCommand | RdataCommand) -> None:
        if isinstance(command, PositionCommand):
            self.decider.announced(command.writer, abs(command.prev), abs(command.id))
        else:
            self.decider.completed(command.writer, None if command.id is None else abs(command.id), command.row)

    def round(self, synapse: Connection, own: Connection) -> list[ProvenAdvance]:
        """Write down what can be told now; gives it."""
        if self.known is None:
            self._found(own)
        if self.known is None or self._introduced(own) or (self._retiring and self._retire(own)):
            return []
        for writer in self.decider.owed:
            self._pay(synapse, own, writer)
        if (asked := self.decider.asked()) is None:
            return []
        head, facts = looks.facts(synapse, self.of.stream, *asked)
        advances = self.decider.read(asked, head, facts)
        if advances:
            place = durable(synapse)
            self.known = state.tell(own, self.known, advances, place)
        else:
            self._introduced(own)
        return advances

    def _found(self, own: Connection) -> None:
        for stranger in sorted(self.decider.strangers):
            self.decider.introduce(stranger, 0)
        if (floor := self.decider.floor()) is None or not self.decider.words.keys() >= {*self.of.writers}:
            return
        writers = self.decider.words.keys()
        self.known = state.found(own, self.of.stream, self.of.name, self._seen, writers, floor)
        self.decider.begin(floor)
        log.info("Telling a stream of Synapse", stream=self.of.name, floor=floor, writers=sorted(writers))

    def _introduced(self, own: Connection) -> bool:
        """Whether writers were found that nobody knew."""
        found = sorted(self.decider.strangers)
        for stranger in found:
            assert self.known is not None
            self.known = state.introduce(own, self.known, stranger, self.decider.line)
            at = self.known.told[stranger]
            self.decider.introduce(stranger, at)
            log.info("A writer of Synapse joins", stream=self.of.name, writer=stranger, id=at)
        return bool(found)

    def _pay(self, synapse: Connection, own: Connection, writer: str) -> None:
        assert self.known is not None
        _, facts = looks.facts(synapse, self.of.stream, self.known.owed[writer], self.known.told[writer], writer)
        durable(synapse)
        self.known = state.pay(own, self.known, writer, facts)
        self.decider.paid(writer)
        if facts:
            log.warning("A writer of Synapse has events below where it joined", stream=self.of.name, writer=writer)
