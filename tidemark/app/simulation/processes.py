"""The processes of a play: how each is started, killed and stopped. When, is the director's to decide."""

import signal
import subprocess
import sys
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from tidemark.app.simulation import room_services, services
from tidemark.app.simulation.room_services import RoomServiceRole
from tidemark.app.simulation.script import Fault, Players
from tidemark.app.simulation.services import ServiceRole
from tidemark.app.simulation.verification import READERS
from tidemark.app.stack.home import Home
from tidemark.sinks.reader import Mode


@dataclass(frozen=True, slots=True)
class Part:
    """What a process is told, on its standard input: passwords are not for everybody to see. Without a role it is the
    relay of the services' database."""

    facts: str
    effects: str
    service: ServiceRole | None = None
    reader: services.ReaderRole | None = None
    room_service: RoomServiceRole | None = None
    room_client: room_services.RoomClientRole | None = None


class Actor:
    """Started at once. Its output goes to the end of `log`. It ends by itself when the director dies."""

    def __init__(self, part: Part, log: Path) -> None:
        with log.open("ab") as output:
            # A user's own servers may need what is in the environment (PGSSLROOTCERT): this process inherits it.
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

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the play takes place; `facts` and `effects` are the DSNs of the services' database and of the readers'."""

    home: Home
    facts: str
    effects: str


@dataclass
class Member:
    """A service, a reader, or the relay. `actor` is None while it is down (or has yet to come); `begins` starts the
    next process."""

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
    """Makes members."""

    stage: Stage
    cast: Players
    faults: Set[Fault]
    seed: int

    def readers(self) -> list[Member]:
        return [Member(mode, partial(self._reader, mode)) for mode in READERS]

    def relay(self) -> Member:
        return Member("relay", partial(self.actor, part=Part(self.stage.facts, self.stage.effects)))

    def service(self, name: str) -> Member:
        return Member(name, self._service)

    def _service(self, member: Member) -> Actor:
        role = ServiceRole(
            member.name,
            self.cast.stream_list(),
            self.faults,
            self.cast.rate / self.cast.writers,
            f"{self.seed} {member.name} {member.incarnation}",
        )
        return self.actor(member, Part(self.stage.facts, self.stage.effects, service=role))

    def _reader(self, mode: Mode, member: Member) -> Actor:
        role = services.ReaderRole(mode, self.cast.stream_names())
        return self.actor(member, Part(self.stage.facts, self.stage.effects, reader=role))

    def actor(self, member: Member, part: Part) -> Actor:
        return Actor(part, self.stage.home.log(f"simulate-{member.name}"))
