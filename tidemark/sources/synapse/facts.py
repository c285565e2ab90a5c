"""Facts of Synapse's streams, and what is proven of them. Pure; magnitudes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MASTER = "master"
"""The main process, which older rows do not name."""


@dataclass(frozen=True, slots=True)
class StreamFact:
    """`rows` are JSON, at least one. `writer` is empty where the table does not say whose it is.

    `marks`: a hash of each row's identity; none of a fact that was heard and is in no table. `is_proof`: no other
    history has a fact of these marks.
    """

    id: int
    writer: str
    rows: Sequence[str]
    marks: frozenset[int] = field(default=frozenset(), compare=False)
    is_proof: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class ProvenAdvance:
    """Everything of the writer in `(prev, id]` has ended, and these are its facts there, in order.

    `unseen`: there may be more, of which nobody knows.
    """

    writer: str
    prev: int
    id: int
    facts: Sequence[StreamFact]
    unseen: bool = False
