"""Which facts of a stream were published, held against those that its tables have now. Pure; magnitudes.

A fact that the tables have at or below what was published, and that was not published, proves that something is wrong,
whatever the cause: the database or its sequence went back, two processes have one worker's name, a session sees less
than all rows. It is published as late.
"""

from collections.abc import Iterable, Mapping

from tidemark.sources.synapse.facts import StreamFact

MOST_FACTS = 10_000
"""The newest facts of a stream that are remembered, each with its marks."""
_SLACK = 2_000

Marks = frozenset[int]


class PublishedFacts:
    """All published facts above `since`, by ID, with their marks."""

    def __init__(self, since: int, marks: Mapping[int, Marks] | None = None) -> None:
        self.since = since
        self._marks = dict(marks or {})

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, facts: Iterable[StreamFact]) -> None:
        self._marks |= {fact.id: fact.marks for fact in facts if fact.id > self.since}

    def knows(self, fact: StreamFact) -> bool:
        """Whether this very fact was published, by its rows."""
        marks = self._marks.get(fact.id)
        return marks is not None and bool(marks) and fact.marks <= marks

    def above(self, count: int) -> int:
        """An ID above which `count` published facts are."""
        return sorted(self._marks)[-count] - 1 if len(self._marks) > count else self.since

    def unpublished(self, table: Iterable[StreamFact], told: Mapping[str, int]) -> list[StreamFact]:
        """The facts of the table that were not published; `told`: by writer up to where all should have been."""
        return [it for it in table if self.since < it.id <= told.get(it.writer, 0) and not self._marks.get(it.id)]

    def replaced(self, table: Iterable[StreamFact]) -> list[StreamFact]:
        """The facts of the table whose IDs belonged to others when they were published: they were given out again."""
        return [it for it in table if self._marks.get(it.id) and not self.knows(it)]

    def agreed(self, table: Iterable[StreamFact], told: Mapping[str, int]) -> int | None:
        """Up to where the table surely has the history that was published: the highest fact of both that is a proof and
        lies below every fact that only the table has. No ID up to there is given out again. None: no fact shows it."""
        found = None
        for fact in sorted(table, key=lambda fact: fact.id):
            if self.knows(fact):
                found = fact.id if fact.is_proof else found
            elif self._marks.get(fact.id) or self.since < fact.id <= told.get(fact.writer, 0):
                break
        return found

    def go_back(self, at: int) -> None:
        """IDs beyond may be given out again."""
        self.since = min(self.since, at)
        self._marks = {id: marks for id, marks in self._marks.items() if id <= at}

    def forget(self) -> bool:
        """Keep the newest alone; whether that was necessary."""
        if len(self._marks) <= MOST_FACTS + _SLACK:
            return False
        self.since = self.above(MOST_FACTS)
        self._marks = {id: marks for id, marks in self._marks.items() if id > self.since}
        return True
