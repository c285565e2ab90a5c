"""Bounds of a stream's state and policies, reasons for rejecting a record, evidence, and the shard of a stream.

If a bound is reached, records are deferred or rejected, old data is dropped, or streams are marked as uncertain. Each
of these may delay a position, but never moves a position (docs/design.md, rule 9). This module must not import numpy:
services that only write or read import this module, and do not need numpy.

*Policies* are settings for single streams. The name of a policy is the name of a stream, or a prefix of names and a
`*`. For each setting, the most specific policy that has the setting applies. If no policy has the setting, the default
applies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple
from zlib import crc32

import msgspec


def policy_names(name: str) -> Iterator[str]:
    """Yield the names of all policies that may apply to a stream, the most specific first.

    These names are the name of the stream, and each prefix of the name with a `*`.

    Args:
        name: the name of a stream, or of a policy that ends with `*`. A policy's own name comes first.
    """
    beginning = name.removesuffix("*")
    if beginning == name:
        yield name
    yield from (f"{beginning[:length]}*" for length in range(len(beginning), -1, -1))


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a stream's state.

    Attributes:
        pending: largest number of spans above the position of a writer. An edge that would add one more is deferred.
        completed: largest number of intervals of completed IDs above the linear position. If there are more, the
            highest ones are forgotten.
        unjoined: largest number of incarnations of a stream that never joined. Records of further incarnations are
            rejected, and the stream is marked as uncertain.
        retired: largest number of retired writers of a stream, not counting writers beyond the linear position. If
            there are more, those that retired first are dropped.
        retirement_ms: milliseconds after which a retired writer is dropped. A writer beyond the linear position stays.
        unreadable: largest number of streams of a shard that only unreadable records have named. If there are as many,
            each new stream begins as uncertain.
        by_policy: policy name (`policy_names`) -> bounds of the streams to which the policy applies.
    """

    pending: int = 10_000
    completed: int = 10_000
    unjoined: int = 1_000
    retired: int = 10_000
    retirement_ms: int = 7 * 24 * 3600 * 1000
    unreadable: int = 1_000
    by_policy: Mapping[str, "Bounds"] = field(default_factory=dict)

    def for_stream(self, stream: str) -> "Bounds":
        """The bounds of the most specific policy for the stream; these bounds if no policy applies."""
        return (
            next((self.by_policy[name] for name in policy_names(stream) if name in self.by_policy), self)
            if self.by_policy
            else self
        )


class Reason(StrEnum):
    """Why a record was rejected. The dead letter of the record has the reason."""

    # detected while decoding
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
    # detected while decoding, or by the stream's direction
    MIXED_SIGN = "mixed_sign"
    # detected by the stream's state
    ZOMBIE = "zombie"
    CONFLICT = "conflict"
    UNKNOWN_WRITER = "unknown_writer"
    BEYOND_ALLOCATED = "beyond_allocated"
    WRONG_PARTITION = "wrong_partition"
    BUFFER_OVERFLOW = "buffer_overflow"
    # detected by the database
    NOT_STORABLE = "not_storable"


