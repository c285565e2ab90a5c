"""What is to happen when: actions by time, and in the order of their planning within one moment."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

from tidemark.streaming.wire.records import Record

Action: TypeAlias = Callable[[float], list[Record]]
"""Called with the time for which it was planned; gives the records that go to Kafka then."""


class Agenda:
    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def plan(self, when: float, action: Action) -> None:
        heapq.heappush(self._entries, (when, next(self._numbers), action))

    def play(self, until: float) -> Iterator[list[Record]]:
        """Act out everything that is due, also what is planned meanwhile."""
        while self._entries and self._entries[0][0] <= until:
            when, _, action = heapq.heappop(self._entries)
            yield action(when)

    def clear(self) -> None:
        self._entries.clear()
