"""The processes of a play: how each is started, killed, fenced and retired. When, is the director's to decide."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import structlog

from tidemark.app.simulation import reading
from tidemark.app.simulation.verification import READERS
from tidemark.app.stack.home import Home
from tidemark.app.writer import FenceOrder, fence_writer
from tidemark.sinks.reader.follow import Mode
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.simulator import service
from tidemark.sources.simulator.script import Fault, Players
from tidemark.sources.simulator.tables import instances
from tidemark.streaming.errors import Unavailable

SERVERS_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """What a process is told, on its standard input: passwords are not for everybody to see."""

    facts: str
    effects: str
    writer: service.WriterRole | None = None
    reader: reading.ReaderRole | None = None


class Actor:
    """Started at once. Its output goes to the end of `log`. It ends by itself when the director dies."""

    def __init__(self, part: Part, log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tidemark.app.simulation"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(part) + b"\n")
            self._process.stdin.flush()

    @property
    def ended(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.terminate()

    def retire(self) -> None:
        """For a writer: stop, and never come back under this name."""
        self._process.send_signal(signal.SIGUSR1)

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the play takes place; `facts` and `effects` are the DSNs of the services' database and of the readers'."""

    home: Home
    facts: str
    effects: str
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
    cast: Players
    faults: Set[Fault]
    seed: int

    def readers(self) -> list[Member]:
        return [Member(mode, partial(self._reader, mode)) for mode in READERS]

    def writer(self, name: str) -> Member:
        return Member(name, self._writer)

    def known(self) -> set[str]:
        """All writers that plays with this prefix ever had."""
        ours = re.compile(re.escape(self.cast.writer_name(0)).removesuffix("0") + r"\d+")
        return {name for name in instances(self.stage.facts) if ours.fullmatch(name)}

    def fence(self, name: str) -> None:
        """End what is open of it, and whatever is left of its process."""
        self._fence({name}, retire=False)

    def lay_to_rest(self, names: Set[str]) -> None:
        """They will not come back, and nobody is to wait for them. Raises `Unavailable`."""
        self._fence(names, retire=True)

    def rest_at_last(self, at_rest: Set[str]) -> None:
        """Lay all others to rest, though a server may still be on its way back. Raises `Unavailable` in the end."""
        deadline = time.monotonic() + SERVERS_SECONDS
        while True:
            try:
                return self.lay_to_rest(self.known() - at_rest)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def _fence(self, names: Set[str], *, retire: bool) -> None:
        """Of a writer that died before it began its first epoch there is nothing to fence."""
        for name in sorted(names & self.known()):
            order = FenceOrder(name, terminate=True, retire=retire)
            fence_writer(self.stage.facts, self.stage.kafka, self.stage.topic, order, _noted)

    def _writer(self, member: Member) -> Actor:
        role = service.WriterRole(
            member.name,
            self.cast.stream_list(),
            self.faults,
            self.cast.rate / self.cast.writers,
            f"{self.seed} {member.name} {member.incarnation}",
        )
        return self._actor(member, Part(self.stage.facts, self.stage.effects, writer=role))

    def _reader(self, mode: Mode, member: Member) -> Actor:
        role = reading.ReaderRole(mode, self.cast.stream_names())
        return self._actor(member, Part(self.stage.facts, self.stage.effects, reader=role))

    def _actor(self, member: Member, part: Part) -> Actor:
        return Actor(part, self.stage.home.log(f"simulate-{member.name}"))


def _noted(text: str) -> None:
    log.debug("Fenced", found=text)
