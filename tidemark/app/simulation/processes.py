"""The processes of a play: how each is started, killed and stopped. When, is the director's to decide."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidemark.app.simulation.room_services import RoomClientRole, RoomServiceRole
from tidemark.app.simulation.services import ReaderRole, ServiceRole
from tidemark.app.stack.home import Home


@dataclass(frozen=True, slots=True)
class Part:
    """What a process is told, on its standard input: passwords are not for everybody to see. Without a role it is the
    relay of the services' database."""

    facts: str
    effects: str
    service: ServiceRole | None = None
    reader: ReaderRole | None = None
    room_service: RoomServiceRole | None = None
    room_client: RoomClientRole | None = None


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
    """A service, a reader, or the relay, whose output goes to a log in `home`. `actor` is None while it is down (or has
    yet to come); `part` gives the part of the process that is started as the `incarnation`-th one."""

    name: str
    home: Home
    part: Callable[[int], Part]
    actor: Actor | None = None
    incarnation: int = 0

    def begin(self) -> None:
        self.incarnation += 1
        self.actor = Actor(self.part(self.incarnation), self.home.log(f"simulate-{self.name}"))

    def leave(self) -> Actor:
        """It is down from now on; its process is the caller's."""
        assert self.actor is not None
        actor, self.actor = self.actor, None
        return actor
