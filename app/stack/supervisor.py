"""Keeps the processes of the stack running: one that dies is started again, with back-off, and it is said."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidemark.app.stack.server import Server

LONGEST_PAUSE = 30.0
STEADY = 60.0
"""Seconds after which a process counts as healthy again, so that its next pause is short."""


@dataclass
class _Watch:
    server: Server
    pause: float = 1.0
    due: float | None = None
    started: float = 0.0
    awaited: bool = False


@dataclass
class Supervisor:
    """`tick` is called about twice a second by one thread; it never waits for a server to answer."""

    servers: Sequence[Server]
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _watches: list[_Watch] = field(init=False)

    def __post_init__(self) -> None:
        self._watches = [_Watch(server, started=self.now()) for server in self.servers]

    def tick(self) -> None:
        for watch in self._watches:
            if watch.server.running:
                self._welcome(watch)
            elif watch.due is None:
                self._mourn(watch)
            elif self.now() >= watch.due:
                self._revive(watch)

    def _mourn(self, watch: _Watch) -> None:
        if self.now() - watch.started > STEADY:
            watch.pause = 1.0
        watch.due = self.now() + watch.pause
        server = watch.server
        self.say(
            f"{server.name} ended with code {server.returncode}; starting it again in {watch.pause:.0f} s"
            f" (the end of its log: {server.log_tail(1)})"
        )
        watch.pause = min(2 * watch.pause, LONGEST_PAUSE)

    def _revive(self, watch: _Watch) -> None:
        watch.server.spawn()
        watch.due = None
        watch.started = self.now()
        watch.awaited = True

    def _welcome(self, watch: _Watch) -> None:
        if watch.awaited and watch.server.answers():
            watch.awaited = False
            self.say(f"{watch.server.name} is back after {self.now() - watch.started:.0f} s")
