"""Where a follower stands: what it has been handed, so that it can go on from there. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemark.sinks.reader.token import Token


@dataclass(frozen=True, slots=True)
class Place:
    """A plain value, to be stored as you like. It says more than a token: what was handed over, and not what is true.

    Each writer stands at its entry in `positions`, which may lie below `linear`; a writer without one stands at
    `linear`. `late` is the number of the last late completion. In linear mode `positions` is empty.
    """

    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    late: int = 0

    @classmethod
    def after(cls, token: Token, late: int = 0) -> "Place":
        """Who has read all that `token` stands for, and late completions up to the one numbered `late`."""
        return cls(token.linear, dict(token.positions), late)
