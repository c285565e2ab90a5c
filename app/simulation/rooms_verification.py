"""Holds what clients of rooms were answered against the tables, and the tables against the definitions of a room.

It knows nothing of positions but what each answer says of them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import msgspec

from tidemark.app.simulation.rooms_reading import ClientKind
from tidemark.sources.relay.database import session_of
from tidemark.sources.rooms import caches, tables
from tidemark.sources.rooms.model import Truth
from tidemark.sources.rooms.reading import TimelineRow, Upto, current_state
from tidemark.sources.rooms.rules import MEMBER, HeldAs, RoomEvent
from tidemark.sources.rooms.states import LONGEST_CHAIN, KeyHolder, State
from tidemark.sources.simulator.rooms import GUEST, MEMBERS
from tidemark.streaming.errors import TidemarkError
from tidemark.streaming.postgres_session import Connection

APPLICATION = "tidemark simulate --verify"
OPENED = 3
"""First syncs of a look whose state is held against the definitions, which takes its time."""
BEHIND = 1000
"""Answers by which one may be committed too late."""


class RoomsDiffer(TidemarkError):
    """A client was answered wrongly, or the tables are not what the definitions say."""

    def __init__(self, counts: Sequence["RoomCount"]) -> None:
        wrong = [str(it) for it in counts if not it.complete]
        wrong += [f"{kind}: never answered" for kind in ClientKind if kind not in {it.client for it in counts}]
        super().__init__(f"rooms are not what was written: {'; '.join(wrong)}")
        self.counts = counts


@dataclass(frozen=True, slots=True)
class RoomCount:
    """How one kind of client does. What is `written` and not `read` is yet to come; `missed` was passed.

    Of caches, `stale` values were served behind their invalidation; of states and rooms, `different` ones are not as
    the definitions say.
    """

    client: str
    written: int = 0
    read: int = 0
    missed: int = 0
    doubled: int = 0
    disordered: int = 0
    stale: int = 0
    different: int = 0

    @property
    def right(self) -> bool:
        return not (self.missed or self.doubled or self.disordered or self.stale or self.different)

    @property
    def complete(self) -> bool:
        return self.right and self.read == self.written

    @property
    def figures(self) -> tuple[int, ...]:
        faults = self.missed, self.doubled, self.disordered, self.stale, self.different
        return (self.written, self.read, *faults)

    def __add__(self, other: "RoomCount") -> "RoomCount":
        return RoomCount(self.client, *(a + b for a, b in zip(self.figures, other.figures, strict=True)))

    def __str__(self) -> str:
        names = ("missed", "doubled", "out of order", "stale", "different")
        faults = [f"{count} {name}" for name, count in zip(names, self.figures[2:], strict=True) if count]
        return ", ".join([f"{self.client}: {self.read} of {self.written}", *faults])


@dataclass
class _Tables:
    """What the services' database holds."""

    timeline: dict[int, TimelineRow]
    recipients: dict[int, str]
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


class RoomsVerification:
    """A context manager, for one thread. Methods raise `Unavailable` where a database does not answer."""

    def __init__(self, facts: str, effects: str) -> None:
        self._facts = session_of(facts, APPLICATION)
        self._effects = session_of(effects, APPLICATION)
        self._judged: set[int] = set()
        """Numbers of answers; the newest ones may be committed in another order than that of their numbers."""
        self._found: dict[str, RoomCount] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._facts.close()
        self._effects.close()

    def counts(self) -> list[RoomCount]:
        """How each client does, since the readers' database was made."""
        with self._effects.use() as connection:
            answers = connection.execute(
                "select client, about, since, upto, answer from play.answers where kind = 'sync' order by number"
            ).fetchall()
            others = connection.execute(
                "select number, client, about, upto, answer from play.answers"
                " where kind <> 'sync' and number > %s order by number",
                [max(self._judged, default=0) - BEHIND],
            ).fetchall()
        with self._facts.use() as connection:  # later than the answers: it holds whatever they were made of
            held = _tables(connection)
            synced = [*_synced(answers, held)]
            opened = OPENED
            for number, client, about, upto, answer in (it for it in others if it[0] not in self._judged):
                count = _judged(client, about, msgspec.convert(upto, Upto), answer, held)
                if client == ClientKind.HISTORY and opened:
                    opened -= 1
                    state = {(kind, key): KeyHolder(depth, id) for kind, key, depth, id in answer["state"]}
                    count += _opened(connection, about, msgspec.convert(upto, Upto), state, held)
                self._found[client] = self._found.get(client, RoomCount(client)) + count
                self._judged.add(number)
        return [*synced, *self._found.values()]

    def rooms(self) -> RoomCount:
        """Extremities, states, members and timelines of all rooms, held against the definitions."""
        with self._facts.use() as connection:
            rows = connection.execute("select room from rooms.rooms order by room").fetchall()
            wrong = []
            for (room,) in rows:
                with connection.transaction():
                    connection.execute("set transaction isolation level repeatable read")
                    if not _is_right(connection, room):
                        wrong.append(room)
        return RoomCount("tables", len(rows), len(rows) - len(wrong), different=len(wrong))


