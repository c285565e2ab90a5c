"""The processes of a simulation: how each is started, killed and stopped."""

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
class ProcessRole:
    """What a process reads from its standard input, because others could see passwords in its arguments.

    Without a role it is the relay of the services' database.
    """

    facts: str
    effects: str
    service: ServiceRole | None = None
    reader: ReaderRole | None = None
    room_service: RoomServiceRole | None = None
    room_client: RoomClientRole | None = None


class ChildProcess:
    """Started at once. Its output goes to the end of `log`. It ends by itself when its parent dies."""

    def __init__(self, role: ProcessRole, log: Path) -> None:
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
            self._process.stdin.write(msgspec.json.encode(role) + b"\n")
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
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
class SimulationDatabases:
    """`facts` and `effects` are the DSNs of the services' and the readers' databases; `home` has logs and servers.

    `relay` and `readers` are DSNs of the services' database, too: with the logins of the relay and of the readers.
    """

    home: Home
    facts: str
    effects: str
    relay: str
    readers: str


@dataclass
class SimulatedProcess:
    """A service, a reader, or the relay, whose output goes to a log in `home`. `process` is None while it is down.
    `role` gives the role of the process that is started as the `incarnation`-th one."""

    name: str
    home: Home
    role: Callable[[int], ProcessRole]
    process: ChildProcess | None = None
    incarnation: int = 0

    def start(self) -> None:
        self.incarnation += 1
        self.process = ChildProcess(self.role(self.incarnation), self.home.log(f"simulate-{self.name}"))

    def detach(self) -> ChildProcess:
        """Hand its process to the caller; it is down from now on."""
        assert self.process is not None
        process, self.process = self.process, None
        return process
