"""The evidence about a stream that the bridge stores in its own database, besides positions.

The stored published facts show whether Synapse's tables now have another history. The stored samples of the highest ID
show how old a row is at most.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemark.common.postgres_session import Connection
from tidemark.sources.synapse.decider import UNBOUNDED, StreamFact

MAX_FACTS = 10_000
"""The number of newest facts of a stream that stay stored, with their marks, when older facts are removed."""
_TRIM_MARGIN = 2_000
"""Old facts are removed only when there are more than `MAX_FACTS + _TRIM_MARGIN`, so that many are removed at a
time."""

Marks = frozenset[int]
"""Hashes of the identities of a fact's rows, 64 bits each."""


class PublishedFacts:
    """The published facts of a stream above the ID `since_id`, as a copy in memory: ID -> marks.

    Args:
        since_id: the ID above which facts are remembered (a magnitude).
        marks: the marks of the facts that are stored already; None for none.
    """

    def __init__(self, since_id: int, marks: Mapping[int, Marks] | None = None) -> None:
        self.since_id = since_id
        self._marks = dict(marks or {})

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, facts: Iterable[StreamFact]) -> None:
        """Add facts that are published now. Facts up to `since_id` are ignored."""
        self._marks |= {fact.id: fact.marks for fact in facts if fact.id > self.since_id}

    def contains(self, fact: StreamFact) -> bool:
        """Whether `fact` was published: a published fact has the same ID, and its marks include the marks of `fact`."""
        marks = self._marks.get(fact.id)
        return marks is not None and bool(marks) and fact.marks <= marks

    def id_below_newest(self, count: int) -> int:
        """The highest ID above which there are `count` published facts; `since_id` if there are `count` facts or
        fewer."""
        return sorted(self._marks)[-count] - 1 if len(self._marks) > count else self.since_id

    def find_unpublished(self, table: Iterable[StreamFact], sent_upto: Mapping[str, int]) -> list[StreamFact]:
        """The facts of `table` that should have been published and were not.

        Args:
            table: facts that were read from Synapse's tables.
            sent_upto: writer -> the ID up to which all facts of the writer should have been published.
        """
        return [
            fact
            for fact in table
            if self.since_id < fact.id <= sent_upto.get(fact.writer, 0) and not self._marks.get(fact.id)
        ]

    def find_replaced(self, table: Iterable[StreamFact]) -> list[StreamFact]:
        """The facts of `table` whose IDs were published with other marks. These IDs must have been given out again."""
        return [fact for fact in table if self._marks.get(fact.id) and not self.contains(fact)]

    def find_last_common_id(self, table: Iterable[StreamFact], sent_upto: Mapping[str, int]) -> int | None:
        """The ID up to which `table` certainly has the published history. No ID up to this one is given out again.

        The result is the highest ID of a proof (`is_proof`) that was published and is in `table`. Facts that should
        have been published and were not (see `find_unpublished`), and replaced facts, are all above this ID. None if
        there is no such ID.
        """
        proven = None
        for fact in sorted(table, key=lambda fact: fact.id):
            if self.contains(fact):
                proven = fact.id if fact.is_proof else proven
            elif self._marks.get(fact.id) or self.since_id < fact.id <= sent_upto.get(fact.writer, 0):
                break
        return proven

    def truncate(self, at: int) -> None:
        """Remove the facts beyond the ID `at`, because these IDs may be given out again. Lowers `since_id` to `at`."""
        self.since_id = min(self.since_id, at)
        self._marks = {id: marks for id, marks in self._marks.items() if id <= at}

    def trim(self) -> bool:
        """If there are too many facts, remove all except the `MAX_FACTS` newest, and raise `since_id`. Returns whether
        facts were removed."""
        if len(self._marks) <= MAX_FACTS + _TRIM_MARGIN:
            return False
        self.since_id = self.id_below_newest(MAX_FACTS)
        self._marks = {id: marks for id, marks in self._marks.items() if id > self.since_id}
        return True


_FACTS_PER_ANCHOR = 500
"""One in this many facts is an *anchor*, chosen by its marks. Anchors stay stored when older facts are deleted."""
_SAMPLE_INTERVAL_MS = 3_600_000
"""The shortest time between two samples of the highest ID, in ms."""


def load(connection: Connection, name: str) -> PublishedFacts | None:
    """Load the stored published facts of the stream `name`. None if the storage has not begun (see `begin`)."""
    row = connection.execute("select facts_since from tidemark.synapse_streams where stream = %s", [name]).fetchone()
    if row is None or row[0] is None:
        return None
    rows = connection.execute(
        "select id, marks from tidemark.synapse_facts where stream = %s and id > %s", [name, row[0]]
    ).fetchall()
    return PublishedFacts(row[0], {id: _unpack_marks(marks) for id, marks in rows})


