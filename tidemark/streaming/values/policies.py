"""Policies: settings for single streams, such as bounds, thresholds of alerts and the retention of history. Pure.

The name of a policy is the name of a stream, or a prefix of names with a `*`. For each setting, the most specific
policy that has the setting applies to a stream. If none has it, the default applies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tidemark.streaming.values.limits import Bounds, fitting

DAY = 24 * 3600 * 1000  # ms


class PolicySetting(NamedTuple):
    """A setting of a policy. Without a default (None), it has no effect unless a policy has it."""

    default: int | None
    most: int
    meaning: str


POLICY_SETTINGS: Final = {
    "pending_bound": PolicySetting(10_000, 10**6, "intervals held back of one writer; past it, edges are put off"),
    "completed_bound": PolicySetting(
        10_000, 10**6, "intervals of completed IDs kept above the line; past it the line is cautious"
    ),
    "retired_bound": PolicySetting(10_000, 10**6, "retired writers kept"),
    "retirement_days": PolicySetting(7, 36_500, "days after which a retired writer leaves the state"),
    "history_days": PolicySetting(7, 36_500, "days that Postgres keeps the history of advances and of gaps"),
    "gap_seconds": PolicySetting(120, 10**9, "age at which a gap, or a line that stands, is an alert"),
    "silent_seconds": PolicySetting(60, 10**9, "seconds without a record after which a writer counts as silent"),
    "behind_seconds": PolicySetting(None, 10**9, "seconds behind at which a line is an alert, whoever holds it"),
    "behind_ids": PolicySetting(None, 10**9, "IDs behind at which a line is an alert, whoever holds it"),
}


@dataclass(frozen=True, slots=True)
class Policies:
    """All policies. Unknown settings are ignored, because a newer version may have written them.

    Attributes:
        given: name -> setting -> value.
        defaults: setting -> value; they replace the defaults of `POLICY_SETTINGS`.
    """

    given: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)

    def source(self, stream: str, setting: str) -> str | None:
        """The name of the policy that applies; None if the default applies."""
        return next((name for name in fitting(stream) if setting in self.given.get(name, ())), None)

    def value(self, stream: str, setting: str) -> int | None:
        if (source := self.source(stream, setting)) is not None:
            return self.given[source][setting]
        return self.defaults.get(setting, POLICY_SETTINGS[setting].default)

    def bounds(self) -> Bounds:
        """The bounds of all streams, and those of streams with their own."""
        ours = {setting for setting, _ in _BOUNDS.values()}
        own = {name: self._bounds(name, {}) for name, given in self.given.items() if ours & given.keys()}
        return Policies({}, self.defaults)._bounds("*", own)

    def _bounds(self, name: str, own: Mapping[str, Bounds]) -> Bounds:
        limits = {bound: (self.value(name, setting) or 0) * unit for bound, (setting, unit) in _BOUNDS.items()}
        return Bounds(**limits, own=own)


# Bound -> setting with a default, and unit.
_BOUNDS: Final = {
    "pending": ("pending_bound", 1),
    "completed": ("completed_bound", 1),
    "retired": ("retired_bound", 1),
    "retirement": ("retirement_days", DAY),
}
