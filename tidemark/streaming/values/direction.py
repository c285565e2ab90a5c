"""The direction of a stream's IDs: up from 1, or down from -1 (docs/design.md 3). Pure.

The state of a stream has magnitudes. Records, effects, sinks and readers have signed IDs. "Ascending" means away from
0, so the IDs of a backward stream ascend too.
"""

from enum import IntEnum
from typing import Literal

DirectionName = Literal["forward", "backward"]


class Direction(IntEnum):
    """The sign of a stream's IDs. States and Postgres store the number.

    `UNKNOWN`: the stream has not accepted a record with an ID other than 0.
    """

    FORWARD = 1
    BACKWARD = -1
    UNKNOWN = 0

    @classmethod
    def of(cls, id: int) -> "Direction":
        """The direction of a stream that has the signed `id`; `UNKNOWN` for 0."""
        return cls((id > 0) - (id < 0))

    @classmethod
    def from_name(cls, name: DirectionName) -> "Direction":
        return cls.FORWARD if name == "forward" else cls.BACKWARD

    def signed(self, magnitude: int) -> int:
        """The signed ID for a magnitude; `abs` is the inverse."""
        return -magnitude if self is Direction.BACKWARD else magnitude

    def opposes(self, other: "Direction") -> bool:
        """Whether one direction is forward and the other one backward. `UNKNOWN` opposes no direction."""
        return self * other < 0


def is_beyond(a: int, b: int) -> bool:
    """Whether `a` is farther from 0 than `b`."""
    return abs(a) > abs(b)


def farther(a: int, b: int) -> int:
    """The ID farther from 0; `b` if both are equally far."""
    return a if is_beyond(a, b) else b


def nearer(a: int, b: int) -> int:
    """The ID nearer to 0; `a` if both are equally far."""
    return b if is_beyond(a, b) else a
