"""What a stream's state may hold. Past a bound it holds, rejects, or forgets towards holding (docs/design.md, rule 9).

Why a record was sent to the dead letters: one exact reason for every kind of bad record.

Which shard holds a stream. The answer is stored in checkpoints and in Postgres: it must never change.

What a batch did to one stream, collected while it is fed. Magnitudes; `streaming.batch` turns it into effects.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal
from zlib import crc32

import msgspec

if TYPE_CHECKING:
    from tidemark.streaming.intervals import Ids  # numpy's, which a service that only writes does not have


@dataclass(frozen=True, slots=True)
class Bounds:
    """`pending`: spans per writer; an edge that would add one is rejected. `completed`: intervals above the line; the
    highest are forgotten. `held`: incarnations that never joined; further ones are rejected. `retired`: retired
    writers; the longest retired are dropped. `retirement` (ms): after that a retired writer is dropped in any case.
    """

    pending: int = 10_000
    completed: int = 10_000
    held: int = 1_000
    retired: int = 10_000
    retirement: int = 7 * 24 * 3600 * 1000


class Reason(StrEnum):
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
    # found while decoding or against the stream's direction
    MIXED_SIGN = "mixed_sign"
    # found against the stream's state
    ZOMBIE = "zombie"
    CONFLICT = "conflict"
    UNKNOWN_WRITER = "unknown_writer"
    WRONG_PARTITION = "wrong_partition"
    PENDING_OVERFLOW = "pending_overflow"
    HELD_OVERFLOW = "held_overflow"


class Rejected(msgspec.Struct, array_like=True, frozen=True):
    """Records that go to the dead letters unchanged; `offsets` are little-endian int64, ascending."""

    topic: str
    partition: int
    reason: str
    offsets: bytes

    @property
    def records(self) -> int:
        return len(self.offsets) // 8


def shard_of(stream: str, shards: int) -> int:
    return crc32(stream.encode()) % shards


Outcome = Literal["applied", "held", "duplicate", "late", "batch", "forgotten"]
Why = Literal["skipped", "regressed"]


@dataclass(frozen=True, slots=True)
class LateRange:
    """Completions in `(prev, id]`, `facts` of them RDATA, that came after the range was settled without them."""

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: Why


@dataclass(frozen=True, slots=True)
class Regress:
    """The writer joined at `id`, below its `position`."""

    writer: str
    epoch: int
    id: int
    position: int


@dataclass(slots=True)
class Changes:
    """`now` is the batch's time (ms). `touched` maps a writer to the Kafka time (ms) of its oldest record.

    `rejected` holds offsets of facts, by reason; a rejected marker is told by the return value of its method.
    """

    now: int
    counts: Counter[Outcome] = field(default_factory=Counter)
    touched: dict[str, int] = field(default_factory=dict)
    rejected: "list[tuple[Reason, Ids]]" = field(default_factory=list)
    late: list[LateRange] = field(default_factory=list)
    regressed: list[Regress] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def touch(self, writer: str, time: int) -> None:
        self.touched[writer] = min(time, self.touched.get(writer, time))
