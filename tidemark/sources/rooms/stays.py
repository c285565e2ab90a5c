"""Who is told an event of a room: whoever has joined it before that event or with it. Pure.

Events are counted by `turn`, the order in which they were persisted, and not by their IDs: an ID may be reserved long
before. So nobody is told what was written after they left, and everybody what was written before.
"""

from collections.abc import Set
from dataclasses import dataclass

from tidemark.sources.rooms.rules import RoomEvent

JOINED = "join"


@dataclass(frozen=True, slots=True)
class Stay:
    """Of a member in a room: the turns of the first event and of the last one, None while it lasts.

    `left_by` is the stream ID by which the member is told of its end. It was reserved in the turn of the last event, so
    every event of the stay has a lower one.
    """

    room: str
    began: int
    ended: int | None = None
    left_by: int | None = None

    def covers(self, turn: int) -> bool:
        return self.began <= turn and (self.ended is None or turn <= self.ended)


def joins(event: RoomEvent) -> bool:
    """Whether its user has joined where this membership holds; after a leave, a kick, a ban, an invite not."""
    return event.content.get("membership") == JOINED


def moved(before: Set[str], after: Set[str]) -> tuple[list[str], list[str]]:
    """Whose stays begin and whose end, where these had joined before an event and those after it."""
    return sorted(after - before), sorted(before - after)