class RejectedRecords(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Records of one partition that are rejected for one reason. They go to the dead letters unchanged.

    `offsets` are ascending, as little-endian int64. `ids` has for each record its rejected ID nearest to 0, signed, as
    little-endian int64; 0 if the whole record is rejected. `ids` is empty if all records are rejected as a whole.
    """

    topic: str
    partition: int
    reason: str
    offsets: bytes
    ids: bytes = b""

    @property
    def count(self) -> int:
        return len(self.offsets) // 8


class Evidence(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How the IDs of a range were settled (docs/design.md 1).

    Attributes:
        facts: number of IDs whose fact was read, from an RDATA or a RUN.
        empty: number of IDs without a fact: the IDs that their writer declared void, plus the widths of the ranges that
            the writer announced as empty, or that its JOIN or RETIRE settled as empty.
        unseen: the widths of the ranges that a JOIN or RETIRE settled, and that may have facts that nobody announced.
        skipped: the widths of the ranges that an operator settled.
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
        """The four counts in the order in which they are stored."""
        return self.facts, self.empty, self.unseen, self.skipped

    @property
    def proves_empty(self) -> bool:
        """Whether the range certainly has no fact of its writer. Then a reader need not read the table of the facts."""
        return not (self.facts or self.unseen or self.skipped)

    def at_most(self, width: int) -> "Evidence":
        """Upper bounds of the counts for a part of the range. `width`: the number of IDs of the part."""
        return Evidence(*(min(count, width) for count in self.counts))


NO_EVIDENCE = Evidence()


class EncodedState(NamedTuple):
    """The stored parts of an encoded state (`core.codec`).

    Attributes:
        whole: the complete state. If there are retired writers, their table replaces the last byte of `state`.
        state: the state without the table of retired writers. Can be decoded alone.
        retired_table: the encoded table of retired writers; None if the table need not be stored again.
    """

    whole: bytes
    state: bytes
    retired_table: bytes | None


def replace_unprintable(text: str) -> str:
    """Replace each unprintable character of untrusted text by U+FFFD. A terminal may execute control characters."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def shard_of(stream: str, shards: int) -> int:
    """The shard of a stream, from 0 to `shards` - 1. Postgres stores shards, so this function must never change."""
    return crc32(stream.encode()) % shards


DAY_MS = 24 * 3600 * 1000
MAX_DAYS: Final = 36_500
"""The largest value of a setting in days: a hundred years."""


class PolicySetting(NamedTuple):
    """A setting of a policy.

    Attributes:
        default: the value if neither a policy nor `Policies.defaults` has one; None if the setting has no effect then.
        maximum: the largest value.
        meaning: its description, for people.
    """

    default: int | None
    maximum: int
    meaning: str


POLICY_SETTINGS: Final = {
    "pending_bound": PolicySetting(10_000, 10**6, "pending intervals of one writer; further edges are deferred"),
    "completed_bound": PolicySetting(
        10_000,
        10**6,
        "intervals of completed IDs stored above the linear position; the highest of more intervals are forgotten",
    ),
    "retired_bound": PolicySetting(10_000, 10**6, "retired writers of a stream in the state; older ones leave it"),
    "retirement_days": PolicySetting(7, MAX_DAYS, "days after which a retired writer leaves the state"),
    "history_days": PolicySetting(7, MAX_DAYS, "days that Postgres keeps the history of advances and of gaps"),
    "gap_seconds": PolicySetting(
        120, 10**9, "age at which a gap, or a linear position that does not move, is an alert"
    ),
    "silent_seconds": PolicySetting(60, 10**9, "seconds without a record after which a writer counts as silent"),
    "behind_seconds": PolicySetting(None, 10**9, "linear lag in seconds that is an alert, whatever the blocker"),
    "behind_ids": PolicySetting(None, 10**9, "linear lag in IDs that is an alert, whatever the blocker"),
}


@dataclass(frozen=True, slots=True)
class Policies:
    """All policies. Settings that this version does not know are ignored, because a newer version may have set them.

    Attributes:
        by_name: policy name -> setting -> value.
        defaults: setting -> value that replaces the default in `POLICY_SETTINGS`.
    """

    by_name: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)

    def policy_name(self, stream: str, setting: str) -> str | None:
        """The name of the policy that sets the setting for the stream; None if the default applies."""
        return next((name for name in policy_names(stream) if setting in self.by_name.get(name, ())), None)

    def value(self, stream: str, setting: str) -> int | None:
        """The value of the setting for the stream: from a policy, from `defaults`, or from `POLICY_SETTINGS`.

        None if none of these has a value. `setting` must be a key of `POLICY_SETTINGS`.
        """
        if (name := self.policy_name(stream, setting)) is not None:
            return self.by_name[name][setting]
        return self.defaults.get(setting, POLICY_SETTINGS[setting].default)

    def bounds(self) -> Bounds:
        """The bounds of streams without a policy. `Bounds.by_policy` has the bounds of the policies."""
        bound_settings = {setting for setting, _ in _BOUND_SETTINGS.values()}
        by_policy = {
            name: self._bounds(name, {}) for name, values in self.by_name.items() if bound_settings & values.keys()
        }
        return Policies({}, self.defaults)._bounds("*", by_policy)

    def _bounds(self, name: str, by_policy: Mapping[str, Bounds]) -> Bounds:
        limits = {bound: (self.value(name, setting) or 0) * unit for bound, (setting, unit) in _BOUND_SETTINGS.items()}
        return Bounds(**limits, by_policy=by_policy)


# For each bound that policies can set: the setting, which has a default, and the factor from its unit to that of the
# field of `Bounds`.
_BOUND_SETTINGS: Final = {
    "pending": ("pending_bound", 1),
    "completed": ("completed_bound", 1),
    "retired": ("retired_bound", 1),
    "retirement_ms": ("retirement_days", DAY_MS),
}