def _tables(connection: Connection) -> _Tables:
    timeline, recipients = {}, {}
    for *row, recipient in connection.execute(
        "select stream_ordering, event, room, depth, writer, recipient from rooms.timeline"
    ).fetchall():
        timeline[row[0]] = TimelineRow(*row)
        if recipient is not None:
            recipients[row[0]] = recipient
    stale: dict[tuple[str, str], list[tuple[TimelineRow, int]]] = defaultdict(list)
    rooms_of: dict[str | None, list[TimelineRow]] = defaultdict(list)
    for id, cache, keys, writer, version in connection.execute(
        "select stream_id, cache, keys, writer, version from rooms.invalidations order by stream_id"
    ).fetchall():
        told = TimelineRow(id, "", "", 0, writer)
        if cache == caches.ROOMS_OF:
            rooms_of[None if keys is None else keys[0]].append(told)
            continue
        for name in (caches.STATE, caches.MEMBERS) if cache == caches.ALL_OF_ROOM else (cache,):
            stale[name, keys[0]].append((told, version))
    return _Tables(timeline, recipients, stale, rooms_of)


def _synced(answers: Iterable[Sequence[Any]], held: _Tables) -> Iterable[RoomCount]:
    """The answers of each syncing client in a row."""
    rows: dict[tuple[str, str], list[Sequence[Any]]] = defaultdict(list)
    for client, about, *answer in answers:
        rows[client, about].append(answer)
    found: dict[str, RoomCount] = {}
    for (client, member), of in rows.items():
        until, disordered = msgspec.convert(of[-1][1], Upto), 0
        got: list[int] = []
        for (_, before, _), (since, _, answer) in pairwise([(None, of[0][0], None), *of]):
            told = answer["sent"] if member == GUEST else answer["events"]
            disordered += since != before or told != sorted(told)
            got += [*answer["events"], *answer["sent"]]
        wanted = {
            id
            for id, row in held.timeline.items()
            if id > 0 and (held.recipients.get(id) == member or (member in MEMBERS and id not in held.recipients))
        }
        passed = {id for id in wanted if until.passed(held.timeline[id])}
        missed, doubled = _compared(passed, got)
        count = RoomCount(client, len(wanted), len(passed & {*got}), missed, doubled, disordered)
        found[client] = found.get(client, RoomCount(client)) + count
    return found.values()


def _judged(client: str, about: str, upto: Upto, answer: Mapping[str, Any], held: _Tables) -> RoomCount:
    match client:
        case ClientKind.HISTORY:
            return _paged(about, upto, answer, held)
        case ClientKind.CACHES:
            served = answer["served"]
            stale = sum(version < held.least(cache, key, upto) for cache, key, version in served)
            return RoomCount(client, len(served), len(served), stale=stale)
        case _:
            return RoomCount(client, 1, int(answer["found"]), missed=int(not answer["found"]))


def _paged(room: str, upto: Upto, answer: Mapping[str, Any], held: _Tables) -> RoomCount:
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


def _opened(connection: Connection, room: str, upto: Upto, state: State, held: _Tables) -> RoomCount:
    """The state of a first sync: what the live events up to its position make, with no history or with all of it."""
    everything, held_as = _everything(connection, room)
    placed = {id: row for id, row in held.timeline.items() if row.room == room and id not in held.recipients}
    live = {row.event for id, row in placed.items() if id > 0 and upto.passed(row)}
    history = {row.event for id, row in placed.items() if id < 0}
    least, most = (
        Truth(everything.values(), {id: as_ for id, as_ in held_as.items() if id in those}).current
        for those in (live, live | history)
    )
    within = state.keys() <= most.keys() and all(
        least.get(key, holder) <= holder <= most[key] for key, holder in state.items()
    )
    return RoomCount(ClientKind.HISTORY, different=int(not within or not least.keys() <= state.keys()))


def _everything(connection: Connection, room: str) -> tuple[dict[str, RoomEvent], dict[str, HeldAs]]:
    """Every event of a room that any server has, as what it is; and as what ours holds it."""
    rows = connection.execute("select event from rooms.events where room = %s", [room]).fetchall()
    held = {id: event for id, (event, _) in tables.events_of(connection, [id for (id,) in rows]).items()}
    remote = connection.execute("select body from play.remote where room = %s", [room]).fetchall()
    others = {event.id: event for event in (msgspec.convert(body, RoomEvent) for (body,) in remote)}
    return {**held, **others}, {id: event.held_as for id, event in held.items()}


def _is_right(connection: Connection, room: str) -> bool:
    everything, held = _everything(connection, room)
    truth = Truth(everything.values(), held)
    groups = {id: group for id, (_, group) in tables.events_of(connection, [*held]).items() if group is not None}
    states = {group: tables.state_of(connection, group) for group in {*groups.values()}}
    rows = connection.execute("select event, recipient from rooms.timeline where room = %s", [room]).fetchall()
    told = Counter(event for event, recipient in rows if recipient is None)
    sent = {event for event, recipient in rows if recipient is not None}
    members = connection.execute("select member, event from rooms.memberships where room = %s", [room]).fetchall()
    current = current_state(connection, room)[1]
    chains = tables.PostgresGroups(connection, room)
    return (
        {*tables.forward_extremities(connection, room)} == truth.forward
        and {*tables.backward_extremities(connection, room)} == truth.backward
        and groups.keys() == truth.placed
        and all(states[group] == truth.state_at(id) for id, group in groups.items())
        and current == truth.current
        and dict(members) == {key: holder.id for (kind, key), holder in current.items() if kind == MEMBER}
        and told == Counter(truth.placed)
        and sent >= {id for id, as_ in held.items() if as_ is HeldAs.OUT_OF_BAND}
        and all(len(chains.chain(group)) <= LONGEST_CHAIN for group in states)
    )
