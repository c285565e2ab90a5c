"""Turns by which requests begin, so that a crowd that comes all at once delays nobody else."""

from asyncio import AbstractEventLoop, Future
from collections import OrderedDict, deque

from tidemark.app.eviction import network_of

_A_TURN = 4  # requests that begin at one turn of the event loop


class Turns:
    """By which requests begin: those of one address in order, and one of each address in turn. For one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    async def next(self, loop: AbstractEventLoop, address: str) -> None:
        """Return when it is the caller's turn: the loop's next one if few came since the last."""
        turn: Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._begin, loop)
        self._waiting.setdefault(network_of(address), deque()).append(turn)
        await turn

    def _begin(self, loop: AbstractEventLoop) -> None:
        for _ in range(_A_TURN):
            if not self._waiting:
                return
            network, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[network] = turns
            if not turn.done():  # who waited may be gone
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._begin, loop)
