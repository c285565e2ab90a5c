"""The evidence about a stream that the bridge stores in its own database, besides positions. Published facts show
whether the tables now have another history. The times at which IDs were given out show how old a row may be.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemark.common.postgres_session import Connection
from tidemark.sources.synapse.decider import UNBOUNDED, StreamFact

MOST_FACTS = 10_000
"""The number of newest facts of a stream that are remembered, each with its marks."""
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
        """Whether exactly this fact was published, by the marks of its rows."""
        marks = self._marks.get(fact.id)
        return marks is not None and bool(marks) and fact.marks <= marks

    def above(self, count: int) -> int:
        """The highest ID with `count` published facts above it."""
        return sorted(self._marks)[-count] - 1 if len(self._marks) > count else self.since

    def unpublished(self, table: Iterable[StreamFact], sent_upto: Mapping[str, int]) -> list[StreamFact]:
        """The facts of the table that were not published. `sent_upto`: by writer, the ID up to which all facts should
        have been published."""
        return [
            fact
            for fact in table
            if self.since < fact.id <= sent_upto.get(fact.writer, 0) and not self._marks.get(fact.id)
        ]

    def replaced(self, table: Iterable[StreamFact]) -> list[StreamFact]:
        """The facts of the table whose IDs were published as other facts: the IDs were given out again."""
        return [fact for fact in table if self._marks.get(fact.id) and not self.knows(fact)]

    def agreed(self, table: Iterable[StreamFact], sent_upto: Mapping[str, int]) -> int | None:
        """The ID up to which the table certainly has the published history: the highest fact in both that is a proof
        and lies below every fact that only the table has. No ID up to it is given out again. None: no fact proves
        it."""
        proven = None
        for fact in sorted(table, key=lambda fact: fact.id):
            if self.knows(fact):
                proven = fact.id if fact.is_proof else proven
            elif self._marks.get(fact.id) or self.since < fact.id <= sent_upto.get(fact.writer, 0):
                break
        return proven

    def go_back(self, at: int) -> None:
        """Remove the facts beyond `at`, whose IDs may be given out again."""
        self.since = min(self.since, at)
        self._marks = {id: marks for id, marks in self._marks.items() if id <= at}

    def forget(self) -> bool:
        """Keep only the newest facts. Returns whether facts were removed."""
        if len(self._marks) <= MOST_FACTS + _SLACK:
            return False
        self.since = self.above(MOST_FACTS)
        self._marks = {id: marks for id, marks in self._marks.items() if id > self.since}
        return True


_ANCHOR_EVERY = 500
"""One in this many older facts is remembered, chosen by its mark."""
_SAMPLE_EVERY = 3_600_000
"""Milliseconds between two samples of a head."""


def load(connection: Connection, name: str) -> PublishedFacts | None:
    """The stored facts of the stream; None if there are none."""
    row = connection.execute("select facts_since from tidemark.synapse_streams where stream = %s", [name]).fetchone()
    if row is None or row[0] is None:
        return None
    rows = connection.execute(
        "select id, marks from tidemark.synapse_facts where stream = %s and id > %s", [name, row[0]]
    ).fetchall()
    return PublishedFacts(row[0], {id: _unpacked(marks) for id, marks in rows})


def begin(connection: Connection, name: str, since: int, facts: Iterable[StreamFact] = ()) -> PublishedFacts:
    """Remember every published fact above `since` from now on, beginning with these."""
    published = PublishedFacts(since)
    with connection.transaction():
        connection.execute("update tidemark.synapse_streams set facts_since = %s where stream = %s", [since, name])
        remember(connection, name, published, [*facts])
    return published


def remember(connection: Connection, name: str, published: PublishedFacts, facts: Sequence[StreamFact]) -> None:
    """Store facts in the transaction that publishes them."""
    if not facts:
        return
    published.add(facts)
    connection.execute(
        """
        insert into tidemark.synapse_facts (stream, id, marks, is_anchor)
        select %s, * from unnest(%s::bigint[], %s::bytea[], %s::boolean[])
        on conflict (stream, id) do update set marks = excluded.marks, is_anchor = excluded.is_anchor
        """,
        [
            name,
            [fact.id for fact in facts],
            [_packed(fact.marks) for fact in facts],
            [bool(fact.marks) and min(fact.marks) % _ANCHOR_EVERY == 0 for fact in facts],
        ],
    )


def go_back(connection: Connection, name: str, published: PublishedFacts, at: int) -> None:
    """Delete the facts beyond `at`, whose IDs may be given out again."""
    published.go_back(at)
    connection.execute("delete from tidemark.synapse_facts where stream = %s and id > %s", [name, at])
    connection.execute(
        "update tidemark.synapse_streams set facts_since = %s where stream = %s", [published.since, name]
    )


def forget(connection: Connection, name: str, published: PublishedFacts) -> None:
    """Keep the newest facts, and a few older ones."""
    if published.forget():
        with connection.transaction():
            connection.execute(
                "update tidemark.synapse_streams set facts_since = %s where stream = %s", [published.since, name]
            )
            connection.execute(
                "delete from tidemark.synapse_facts where stream = %s and id <= %s and not is_anchor",
                [name, published.since],
            )


def anchors(connection: Connection, name: str, upto: int) -> list[StreamFact]:
    """Select the older facts to keep, newest first: the distance between two kept facts doubles."""
    rows = connection.execute(
        "select id, marks from tidemark.synapse_facts where stream = %s and id <= %s and is_anchor order by id desc",
        [name, upto],
    ).fetchall()
    places = [0, *(2**power for power in range(len(rows).bit_length()))]
    chosen = [rows[place] for place in places if place < len(rows)]
    return [StreamFact(id, "", (), _unpacked(marks)) for id, marks in chosen]


@dataclass
class HeadSamples:
    """`samples`: times in ms, each with a head that was read afterwards. IDs beyond that head were given out later."""

    name: str
    samples: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def load(cls, connection: Connection, name: str) -> "HeadSamples":
        rows = connection.execute(
            "select at, head from tidemark.synapse_heads where stream = %s order by at", [name]
        ).fetchall()
        return cls(name, [(at, head) for at, head in rows])

    def kept_above(self, now: int, kept_for: float) -> int:
        """The ID above which every row is younger than `kept_for` seconds."""
        oldest = now - int(kept_for * 1000)
        return min((head for at, head in self.samples if oldest <= at <= now), default=UNBOUNDED)

    def note(self, connection: Connection, now: int, head: int, kept_for: float) -> None:
        """Add a sample once an hour. Samples in the future, after the clock was set back, are dropped."""
        oldest = now - int(kept_for * 1000)
        if any(now - _SAMPLE_EVERY < at <= now for at, _ in self.samples):
            return
        self.samples = [sample for sample in self.samples if oldest <= sample[0] <= now] + [(now, head)]
        with connection.transaction():
            connection.execute(
                "delete from tidemark.synapse_heads where stream = %s and at not between %s and %s",
                [self.name, oldest, now],
            )
            connection.execute(
                "insert into tidemark.synapse_heads (stream, at, head) values (%s, %s, %s)"
                " on conflict (stream, at) do nothing",
                [self.name, now, head],
            )


def _packed(marks: Marks) -> bytes:
    return struct.pack(f">{len(marks)}q", *sorted(marks))


def _unpacked(marks: bytes) -> Marks:
    return frozenset(struct.unpack(f">{len(marks) // 8}q", marks))
