"""What the relay tells of open transactions, for people who look at Tidemark and not at this database."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from tidemark.sources.relay.blockers import OpenTransaction
from tidemark.sources.relay.join import Told
from tidemark.streaming.records import LONGEST_TRANSACTION, MOST_TRANSACTIONS, Open

WORTH_TELLING = timedelta(seconds=2)
"""How long a transaction is open before it is told: what they usually take is nobody's business."""


class Reports:
    """Of one epoch. Who is named is told again where that has changed, and once at the start: a relay before may have
    named others."""

    def __init__(self, told: Iterable[Told]) -> None:
        self._told = {each.stream.name: each for each in told}
        self._named: dict[str, list[str]] = {}

    def due(self, found: Sequence[OpenTransaction], now: datetime) -> Iterator[Open]:
        """What is to be told of the transactions that hold streams now, the oldest first."""
        for name, told in self._told.items():
            named = _named([it for it in found if it.stream == name], now)
            if self._named.get(name) != named:
                self._named[name] = named
                yield Open(stream=name, writer=told.own, epoch=told.writers[told.own].epoch, transactions=named)


def _named(found: Sequence[OpenTransaction], now: datetime) -> list[str]:
    old = [it.who[:LONGEST_TRANSACTION] for it in found if it.since is None or now - it.since >= WORTH_TELLING]
    if len(old) <= MOST_TRANSACTIONS:
        return old
    shown = old[: MOST_TRANSACTIONS - 1]
    return [*shown, f"and {len(old) - len(shown)} more"]
