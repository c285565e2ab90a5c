"""One stream of Synapse between its evidence and what is told of it: founded, then told, writer by writer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from tidemark.sources.synapse import looks, state
from tidemark.sources.synapse.decider import ProvenAdvance, StreamDecider
from tidemark.sources.synapse.state import SynapseServer, ToldWriters
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.sources.transactions import durable
from tidemark.streaming.commands import PositionCommand, RdataCommand
from tidemark.streaming.postgres_session import Connection

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BridgedStream:
    """`name` on Kafka; `writers` are those that a person named: the stream is not founded before all of them spoke."""

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
        told = dict.fromkeys(writers, 0) if known is None else known.told
        self.decider = StreamDecider(told, keeps=of.stream.keeps)
        self.decider.meet(writers)

    @property
    def founded(self) -> bool:
        return self.known is not None

    @property
    def silent(self) -> list[str]:
        """Writers that have not said yet how far they are."""
        return sorted(name for name, word in self.decider.words.items() if not word)

    def behind(self, head: int) -> dict[str, int]:
        """By writer how many IDs below the head are not told."""
        return {name: max(0, head - told) for name, told in self.decider.told.items()} if self.founded else {}

    def hear(self, command: PositionCommand | RdataCommand) -> None:
        if isinstance(command, PositionCommand):
            self.decider.announced(command.writer, abs(command.prev), abs(command.id))
        else:
            self.decider.completed(command.writer, None if command.id is None else abs(command.id), command.row)

    def round(self, synapse: Connection, own: Connection) -> list[ProvenAdvance]:
        """Write down what can be told now; gives it."""
        if self.known is None:
            self._found(own)
        if self.known is None or self._introduced(synapse, own):
            return []
        if (asked := self.decider.asked()) is None:
            return []
        head, facts = looks.facts(synapse, self.of.stream, *asked)
        advances = self.decider.read(asked, head, facts)
        if advances:
            place = durable(synapse)
            self.known = state.tell(own, self.known, advances, place)
        else:
            self._introduced(synapse, own)
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

    def _introduced(self, synapse: Connection, own: Connection) -> bool:
        """Whether writers were found that nobody knew."""
        found = sorted(self.decider.strangers)
        for stranger in found:
            assert self.known is not None
            at = self.decider.line
            _, facts = looks.facts(synapse, self.of.stream, self.known.floor, at, stranger)
            self.known = state.introduce(own, self.known, stranger, at, facts)
            self.decider.introduce(stranger, at)
            log.info("A writer of Synapse joins", stream=self.of.name, writer=stranger, id=at, late=len(facts))
        return bool(found)