def begin(connection: Connection, name: str, since: int, facts: Iterable[StreamFact] = ()) -> PublishedFacts:
    """Begin to store the published facts of a stream. Returns these facts.

    Args:
        connection: to the bridge's database.
        name: the stream's name in Kafka.
        since: the ID above which facts are stored (a magnitude).
        facts: the facts above `since` that are published already.
    """
    published = PublishedFacts(since)
    with connection.transaction():
        connection.execute("update tidemark.synapse_streams set facts_since = %s where stream = %s", [since, name])
        remember(connection, name, published, [*facts])
    return published


def remember(connection: Connection, name: str, published: PublishedFacts, facts: Sequence[StreamFact]) -> None:
    """Store newly published facts, and add them to `published`. The caller's transaction publishes the facts."""
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
            [_pack_marks(fact.marks) for fact in facts],
            [bool(fact.marks) and min(fact.marks) % _FACTS_PER_ANCHOR == 0 for fact in facts],
        ],
    )


def truncate(connection: Connection, name: str, published: PublishedFacts, at: int) -> None:
    """Delete the facts beyond the ID `at` from the database and from `published`: these IDs may be given out again."""
    published.truncate(at)
    connection.execute("delete from tidemark.synapse_facts where stream = %s and id > %s", [name, at])
    connection.execute(
        "update tidemark.synapse_streams set facts_since = %s where stream = %s", [published.since_id, name]
    )


def trim(connection: Connection, name: str, published: PublishedFacts) -> None:
    """If too many facts are stored, delete all except the `MAX_FACTS` newest. Anchors stay in the database."""
    if published.trim():
        with connection.transaction():
            connection.execute(
                "update tidemark.synapse_streams set facts_since = %s where stream = %s", [published.since_id, name]
            )
            connection.execute(
                "delete from tidemark.synapse_facts where stream = %s and id <= %s and not is_anchor",
                [name, published.since_id],
            )


def load_anchors(connection: Connection, name: str, upto: int) -> list[StreamFact]:
    """Load some anchors up to the ID `upto`, newest first: the anchors 0, 1, 2, 4, 8 and so on, from the newest.

    The facts in the result have only an ID and marks.
    """
    rows = connection.execute(
        "select id, marks from tidemark.synapse_facts where stream = %s and id <= %s and is_anchor order by id desc",
        [name, upto],
    ).fetchall()
    indices = [0, *(2**power for power in range(len(rows).bit_length()))]
    chosen = [rows[index] for index in indices if index < len(rows)]
    return [StreamFact(id, "", (), _unpack_marks(marks)) for id, marks in chosen]


@dataclass
class HeadSamples:
    """Samples of the highest ID of a stream.

    Attributes:
        name: the stream's name in Kafka.
        samples: pairs of a time and an ID, the oldest first. The time is in ms since 1970, by the clock of Synapse's
            Postgres. All IDs above this ID were given out after this time.
    """

    name: str
    samples: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def load(cls, connection: Connection, name: str) -> "HeadSamples":
        """Load the stored samples of the stream."""
        rows = connection.execute(
            "select at, head from tidemark.synapse_heads where stream = %s order by at", [name]
        ).fetchall()
        return cls(name, [(at, head) for at, head in rows])

    def kept_above(self, now: int, kept_seconds: float) -> int:
        """The ID above which every row is younger than `kept_seconds`; `UNBOUNDED` if no sample shows this.

        Args:
            now: the current time, in ms since 1970.
            kept_seconds: the age in seconds.
        """
        oldest = now - int(kept_seconds * 1000)
        return min((head for at, head in self.samples if oldest <= at <= now), default=UNBOUNDED)

    def note(self, connection: Connection, now: int, head: int, kept_seconds: float) -> None:
        """Store a sample, and delete useless samples. Does nothing if a sample is less than an hour old.

        A sample is useless if it is older than `kept_seconds`, or is in the future because the clock was set back.

        Args:
            connection: to the bridge's database.
            now: the time of the sample, in ms since 1970.
            head: the highest ID, read after `now` (a magnitude).
            kept_seconds: the largest age of a sample in seconds.
        """
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


def _pack_marks(marks: Marks) -> bytes:
    return struct.pack(f">{len(marks)}q", *sorted(marks))


def _unpack_marks(marks: bytes) -> Marks:
    return frozenset(struct.unpack(f">{len(marks) // 8}q", marks))
