"""The rules of a room's DAG: what persisting one event does to edges, extremities and timelines. Pure.

An event names its `prev_events`, and so the edges point back in time. `persisted` sees only what stands around an
event, so that a store looks up a few rows, whatever the room holds.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tidemark.common.errors import Reject, message
from tidemark.streaming.wire.records import is_name, why_no_name

MOST_PREVS = 10
"""Prev events of an event that is made here."""
MOST_NAMED = 20
"""Prev events of any event."""
DEEPEST_EVENT = 2**63 - 1
MEMBER = "m.room.member"
_OUT_OF_BAND = ("invite", "leave", "knock")

Timeline = Literal["events", "backfill"]


@message("event {event!r} is refused: {problem}")
class BadEvent(Reject):
    event: str
    problem: str


class HeldAs(StrEnum):
    """As what an event is held."""

    REGULAR = "regular"
    SOFT_FAILED = "soft-failed"
    """It has edges and a state, and is no forward extremity."""
    REJECTED = "rejected"
    """The same, and changes no state."""
    OUTLIER = "outlier"
    """Held without the room's state at it: no edges, no state, in no timeline."""
    OUT_OF_BAND = "out-of-band"
    """An outlier that its user is sent: an invite, its rejection, a knock."""

    @property
    def outlier(self) -> bool:
        return self in {HeldAs.OUTLIER, HeldAs.OUT_OF_BAND}

    @property
    def counts(self) -> bool:
        """Whether it is a forward extremity until another such event follows it."""
        return self is HeldAs.REGULAR


class KnownEvent(NamedTuple):
    """What the rules need of an event that is held."""

    id: str
    room: str
    depth: int
    held_as: HeldAs


@dataclass(frozen=True, slots=True)
class RoomEvent:
    """`depth` (from 1) is one more than that of the deepest prev event; a `state_key` makes it a state event."""

    id: str
    room: str
    type: str
    sender: str
    prevs: tuple[str, ...]
    depth: int
    state_key: str | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    held_as: HeldAs = HeldAs.REGULAR

    @property
    def key(self) -> tuple[str, str] | None:
        """What of the room's state it sets, if the event is not rejected."""
        return None if self.state_key is None else (self.type, self.state_key)

    @property
    def known(self) -> KnownEvent:
        return KnownEvent(self.id, self.room, self.depth, self.held_as)

    def same(self, other: "RoomEvent") -> bool:
        """Whether it is the same event, whatever it is held as."""
        return _content(self) == _content(other)


@dataclass(frozen=True, slots=True)
class Around:
    """What is held around an event: itself, those of its prev events that are (of any room, held as whatever), and the
    events of its room with an edge to it, as regular ones if that edge counts."""

    itself: RoomEvent | None = None
    prevs: Mapping[str, KnownEvent] = field(default_factory=dict)
    named_by: Collection[KnownEvent] = ()


@dataclass(frozen=True, slots=True)
class RoomChange:
    """What persisting does. `timeline` is where it is told, None for an outlier that nobody is sent (whoever is sent
    one reads `events`).

    `extremity`: it becomes a forward extremity. If its edges `count`, its prev events cease to be forward extremities,
    and so do those that soft-failed and rejected events among them name: from then on the edges of these count, too.
    It ceases to be a backward extremity where it has edges, and `missing` of its prev events become ones. The edges
    to it from the events `untrue` are taken away: these said a depth that is false.
    """

    edges: tuple[str, ...]
    counts: bool
    extremity: bool
    missing: tuple[str, ...]
    timeline: Timeline | None
    untrue: tuple[str, ...] = ()


