"""Places that many clients share: which client gives way if every place is taken. Pure.

A client is known by its address. Of IPv6 the first 64 bits count: whoever has one address there has all of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from ipaddress import IPv6Address, ip_address
from itertools import chain
from typing import Generic, TypeVar

SHARE = 64  # of the places: one of so many is made free at once
FAIR = 4  # of the places: one of so many is what an address keeps while others ask

T = TypeVar("T")


@lru_cache(4096)
def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the first 64 bits of one of IPv6; any other text as it is."""
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
    """Those that wait longest, of the address from which most wait; none where nobody does. More than one where there
    are many `places`: a crowd that goes on coming would be looked through for each of them."""
    if not waiting:
        return []
    [(network, _)] = Counter(network_of(other.address) for other in waiting).most_common(1)
    of_network = (other for other in waiting if network_of(other.address) == network)
    return [other.connection for other in nsmallest(max(1, places // SHARE), of_network, key=lambda other: other.since)]


class NoFreeSlot(Exception):
    """Every place is taken, and the address that asks has its share."""


class SlotPool(Generic[T]):
    """So many places, shared by address. While some are free, anybody gets one. If all are taken, an address that has
    less than a quarter of them, or less than half of what another has, gets the newest place of the address that has
    most.

    For one thread. What has a place is told apart by its identity as a key of a dict.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken = 0
        self._holders: dict[str, dict[T, None]] = {}
        self._networks: dict[T, str] = {}

    def __len__(self) -> int:
        return self._taken

    def take(self, holder: T, address: str, first: Callable[[T], bool] = lambda _: False) -> T | None:
        """Give `holder` a place until it leaves. Of an address that gives one up, the oldest for which `first` holds
        goes, or else the newest. An address that has its share gets a place of its own for which `first` holds.

        Returns:
            Who gave way to it, and has no place any more; None if a place was free.

        Raises:
            AllTaken: nobody gives way to this address.
        """
        network, displaced = network_of(address), None
        if self._taken >= self.most:
            displaced = self._displaced(self._holders.get(network, {}), first)
            self.leave(displaced)
        self._holders.setdefault(network, {})[holder] = None
        self._networks[holder] = network
        self._taken += 1
        return displaced

    def leave(self, holder: T) -> None:
        """Free its place. May be called again, and for one that gave way."""
        network = self._networks.pop(holder, None)
        if network is None:
            return
        holders = self._holders[network]
        del holders[holder]
        self._taken -= 1
        if not holders:
            del self._holders[network]

    def _displaced(self, own: dict[T, None], first: Callable[[T], bool]) -> T:
        largest = max(self._holders.values(), key=len, default=own)
        share = self.most // FAIR
        if len(own) < len(largest) // 2 or len(own) < share < len(largest):
            return next(filter(first, largest), next(reversed(largest)))
        # Of others only if this address has less than its share.
        of_all = chain(own, *self._holders.values()) if len(own) < share else own
        for candidate in filter(first, of_all):
            return candidate
        raise NoFreeSlot
