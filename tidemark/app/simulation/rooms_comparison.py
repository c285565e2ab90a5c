"""Holds what clients of rooms were answered against what the tables hold. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from tidemark.app.simulation.comparison import ReadCount
from tidemark.app.simulation.rooms_reading import ClientKind
from tidemark.sources.rooms import caches
from tidemark.sources.rooms.reading import TimelineRow, Upto
from tidemark.sources.rooms.rules import Stay


@dataclass(frozen=True, slots=True)
class RoomCount(ReadCount):
    """How one kind of client does. Of caches, `stale` values were served behind their invalidation; of states and
    rooms, `different` ones are not as the definitions say.
    """

    stale: int = 0
    different: int = 0

    @property
    def right(self) -> bool:
        return not any(self.figures[2:])

    def __str__(self) -> str:
        names = ("missed", "doubled", "out of order", "stale", "different")
        faults = [f"{count} {name}" for name, count in zip(names, self.figures[2:], strict=True) if count]
        return ", ".join([f"{self.reader}: {self.read} of {self.written}", *faults])


@dataclass
class HeldRooms:
    """What the services' database holds."""

    timeline: dict[int, TimelineRow]
    turns: Mapping[int, int]
    recipients: Mapping[int, str]
    stays: Mapping[tuple[str, str], Sequence[Stay]]
    """Of member and room."""
    stale_from: Mapping[tuple[str, str], Sequence[tuple[TimelineRow, int]]]
    """Of cache and room: invalidations with the version that they tell of, rising."""
    rooms_of: Mapping[str | None, Sequence[TimelineRow]]
    """Of a member, or (None) of all: invalidations of their rooms. A value's version is how many it has seen."""

    def least(self, cache: str, key: str, upto: Upto) -> int:
        """The version that a cached value must have come to."""
        if cache == caches.ROOMS_OF:
            return sum(upto.passed(row) for member in (key, None) for row in self.rooms_of.get(member, ()))
        told = reversed(self.stale_from.get((cache, key), ()))
        return next((version for row, version in told if upto.passed(row)), 0)

    def wanted(self, member: str) -> set[int]:
        """What is to come for a member, the ends of its stays aside."""
        return {
            id
            for id, row in self.timeline.items()
            if id > 0
            and (
                self.recipients[id] == member and id not in self.ends(member)
                if id in self.recipients
                else self.stay(member, id) is not None
            )
        }

    def stay(self, member: str, id: int) -> Stay | None:
        """The stay in which the member is told an event."""
        stays = self.stays.get((member, self.timeline[id].room), ())
        return next((stay for stay in stays if stay.covers(self.turns[id])), None)

    def ends(self, member: str) -> set[int]:
        return {stay.left_by for (of, _), stays in self.stays.items() if of == member for stay in stays if stay.left_by}


def synced(answers: Iterable[Sequence[Any]], held: HeldRooms) -> Iterable[RoomCount]:
    """The answers of each syncing client in a row: client, member, since, upto, answer."""
    rows: dict[tuple[str, str], list[Sequence[Any]]] = defaultdict(list)
    for client, about, *answer in answers:
        rows[client, about].append(answer)
    found: dict[str, RoomCount] = {}
    for (client, member), of in rows.items():
        count = _of_member(client, member, of, held)
        found[client] = found.get(client, RoomCount(client)) + count
    return found.values()


def _of_member(client: str, member: str, answers: Sequence[Sequence[Any]], held: HeldRooms) -> RoomCount:
    disordered = 0
    got: list[int] = []
    over: set[int] = set()
    for (_, before, _), (since, _, answer) in pairwise([(None, answers[0][0], None), *answers]):
        told = [answer[kind] for kind in ("events", "sent", "left")]
        disordered += since != before or told != [sorted(ids) for ids in told]
        stays = (held.stay(member, id) for id in answer["events"] if id in held.timeline)
        disordered += sum(stay is not None and stay.left_by in over for stay in stays)
        over.update(answer["left"])
        got += [id for ids in told for id in ids]
    until, ends = msgspec.convert(answers[-1][1], Upto), held.ends(member)
    wanted = held.wanted(member)
    passed = {id for id in wanted if until.passed(held.timeline[id])} | {id for id in ends if id <= until.linear}
    missed, doubled = _compared(passed, got)
    return RoomCount(client, len(wanted | ends), len(passed & {*got}), missed, doubled, disordered)


def judged(client: str, about: str, upto: Upto, answer: Mapping[str, Any], held: HeldRooms) -> RoomCount:
    match client:
        case ClientKind.HISTORY:
            return _paged(about, upto, answer, held)
        case ClientKind.CACHES:
            served = answer["served"]
            stale = sum(version < held.least(cache, key, upto) for cache, key, version in served)
            return RoomCount(client, len(served), len(served), stale=stale)
        case _:
            return RoomCount(client, 1, int(answer["found"]), missed=int(not answer["found"]))


def _paged(room: str, upto: Upto, answer: Mapping[str, Any], held: HeldRooms) -> RoomCount:
    """All live events up to the position, and all history of the time; some history may have come meanwhile."""
    got = [id for _, id in answer["events"]]
    of_room = {id: row for id, row in held.timeline.items() if row.room == room and id not in held.recipients}
    wanted = {id for id, row in of_room.items() if (upto.passed(row) if id > 0 else id >= answer["history"])}
    extra = {id for id in got if id < 0 and id in of_room}
    missed, doubled = _compared(wanted, [id for id in got if id in wanted or id not in extra])
    doubled += len(got) - len({*got}) if not doubled else 0
    keys = [(depth, id) for depth, id in answer["events"]]
    disordered = int(keys != sorted(keys, reverse=True))
    return RoomCount(ClientKind.HISTORY, len(wanted), len(wanted & {*got}), missed, doubled, disordered)


def _compared(wanted: set[int], got: Sequence[int]) -> tuple[int, int]:
    """How many are missed, and how many came twice or were not to come."""
    counted = Counter(got)
    return len(wanted - counted.keys()), sum(count - (id in wanted) for id, count in counted.items())
