"""Slots and turns that many clients share, and which client is evicted if every slot is taken. Pure.

A client is known by its address. For IPv6 the first 64 bits count, because a client that has one address there has all
of them.
"""

from asyncio import Future
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from ipaddress import IPv6Address, ip_address
from itertools import chain
from typing import Generic, TypeVar

SHARE = 64  # one of this many slots is freed at once
FAIR = 4  # one of this many slots stays with an address while others ask

T = TypeVar("T")


@lru_cache(4096)
def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the first 64 bits of an IPv6 address; any other text as it is."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:255]
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return f"{IPv6Address(int(parsed) >> 64 << 64)}/64"


@dataclass(frozen=True, slots=True)
class IdleConnection(Generic[T]):
    """`since` is of any clock that only goes forward."""

    connection: T
    address: str
    since: float


def pick_victims(waiting: Sequence[IdleConnection[T]], places: int) -> list[T]:
    """Connections to evict when every slot is taken: the oldest idle ones of the address with the most idle
    connections.

    Empty if there are none. More than one if there are many slots, so that a flood of connections is not searched for
    each.
    """
    if not waiting:
        return []
    [(network, _)] = Counter(network_of(other.address) for other in waiting).most_common(1)
    of_network = (other for other in waiting if network_of(other.address) == network)
    return [other.connection for other in nsmallest(max(1, places // SHARE), of_network, key=lambda other: other.since)]


class NoFreeSlot(Exception):
    """Every slot is taken, and the address that asks has its share."""


class SlotPool(Generic[T]):
    """A number of slots, shared by address. For one thread.

    While slots are free, every client gets one. If all are taken, an address that has less than a quarter of the slots,
    or less than half of what another address has, gets the newest slot of the address with the most.

    Holders are compared by identity, as keys of a dict.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._holders: dict[str, dict[T, None]] = {}
        self._networks: dict[T, str] = {}

    def __len__(self) -> int:
        return self._taken

    def take(self, holder: T, address: str, first: Callable[[T], bool] = lambda _: False) -> T | None:
        """Give `holder` a slot until it leaves.

        Args:
            holder: who gets the slot.
            address: the address of the client.
            first: of the address that loses a slot, the oldest holder for which this is true is evicted, else the
                newest one. An address that has its share gets a slot of its own for which this is true.

        Returns:
            The holder that was evicted and has no slot any more. None if a slot was free.

        Raises:
            NoFreeSlot: no holder is evicted for this address.
        """
        network, evicted = network_of(address), None
        if self._taken >= self.limit:
            evicted = self._victim(self._holders.get(network, {}), first)
            self.leave(evicted)
        self._holders.setdefault(network, {})[holder] = None
        self._networks[holder] = network
        self._taken += 1
        return evicted

    def leave(self, holder: T) -> None:
        """Free its slot. May be called again, and for a holder that was evicted."""
        network = self._networks.pop(holder, None)
        if network is None:
            return
        holders = self._holders[network]
        del holders[holder]
        self._taken -= 1
        if not holders:
            del self._holders[network]

    def _victim(self, own: dict[T, None], first: Callable[[T], bool]) -> T:
        largest = max(self._holders.values(), key=len, default=own)
        share = self.limit // FAIR
        if len(own) < len(largest) // 2 or len(own) < share < len(largest):
            return next(filter(first, largest), next(reversed(largest)))
        # Evict another address only if this one has less than its share.
        of_all = chain(own, *self._holders.values()) if len(own) < share else own
        for candidate in filter(first, of_all):
            return candidate
        raise NoFreeSlot


class FairQueue:
    """Tasks that wait for a turn: in order for one address, and one address after the other. For one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, address: str, turn: "Future[None]") -> None:
        self._waiting.setdefault(network_of(address), deque()).append(turn)

    def start_next(self) -> bool:
        """Give the next task its turn. False: the task was cancelled. Call it only while a task waits."""
        network, turns = self._waiting.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._waiting[network] = turns
        if turn.done():  # its task was cancelled
            return False
        turn.set_result(None)
        return True
