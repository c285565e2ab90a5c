"""What shows that a database went back, or that its rows and its sequence are of different times (docs/design.md 4b).

IDs are given out again then, or lie where everything was decided. So the stream begins a new timeline below them: what
is committed there is published, and late, and nothing of it is taken for void.
"""

from dataclasses import dataclass

from tidemark.common.postgres_session import Connection
from tidemark.sources.relay import sequences
from tidemark.sources.relay.queries import AppendStream
from tidemark.sources.relay.sequences import StrayRows


@dataclass(frozen=True, slots=True)
class Regression:
    """A stream goes back to `floor`; what was published beyond `upto` may come again (magnitudes). `version`: the one
    that shows it, so that of several relays one takes it back."""

    stream: AppendStream
    version: int
    floor: int
    upto: int
    why: str


def find(connection: Connection) -> list[Regression]:
    """The streams that went back. One whose sequence is unfit is left alone: nothing of it is decided until then."""
    looked = sequences.heads(connection)
    strays = sequences.stray_rows(connection)
    found = list[Regression]()
    for stream, look in looked.items():
        stray = strays.get(stream.number, StrayRows(None, None))
        head = sequences.head(connection, stream, look, look.reached)
        if look.sequence.unfit or (stray.highest or 0) > head:
            continue
        signed, limits = stream.towards.signed, dict[int, str]()
        if head < look.reached:
            limits[head] = f"the sequence is at {signed(head)}, and was at {signed(look.reached)}"
        if stray.lowest is not None:
            id = signed(stray.lowest)
            limits[stray.lowest - 1] = f"a row with ID {id} was committed below the floor {signed(look.floor)}"
        if look.foreign:
            limits.setdefault(head, "the rows were written by a restore or a replication")
        if limits:
            limit = min(limits)
            floor, upto = min(look.floor, limit), min(look.upto, limit)
            found.append(Regression(stream, look.version, floor, upto, "; ".join(limits.values())))
    return found
