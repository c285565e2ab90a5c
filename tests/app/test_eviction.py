"""Who gives way where every place is taken."""

import pytest

from tidemark.app.serving.tls_listener import IdleConnection, NoFreeSlot, SlotPool, network_of, pick_victims


def test_the_oldest_of_whoever_has_most_give_way() -> None:
    """One where there are few places; some at once where there are many, so that a crowd that goes on coming costs
    little each time. Others are left alone, however old they are."""
    crowd = [IdleConnection(number, "crowd", float(-number)) for number in range(1000)]
    others = [IdleConnection(-number, f"other {number}", -9999.0) for number in range(1, 100)]
    waiting = [*others, *crowd]
    assert pick_victims(waiting, 20) == [999]
    assert pick_victims(waiting, 640) == [*range(999, 989, -1)]
    assert pick_victims(waiting, 10**6) == [*range(999, -1, -1)]
    assert pick_victims([], 20) == []


def test_places_are_anybodys_while_some_are_free() -> None:
    """One address may have all of them, and its own newcomers make nobody give way."""
    places = SlotPool[int](8)
    assert [places.take(number, "192.0.2.1") for number in range(8)] == [None] * 8
    with pytest.raises(NoFreeSlot):
        places.take(8, "192.0.2.1")


def test_another_address_gets_the_newest_place_of_the_largest() -> None:
    """Until it has a quarter of all and half of what the largest has; then it needs a free one as everybody does."""
    places = SlotPool[int](8)
    for number in range(8):
        places.take(number, "192.0.2.1")
    assert [places.take(100 + number, "192.0.2.2") for number in range(2)] == [7, 6]
    places.release(7)  # it had no place any more
    assert len(places) == 8
    assert places.take(102, "192.0.2.2") == 5
    with pytest.raises(NoFreeSlot):
        places.take(103, "192.0.2.2")
    places.release(0)
    assert places.take(103, "192.0.2.2") is None


def test_some_give_way_first() -> None:
    """Of the largest address the oldest of them, and of the own one where that has its share; others keep theirs."""
    places = SlotPool[int](8)
    for number in range(8):
        places.take(number, "192.0.2.1")

    def is_odd(number: int) -> bool:
        return number % 2 == 1

    assert places.take(100, "192.0.2.2", is_odd) == 1
    assert places.take(8, "192.0.2.1", is_odd) == 3
    crowd = SlotPool[int](2)
    for number in range(2):
        crowd.take(number, f"192.0.2.{number}")
    with pytest.raises(NoFreeSlot):
        crowd.take(2, "192.0.2.2")


def test_many_addresses_fill_the_places() -> None:
    """If each address has one place, none of them gives way to another address."""
    places = SlotPool[int](8)
    for number in range(8):
        places.take(number, f"192.0.2.{number}")
    with pytest.raises(NoFreeSlot):
        places.take(8, "198.51.100.1")


def test_addresses_of_one_network_of_ipv6_are_one_client() -> None:
    """Whoever has one of them has 2^64, and one of IPv4 that is written as IPv6 is the same client."""
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") != network_of("192.0.2.2")
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth1")
    assert network_of("") == ""
    assert len(network_of("x" * 60_000)) == 255
