"""The processes of a play, and how each is begun, fenced and laid to rest. What befalls them is the director's."""

import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import structlog

from tidemark.app.simulation import reading
from tidemark.app.simulation.actor import Actor
from tidemark.app.stack.home import Home
from tidemark.app.verification import READERS
from tidemark.app.writer import Fence, fence
from tidemark.sinks.reader.following import Mode
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.simulator import service
from tidemark.sources.simulator.cast import Cast, Fault
from tidemark.sources.simulator.tables import instances

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the play takes place; `dsn` is that of its own database."""

    home: Home
    dsn: str
    kafka: KafkaConnection
    topic: str


@dataclass
class Member:
    """A writer or a reader. `actor` is None while it is down (or has yet to come); `begins` starts its next process."""

    name: str
    begins: Callable[["Member"], Actor]
    actor: Actor | None = None
    incarnation: int = 0

    def begin(self) -> None:
        self.incarnation += 1
        self.actor = self.begins(self)

    def leave(self) -> Actor:
        """It is down from now on; its process is the caller's."""
        assert self.actor is not None
        actor, self.actor = self.actor, None
        return actor


@dataclass(frozen=True, slots=True)
class Company:
    """Makes members, and does what an operator would do for writers that are gone."""

    stage: Stage
    cast: Cast
    faults: Set[Fault]
    seed: int

    def readers(self) -> list[Member]:
        return [Member(mode, partial(self._reader, mode)) for mode in READERS]

    def writer(self, name: str) -> Member:
        return Member(name, self._writer)

    def known(self) -> set[str]:
        """All writers that plays with this prefix ever had."""
        ours = re.compile(re.escape(self.cast.writer_name(0)).removesuffix("0") + r"\d+")
        return {name for name in instances(self.stage.dsn) if ours.fullmatch(name)}

    def fence(self, name: str) -> None:
        """End what is open of it, and whatever is left of its process."""
        self._fence({name}, retire=False)

    def lay_to_rest(self, names: Set[str]) -> None:
        """They will not come back, and nobody is to wait for them."""
        self._fence(names, retire=True)

    def _fence(self, names: Set[str], *, retire: bool) -> None:
        """Of a writer that died before it began its first epoch there is nothing to fence."""
        for name in sorted(names & self.known()):
            order = Fence(name, terminate=True, retire=retire)
            fence(self.stage.dsn, self.stage.kafka, self.stage.topic, order, _noted)

    def _writer(self, member: Member) -> Actor:
        role = service.Role(
            member.name,
            self.cast.stream_list(),
            self.faults,
            self.cast.rate / self.cast.writers,
            f"{self.seed} {member.name} {member.incarnation}",
        )
        return Actor("writer", msgspec.json.encode(role), self._log(member))

    def _reader(self, mode: Mode, member: Member) -> Actor:
        role = reading.Role(mode, self.cast.stream_names())
        return Actor("reader", msgspec.json.encode(role), self._log(member))

    def _log(self, member: Member) -> Path:
        return self.stage.home.log(f"simulate-{member.name}")


def _noted(text: str) -> None:
    log.debug("Fenced", found=text)
