"""One Postgres after the other is replaced: prepared, a while later switched to, and tried again where that fails."""

import sched
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tidemark.app.simulation.processes import Member
from tidemark.app.simulation.script import Act, Fault
from tidemark.common.log import get_logger

if TYPE_CHECKING:  # it needs what comes with the local stack
    from tidemark.app.simulation.servers import Replacement, Servers

log = get_logger(__name__)

AGAIN_AFTER = 2.0  # seconds until a fault is tried again whose server is away, or another one in hand


class Replacing:
    """For the director's thread; what takes long is done aside.

    `plan` is the director's, `befell` counts what was done, and `writing` gives the services and the relay that run.
    """

    def __init__(
        self,
        servers: "Servers",
        plan: sched.scheduler,
        befell: Callable[[Fault, str], None],
        writing: Callable[[], list[Member]],
    ) -> None:
        self._servers = servers
        self._plan = plan
        self._befell = befell
        self._writing = writing
        self.owed = 0
        """Acts that have begun, or wait for another to end."""
        self._restores = 0
        self._stopped: Sequence[Member] = ()
        self._in_hand: Replacement | None = None

    def tick(self) -> None:
        self._servers.tick()

    def begin(self, act: Act) -> None:
        """Another server is prepared, and takes the place of the first one `act.spell` seconds later."""
        self.owed += 1
        self._prepare(act)

    def _prepare(self, act: Act) -> None:
        if self._in_hand is not None:
            self._plan.enter(AGAIN_AFTER, 0, partial(self._prepare, act))
            return
        self._in_hand = self._servers.restore() if act.fault is Fault.RESTORE else self._servers.failover()
        self._work(self._in_hand.prepare, lambda: self._plan.enter(act.spell, 0, partial(self._switch, act)), act)

    def end(self) -> None:
        """Let what is at work come to its end; nobody takes anybody's place any more."""
        while self._servers.busy:
            time.sleep(0.1)
            self._servers.tick()
        for event in self._plan.queue:  # what was to follow
            self._plan.cancel(event)
        if self._in_hand is not None:
            self._in_hand.give_up()

    def _switch(self, act: Act) -> None:
        """At every other restore the services are stopped first, and their relay."""
        assert self._in_hand is not None
        if act.fault is Fault.RESTORE:
            self._restores += 1
            self._stopped = () if self._restores % 2 else self._writing()
        for member in self._stopped:
            member.leave().kill()
        self._work(self._in_hand.switch, partial(self._switched, act), act)

    def _switched(self, act: Act) -> None:
        self.owed -= 1
        self._befell(act.fault, f"{self._in_hand}{', with the services down' if self._stopped else ''}")
        self._let_go()

    def _work(self, work: Callable[[], None], then: Callable[[], object], act: Act) -> None:
        assert self._in_hand is not None
        given_up = self._in_hand

        def done(error: Exception | None) -> None:
            if error is None:
                then()
            else:
                log.warning("It is tried again", fault=act.fault.value, who=str(given_up), problem=str(error))
                self._servers.work(given_up.give_up, again)

        def again(_: Exception | None) -> None:
            self._let_go()
            self._plan.enter(AGAIN_AFTER, 0, partial(self._prepare, act))

        self._servers.work(work, done)

    def _let_go(self) -> None:
        stopped, self._stopped, self._in_hand = self._stopped, (), None
        for member in stopped:
            member.begin()