def persisted(event: RoomEvent, around: Around, timeline: Timeline = "events") -> RoomChange:
    """The change by `event`, which arrives live or as history (`backfill`). Raises `BadEvent`."""
    _check_alone(event)
    if around.itself is not None:
        _check_again(event, around.itself)
    if event.held_as.outlier:
        told: Timeline | None = "events" if event.held_as is HeldAs.OUT_OF_BAND else None
        return RoomChange((), counts=False, extremity=False, missing=(), timeline=told)
    _check_place(event, around)
    true = [other for other in around.named_by if other.depth > event.depth]
    is_followed = any(other.held_as.counts for other in true)
    return RoomChange(
        edges=event.prevs,
        counts=event.held_as.counts or is_followed,
        extremity=event.held_as.counts and not is_followed,
        missing=tuple(id for id in event.prevs if _is_missing(around.prevs.get(id))),
        timeline=timeline,
        untrue=tuple(other.id for other in around.named_by if other.depth <= event.depth),
    )


def chosen_prevs(extremities: Iterable[KnownEvent]) -> tuple[KnownEvent, ...]:
    """The prev events of a new event: of the forward extremities the deepest, so that the rest comes next."""
    ranked = sorted(extremities, key=lambda known: (-known.depth, known.id))
    return tuple(ranked[:MOST_PREVS])


def depth_after(prevs: Iterable[KnownEvent]) -> int:
    """One more than that of the deepest; behind the deepest depth there is, the same."""
    return min(DEEPEST_EVENT, 1 + max((known.depth for known in prevs), default=0))


def _is_missing(known: KnownEvent | None) -> bool:
    return known is None or known.held_as.outlier


def _content(event: RoomEvent) -> tuple[object, ...]:
    return (
        event.room,
        event.type,
        event.sender,
        event.prevs,
        event.depth,
        event.state_key,
        dict(event.content),
    )


def _check_alone(event: RoomEvent) -> None:
    for what, name in (("ID", event.id), ("room", event.room), ("type", event.type), ("sender", event.sender)):
        _require(event, _is_fit(name), f"its {what}: {why_no_name(name)}")
    if event.state_key:
        _require(event, _is_fit(event.state_key), f"its state key: {why_no_name(event.state_key)}")
    named = len(event.prevs)
    _require(event, named <= MOST_NAMED, f"it names {named} prev events, and {MOST_NAMED} are the most")
    for id in event.prevs:
        _require(event, _is_fit(id), f"a prev event: {why_no_name(id)}")
    _require(event, event.id not in event.prevs, "it names itself as a prev event")
    _require(event, len({*event.prevs}) == len(event.prevs), "it names a prev event twice")
    exact = type(event.depth) is int and 1 <= event.depth <= DEEPEST_EVENT
    _require(event, exact, f"its depth {event.depth!r} is not from 1 to {DEEPEST_EVENT}")
    if event.held_as is HeldAs.OUT_OF_BAND:
        membership = event.content.get("membership")
        sent = event.type == MEMBER and bool(event.state_key) and membership in _OUT_OF_BAND
        _require(event, sent, "only an invite, its rejection or a knock is sent to its user out of band")


def _is_fit(name: str) -> bool:
    return is_name(name) and name.isprintable()


def _check_again(event: RoomEvent, held: RoomEvent) -> None:
    _require(event, event.same(held), "another event has this ID")
    again = held.held_as.outlier and not event.held_as.outlier
    _require(event, again, f"a duplicate: it is held already, {held.held_as}")


def _check_place(event: RoomEvent, around: Around) -> None:
    """Edges stay in the room and go from deeper events to less deep ones, or among the deepest to events that came
    before: so there is no cycle. An event that named this one and is no deeper has said a false depth, and gives way.
    """
    for known in around.prevs.values():
        _require(event, known.room == event.room, f"its prev event {known.id} is of another room, {known.room}")
    least = depth_after(around.prevs.values())
    deepest = max((known.depth for known in around.prevs.values()), default=0)
    if len(around.prevs) == len(event.prevs):
        right = f"an event after these prev events has {least}"
        _require(event, event.depth == least, f"its depth is {event.depth}, and {right}")
    _require(event, event.depth >= least, f"its depth is {event.depth}, and a prev event's is {deepest}")
    for other in around.named_by:
        _require(event, other.id not in around.prevs, f"a cycle: it and {other.id} name each other")


def _require(event: RoomEvent, fine: bool, problem: str) -> None:  # noqa: FBT001 - a condition, not a switch
    if not fine:
        raise BadEvent(event.id, problem)


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
