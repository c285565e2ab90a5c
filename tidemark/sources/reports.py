"""What is told of open transactions, for people who look at Tidemark and not at the database where they run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from prometheus_client import Gauge

from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.wire.records import LONGEST_TRANSACTION, MOST_TRANSACTIONS, Open

WORTH_TELLING = timedelta(seconds=2)
"""How long a transaction is open before it is told: what they usually take is nobody's business."""


class Reports:
    """Of one epoch. `tellers`: by stream the writer in whose name, and in which epoch, it is told. Who is named is told
    again where that has changed, and once at the start: another process may have named others before.
    """

    def __init__(self, tellers: Mapping[str, tuple[str, int]]) -> None:
        self.tellers = tellers
        self._named: dict[str, list[str]] = {}

    def due(self, found: Sequence[OpenTransaction], now: datetime) -> Iterator[Open]:
        """What is to be told of the transactions that hold streams now, the oldest first."""
        for name, (writer, epoch) in self.tellers.items():
            old = [it for it in found if it.stream == name and is_old(it, now)]
            known = [it.process for it in old]  # a query is named, but the next one is nothing new
            if self._named.get(name) != known:
                self._named[name] = known
                yield Open(stream=name, writer=writer, epoch=epoch, transactions=_named(old))


class OldestOpen:
    """Shows by the labels of a gauge how long the oldest transaction has been open, and nothing where none is."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown: set[tuple[str, ...]] = set()

    def show(self, ages: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Of all that are open, by their labels."""
        oldest = dict(sorted(ages))
        for gone in self._shown - oldest.keys():
            self._gauge.remove(*gone)
        for labels, age in oldest.items():
            self._gauge.labels(*labels).set(age)
        self._shown = {*oldest}


def is_old(transaction: OpenTransaction, now: datetime) -> bool:
    """Whether it is worth telling; of one whose begin this user may not see nobody knows better."""
    return transaction.since is None or now - transaction.since >= WORTH_TELLING


def _named(old: Sequence[OpenTransaction]) -> list[str]:
    lines = [it.who[:LONGEST_TRANSACTION] for it in old]
    if len(lines) <= MOST_TRANSACTIONS:
        return lines
    shown = lines[: MOST_TRANSACTIONS - 1]
    return [*shown, f"and {len(lines) - len(shown)} more"]
