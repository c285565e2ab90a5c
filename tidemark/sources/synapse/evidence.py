"""The evidence about a stream that the bridge stores in its own database, besides positions.

Published facts show whether Synapse's tables now have another history. Samples of the highest ID show how old a row is.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemark.common.postgres_session import Connection
from tidemark.sources.synapse.decider import UNBOUNDED, StreamFact

MAX_FACTS = 10_000
"""The number of newest facts of a stream that are remembered, each with its marks."""
_TRIM_MARGIN = 2_000  # more facts than `MAX_FACTS`, so that not each new fact removes an old one

Marks = frozenset[int]


class PublishedFacts:
    """The published facts above the ID `since`, with their marks."""

    def __init__(self, since: int, marks: Mapping[int, Marks] | None = None) -> None:
        self.since = since
        self._marks = dict(marks or {})

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, facts: Iterable[StreamFact]) -> None:
        self._marks |= {fact.id: fact.marks for fact in facts if fact.id > self.since}

    def knows(self, fact: StreamFact) -> bool:
        """Whether this fact was published: a fact with the same ID whose marks include those of this fact."""
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
        """The facts of the table whose IDs were published with other facts, so that the IDs must have been given out
        again."""
        return [fact for fact in table if self._marks.get(fact.id) and not self.knows(fact)]

    def last_common_id(self, table: Iterable[StreamFact], sent_upto: Mapping[str, int]) -> int | None:
        """The ID up to which the table certainly has the published history, so that no ID up to it is given out again.

        This is the ID of the highest fact that is in both, is a proof, and is below all facts that are only in the
        table. None if there is no such fact.
        """
        proven = None
        for fact in sorted(table, key=lambda fact: fact.id):
            if self.knows(fact):
                proven = fact.id if fact.is_proof else proven
            elif self._marks.get(fact.id) or self.since < fact.id <= sent_upto.get(fact.writer, 0):
                break
        return proven

    def truncate(self, at: int) -> None:
        """Remove the facts beyond the ID `at`, because these IDs may be given out again."""
        self.since = min(self.since, at)
        self._marks = {id: marks for id, marks in self._marks.items() if id <= at}

    def trim(self) -> bool:
        """Remove facts that are not among the newest `MAX_FACTS`. Returns whether facts were removed."""
        if len(self._marks) <= MAX_FACTS + _TRIM_MARGIN:
            return False
        self.since = self.above(MAX_FACTS)
        self._marks = {id: marks for id, marks in self._marks.items() if id > self.since}
        return True


_SAMPLE_ONE_IN = 500
"""One in this many older facts is kept (an anchor), chosen by its marks."""
_SAMPLE_INTERVAL_MS = 3_600_000


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
    """Begin to store the published facts above the ID `since`. `facts`: those that are published already."""
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
            [bool(fact.marks) and min(fact.marks) % _SAMPLE_ONE_IN == 0 for fact in facts],
        ],
    )


def truncate(connection: Connection, name: str, published: PublishedFacts, at: int) -> None:
    """Delete the stored facts beyond the ID `at`, because these IDs may be given out again."""
    published.truncate(at)
    connection.execute("delete from tidemark.synapse_facts where stream = %s and id > %s", [name, at])
    connection.execute(
        "update tidemark.synapse_streams set facts_since = %s where stream = %s", [published.since, name]
    )


def trim(connection: Connection, name: str, published: PublishedFacts) -> None:
    """Delete all stored facts except the newest and the anchors, if there are too many."""
    if published.trim():
        with connection.transaction():
            connection.execute(
                "update tidemark.synapse_streams set facts_since = %s where stream = %s", [published.since, name]
            )
            connection.execute(
                "delete from tidemark.synapse_facts where stream = %s and id <= %s and not is_anchor",
                [name, published.since],
            )


def anchors(connection: Connection, name: str, upto: int) -> list[StreamFact]:
    """Some of the anchors up to the ID `upto`, newest first. The distance between two of them doubles."""
    rows = connection.execute(
        "select id, marks from tidemark.synapse_facts where stream = %s and id <= %s and is_anchor order by id desc",
        [name, upto],
    ).fetchall()
    indices = [0, *(2**power for power in range(len(rows).bit_length()))]
    chosen = [rows[index] for index in indices if index < len(rows)]
    return [StreamFact(id, "", (), _unpacked(marks)) for id, marks in chosen]


@dataclass
class HeadSamples:
    """Samples of the highest ID of a stream, as pairs (time in ms, ID). The ID was read after the time, so higher IDs
    were given out after the time."""

    name: str
    samples: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def load(cls, connection: Connection, name: str) -> "HeadSamples":
        rows = connection.execute(
            "select at, head from tidemark.synapse_heads where stream = %s order by at", [name]
        ).fetchall()
        return cls(name, [(at, head) for at, head in rows])

    def kept_above(self, now: int, kept_seconds: float) -> int:
        """The ID above which every row is younger than `kept_seconds` seconds."""
        oldest = now - int(kept_seconds * 1000)
        return min((head for at, head in self.samples if oldest <= at <= now), default=UNBOUNDED)

    def note(self, connection: Connection, now: int, head: int, kept_seconds: float) -> None:
        """Add a sample, at most one an hour. Delete samples that are too old, or in the future because the clock was
        set back."""
        oldest = now - int(kept_seconds * 1000)
        if any(now - _SAMPLE_INTERVAL_MS < at <= now for at, _ in self.samples):
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
