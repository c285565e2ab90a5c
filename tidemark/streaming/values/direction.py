"""Where a stream's IDs go: up from 1, or down from -1 (docs/design.md 3). The one place that knows their sign. Pure.

The state of a stream holds magnitudes. Records, effects, sinks and readers show the sign; there the order of IDs is
away from 0, so that the IDs of a backward stream ascend too.
"""

from enum import IntEnum
from typing import Literal

DirectionName = Literal["forward", "backward"]


class Direction(IntEnum):
    """The number is the stored form. `UNKNOWN`: no record of the stream has named an ID other than 0 so far."""

    FORWARD = 1
    BACKWARD = -1
    UNKNOWN = 0

    @classmethod
    def of(cls, id: int) -> "Direction":
        """That of a stream with the signed `id`."""
        return cls((id > 0) - (id < 0))

    @classmethod
    def named(cls, name: DirectionName) -> "Direction":
        return cls.FORWARD if name == "forward" else cls.BACKWARD

    def signed(self, magnitude: int) -> int:
        """The ID; `abs` is the way back."""
        return -magnitude if self is Direction.BACKWARD else magnitude

    def opposes(self, other: "Direction") -> bool:
        """Whether the two cannot be of one stream: a stream never mixes signs."""
        return self * other < 0


def beyond(a: int, b: int) -> bool:
    """Whether `a` comes after `b`."""
    return abs(a) > abs(b)


def farther(a: int, b: int) -> int:
    """The later of the two; `b` where neither is."""
    return a if beyond(a, b) else b


def nearer(a: int, b: int) -> int:
    """The earlier of the two; `a` where neither is."""
    return b if beyond(a, b) else a
