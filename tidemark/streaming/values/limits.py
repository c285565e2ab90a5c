"""Words of the whole core: what a state may hold, why a record is refused, and which shard holds a stream.

Past a bound a state holds, rejects, or forgets towards holding (docs/design.md, rule 9). Needs no numpy: services that
only write or read import this module too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple
from zlib import crc32

import msgspec


def fitting(name: str) -> Iterator[str]:
    """What a policy of the stream `name` may be called, the most particular first: the name, then each beginning of it
    with a `*`. Of such a beginning those that are as long, or shorter."""
    beginning = name.removesuffix("*")
    if beginning == name:
        yield name
    yield from (f"{beginning[:length]}*" for length in range(len(beginning), -1, -1))


@dataclass(frozen=True, slots=True)
class Bounds:
    """`pending`: spans per writer; an edge that would add one is put off. `completed`: intervals above the line; the
    highest are forgotten. `unjoined`: incarnations that never joined; further ones are rejected. `retired`: retired
    writers; the longest retired are dropped. `retirement` (ms): after that a retired writer is dropped in any case.
    `unread`: streams of a shard of which nothing could be read yet; past that each new stream is marked as uncertain.

    `own`, by what `fitting` gives, are the bounds of streams that have some of their own.
    """

    pending: int = 10_000
    completed: int = 10_000
    unjoined: int = 1_000
    retired: int = 10_000
    retirement: int = 7 * 24 * 3600 * 1000
    unread: int = 1_000
    own: Mapping[str, "Bounds"] = field(default_factory=dict)

    def of(self, stream: str) -> "Bounds":
        return next((self.own[name] for name in fitting(stream) if name in self.own), self) if self.own else self


class Reason(StrEnum):
    """Why a record was sent to the dead letters: one exact reason for every kind of bad record."""

    # found while decoding, from the record alone
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_KIND = "unknown_kind"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    OUT_OF_64_BITS = "out_of_64_bits"
    ID_NOT_BEYOND_PREV = "id_not_beyond_prev"
    NEGATIVE_EPOCH = "negative_epoch"
    BAD_NAME = "bad_name"
    KEY_MISMATCH = "key_mismatch"
    WRONG_TOPIC = "wrong_topic"
    UNEVEN_RUN = "uneven_run"
    BAD_TEXT = "bad_text"
    # found while decoding or against the stream's direction
    MIXED_SIGN = "mixed_sign"
    # found against the stream's state
    ZOMBIE = "zombie"
    CONFLICT = "conflict"
    UNKNOWN_WRITER = "unknown_writer"
    BEYOND_ALLOCATED = "beyond_allocated"
    WRONG_PARTITION = "wrong_partition"
    BUFFER_OVERFLOW = "buffer_overflow"
    # found by the database
    NOT_STORABLE = "not_storable"


class Rejected(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Records that go to the dead letters unchanged; `offsets` are little-endian int64, ascending.

    `ids`, where there are any, are as many: the first ID of each that does not fit, 0 where it is the whole record.
    """

    topic: str
    partition: int
    reason: str
    offsets: bytes
    ids: bytes = b""

    @property
    def records(self) -> int:
        return len(self.offsets) // 8


class Evidence(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How the IDs of a range were settled (docs/design.md 1).

    `facts` were seen as RDATA; `empty` were declared void (1 each) or announced (the width of the range) by their
    writer; `unseen` and `skipped` are the widths of the ranges that a join or an operator settled.
    """

    facts: int = 0
    empty: int = 0
    unseen: int = 0
    skipped: int = 0

    def __add__(self, other: "Evidence") -> "Evidence":
        return Evidence(
            self.facts + other.facts,
            self.empty + other.empty,
            self.unseen + other.unseen,
            self.skipped + other.skipped,
        )

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """In the order of the fields, which is that of every stored form."""
        return self.facts, self.empty, self.unseen, self.skipped

    @property
    def proves_empty(self) -> bool:
        """Whether nothing was written there: a table has no row of it."""
        return not (self.facts or self.unseen or self.skipped)

    def at_most(self, width: int) -> "Evidence":
        """Of a part of the range, `width` IDs wide: it cannot be told which IDs counted as what."""
        return Evidence(*(min(count, width) for count in self.counts))


NOTHING = Evidence()


class Encoded(NamedTuple):
    """A stream's state as stored by parts (`core.codec`). `retired` is the table of retired writers, None where
    it is as it was.

    `state` holds all else, and can be read by itself; `whole` has the table in the place of its last byte.
    """

    whole: bytes
    state: bytes
    retired: bytes | None


def printable(text: str) -> str:
    """Nothing that a terminal would obey: anybody may have written it."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def shard_of(stream: str, shards: int) -> int:
    """The answer is stored in Postgres: it must never change."""
    return crc32(stream.encode()) % shards
