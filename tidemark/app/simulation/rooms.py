"""The workload of rooms. Its verification compares the answers of clients with the tables, and the tables with the
definitions of a room.

The only positions that it uses are those in the answers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

import msgspec
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tidemark.app.simulation import tables as simulation_tables
from tidemark.app.simulation.room_services import (
    ANSWERS,
    REMOTE,
    SYNCING,
    ClientKind,
    RoomClientRole,
    RoomServiceRole,
    room_streams,
    simulated_streams,
)
from tidemark.app.simulation.room_truth import Truth
from tidemark.app.simulation.script import ALL, OF_SOURCES, SimulatedStream, Successor
from tidemark.app.simulation.workload import ProcessRole, ReadCount, SimulationDatabases, Verification, Workload
from tidemark.common.errors import TidemarkError, Unavailable
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import session_of
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.reading import TimelineRow, Upto, current_state, incarnation
from tidemark.sources.rooms.rules import LONGEST_CHAIN, MEMBER, HeldAs, KeyHolder, RoomEvent, State, Stay


@dataclass(frozen=True, slots=True)
class RoomCount(ReadCount):
    """Counts of one kind of client. `stale`: cached values that were served after their invalidation. `different`:
    states and rooms that differ from the definitions.
    """

    stale: int = 0
    different: int = 0

    @property
    def is_right(self) -> bool:
        return not any(self.figures[2:])

    def __str__(self) -> str:
        names = ("missed", "doubled", "out of order", "stale", "different")
        faults = [f"{count} {name}" for name, count in zip(names, self.figures[2:], strict=True) if count]
        return ", ".join([f"{self.reader}: {self.read} of {self.written}", *faults])


@dataclass
class StoredRooms:
    """The content of the services' database."""

    timeline: dict[int, TimelineRow]
    turns: Mapping[int, int]
    recipients: Mapping[int, str]
    stays: Mapping[tuple[str, str], Sequence[Stay]]
    """By member and room."""
    stale_from: Mapping[tuple[str, str], Sequence[tuple[TimelineRow, int]]]
    """By cache and room: invalidations, each with its version, ascending."""
    rooms_of: Mapping[str | None, Sequence[TimelineRow]]
    """By member (None: all members): invalidations of their rooms. The version of a value is the number of
    invalidations that it includes."""

    def least(self, cache: str, key: str, upto: Upto) -> int:
        """The version that a cached value must have reached."""
        if cache == tables.ROOMS_OF:
            return sum(upto.passed(row) for member in (key, None) for row in self.rooms_of.get(member, ()))
        reported = reversed(self.stale_from.get((cache, key), ()))
        return next((version for row, version in reported if upto.passed(row)), 0)

    def wanted(self, member: str) -> set[int]:
        """The events that a member must receive, without the ends of its memberships."""
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
        """The stay in which a member receives an event."""
        stays = self.stays.get((member, self.timeline[id].room), ())
        return next((stay for stay in stays if stay.covers(self.turns[id])), None)

    def ends(self, member: str) -> set[int]:
        return {
            stay.left_by for (name, _), stays in self.stays.items() if name == member for stay in stays if stay.left_by
        }


def compare_synced(answers: Iterable[Sequence[Any]], stored: StoredRooms) -> Iterable[RoomCount]:
    """The rows of the answers of syncing clients: client, member, since, upto, answer."""
    rows: dict[tuple[str, str], list[Sequence[Any]]] = defaultdict(list)
    for client, about, *answer in answers:
        rows[client, about].append(answer)
    counts: dict[str, RoomCount] = {}
    for (client, member), synced in rows.items():
        count = _of_member(client, member, synced, stored)
        counts[client] = counts.get(client, RoomCount(client)) + count
    return counts.values()


def _of_member(client: str, member: str, answers: Sequence[Sequence[Any]], stored: StoredRooms) -> RoomCount:
    disordered = 0
    got: list[int] = []
    over: set[int] = set()
    for (_, before, _), (since, _, answer) in pairwise([(None, answers[0][0], None), *answers]):
        reported = [answer[kind] for kind in ("events", "sent", "left")]
        disordered += since != before or reported != [sorted(ids) for ids in reported]
        stays = (stored.stay(member, id) for id in answer["events"] if id in stored.timeline)
        disordered += sum(stay is not None and stay.left_by in over for stay in stays)
        over.update(answer["left"])
        got += [id for ids in reported for id in ids]
    until, ends = msgspec.convert(answers[-1][1], Upto), stored.ends(member)
    wanted = stored.wanted(member)
    passed = {id for id in wanted if until.passed(stored.timeline[id])} | {id for id in ends if id <= until.linear}
    missed, doubled = _compared(passed, got)
    return RoomCount(client, len(wanted | ends), len(passed & {*got}), missed, doubled, disordered)


def compare_answer(client: str, about: str, upto: Upto, answer: Mapping[str, Any], stored: StoredRooms) -> RoomCount:
    match client:
        case ClientKind.HISTORY:
            return _paged(about, upto, answer, stored)
        case ClientKind.CACHES:
            served = answer["served"]
            stale = sum(version < stored.least(cache, key, upto) for cache, key, version in served)
            return RoomCount(client, len(served), len(served), stale=stale)
        case _:
            return RoomCount(client, 1, int(answer["found"]), missed=int(not answer["found"]))


def _paged(room: str, upto: Upto, answer: Mapping[str, Any], stored: StoredRooms) -> RoomCount:
    """All live events up to the position, and all history of that time. Some history may have arrived meanwhile."""
    got = [id for _, id in answer["events"]]
    of_room = {id: row for id, row in stored.timeline.items() if row.room == room and id not in stored.recipients}
    wanted = {id for id, row in of_room.items() if (upto.passed(row) if id > 0 else id >= answer["history"])}
    extra = {id for id in got if id < 0 and id in of_room}
    missed, doubled = _compared(wanted, [id for id in got if id in wanted or id not in extra])
    doubled += len(got) - len({*got}) if not doubled else 0
    keys = [(depth, id) for depth, id in answer["events"]]
    disordered = int(keys != sorted(keys, reverse=True))
    return RoomCount(ClientKind.HISTORY, len(wanted), len(wanted & {*got}), missed, doubled, disordered)


def _compared(wanted: set[int], got: Sequence[int]) -> tuple[int, int]:
    """The number of missed events, and of events that came twice or wrongly."""
    counted = Counter(got)
    return len(wanted - counted.keys()), sum(count - (id in wanted) for id, count in counted.items())


APPLICATION = "tidemark simulate --verify"
BEHIND = 1000
"""The number of answers by which an answer may be committed too late."""


class RoomsDiffer(TidemarkError):
    """A client got a wrong answer, or the tables differ from the definitions."""

    def __init__(self, counts: Sequence[ReadCount], awaited: Collection[tuple[str, str]] = ()) -> None:
        wrong = [str(room_count) for room_count in counts if not room_count.is_complete]
        wrong += [
            f"{kind}: never answered" for kind in ClientKind if kind not in {room_count.reader for room_count in counts}
        ]
        wrong += [f"{kind} of {member}: not answered in the end" for kind, member in sorted(awaited)]
        super().__init__(f"rooms are not what was written: {'; '.join(wrong)}")
        self.counts = counts


class RoomsVerification(Verification):
    """Answers are compared with the tables of the incarnation that gave them, while it exists. Counts of earlier
    comparisons stay.
    """

    columns = ("STALE", "DIFFERENT")
    seconds_between = 0.5

    def __init__(
        self, facts: str, effects: str, heads: Callable[[], Mapping[str, int]], *, is_kept: bool = True
    ) -> None:
        """`heads`: returns by stream the highest ID that Tidemark knows. `is_kept`: whether answers are stored for
        verification."""
        self._is_kept = is_kept
        self._heads = heads
        self._names = [str(conninfo_to_dict(dsn)["dbname"]) for dsn in (facts, effects)]
        self._facts = session_of(facts, APPLICATION)
        self._effects = session_of(effects, APPLICATION)
        self._lock = Lock()
        self._judged: set[int] = set()
        """Numbers of answers; the newest ones may be committed in another order than that of their numbers."""
        self._found: dict[int, dict[str, RoomCount]] = defaultdict(dict)
        """By incarnation. Only the last one still exists."""
        self._synced: dict[int, Sequence[RoomCount]] = {}
        self._answered: set[tuple[str, str]] = set()

    def __exit__(self, *error: object) -> None:
        self._facts.close()
        self._effects.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compare once more, if possible, and then pause comparisons while the block runs."""
        with self._lock:
            with suppress(Unavailable):
                self._compare()
            yield

    def services_go_back(self, server: str, how: Successor) -> None:
        """`server` is the DSN of the next server of the services, which no other process uses yet. If it may lack
        events that clients have received, it counts as another incarnation."""
        if how is Successor.IN_STEP:
            return
        with _reached(server, self._names[0]) as connection:
            connection.execute("select rooms.begin_anew(%s)", [msgspec.json.encode(self._heads()).decode()])

    def readers_go_back(self, server: str) -> None:
        """The same for the readers' database. Its answers get numbers above those that it has."""
        with _reached(server, self._names[1]) as connection:
            ((newest,),) = connection.execute("select coalesce(max(number), 0) from play.answers").fetchall()
        self._judged = {number for number in self._judged if number <= newest}

    def has_begun(self) -> bool:
        """Whether each kind of client has answers. If answers are not stored, only syncing clients count."""
        wanted = {*ClientKind} if self._is_kept else {*CLIENTS["rooms-sync"]}
        with suppress(Unavailable), self._effects.use() as connection:
            rows = connection.execute("select distinct client from play.answers").fetchall()
            return {*rows} >= {(kind,) for kind in wanted}
        return False

    def final_counts(self) -> list[RoomCount]:
        return [*self.counts(), self.rooms()]

    def is_complete(self, counts: Sequence[ReadCount]) -> bool:
        """Whether each kind of client got answers, all of them correct."""
        kinds = {count.reader for count in counts}
        return kinds >= {*ClientKind} and all(count.is_complete for count in counts) and not self.awaited

    def difference(self, counts: Sequence[ReadCount]) -> TidemarkError:
        return RoomsDiffer(counts, self.awaited)

    def counts(self) -> list[RoomCount]:
        """The counts of each client since the readers' database was created; nothing if answers are not stored."""
        if not self._is_kept:
            return []
        with self._lock:
            now = self._compare()
            totals: dict[str, RoomCount] = {}
            for began, synced in self._synced.items():
                for count in [*synced, *self._found[began].values()]:
                    # Open requests of another incarnation no longer exist.
                    reported = count if began == now else replace(count, written=count.read)
                    totals[count.reader] = totals.get(count.reader, RoomCount(count.reader)) + reported
        return [*totals.values()]

    @property
    def awaited(self) -> set[tuple[str, str]]:
        """The syncing clients, each with its member, that have no answer of the present incarnation yet."""
        return {
            (kind.value, member) for kind in (ClientKind.LINE, ClientKind.VECTOR) for member in SYNCING
        } - self._answered

    def _compare(self) -> int:
        """Compare the answers of the present incarnation. Returns its number."""
        with self._facts.use() as connection:
            now = incarnation(connection)
        with self._effects.use() as connection:
            answers = connection.execute(
                "select client, about, since, upto, answer from play.answers"
                " where kind = 'sync' and incarnation = %s order by number",
                [now],
            ).fetchall()
            others = connection.execute(
                "select number, client, about, upto, answer from play.answers"
                " where kind <> 'sync' and incarnation = %s and number > %s order by number",
                [now, max(self._judged, default=0) - BEHIND],
            ).fetchall()
        with self._facts.use() as connection:  # read after the answers, so that it contains all of their events
            stored = _tables(connection)
            self._synced[now] = [*compare_synced(answers, stored)]
            self._answered = {(client, member) for client, member, *_ in answers}
            differences = self._found[now]
            truths: dict[str, Truth] = {}
            for number, client, about, upto, answer in (
                answered for answered in others if answered[0] not in self._judged
            ):
                count = compare_answer(client, about, msgspec.convert(upto, Upto), answer, stored)
                if client == ClientKind.HISTORY:
                    if about not in truths:
                        truths[about] = Truth(*_everything(connection, about))
                    state = {(kind, key): KeyHolder(depth, id) for kind, key, depth, id in answer["state"]}
                    count += _opened(truths[about], about, msgspec.convert(upto, Upto), state, stored)
                differences[client] = differences.get(client, RoomCount(client)) + count
                self._judged.add(number)
        return now

    def rooms(self) -> RoomCount:
        """Extremities, states, members and timelines of all rooms, compared with the definitions."""
        with self._lock, self._facts.use() as connection:
            rows = connection.execute("select room from rooms.rooms order by room").fetchall()
            wrong = []
            for (room,) in rows:
                with connection.transaction():
                    connection.execute("set transaction isolation level repeatable read")
                    if not _is_right(connection, room):
                        wrong.append(room)
        return RoomCount("tables", len(rows), len(rows) - len(wrong), different=len(wrong))


@contextmanager
def _reached(server: str, name: str) -> Iterator[Connection]:
    """The database of this name on a server."""
    with closing(session_of(make_conninfo(server, dbname=name), APPLICATION)) as session, session.use() as connection:
        yield connection


def _tables(connection: Connection) -> StoredRooms:
    timeline, turns, recipients = {}, {}, {}
    for *row, turn, recipient in connection.execute(
        "select stream_ordering, event, room, depth, writer, turn, recipient from rooms.timeline"
    ).fetchall():
        timeline[row[0]], turns[row[0]] = TimelineRow(*row), turn
        if recipient is not None:
            recipients[row[0]] = recipient
    stays: dict[tuple[str, str], list[Stay]] = defaultdict(list)
    for member, *stay in connection.execute("select member, room, began, ended, left_by from rooms.stays").fetchall():
        stays[member, stay[0]].append(Stay(*stay))
    stale: dict[tuple[str, str], list[tuple[TimelineRow, int]]] = defaultdict(list)
    rooms_of: dict[str | None, list[TimelineRow]] = defaultdict(list)
    for id, cache, keys, writer, version in connection.execute(
        "select stream_id, cache, keys, writer, version from rooms.invalidations order by stream_id"
    ).fetchall():
        reported = TimelineRow(id, "", "", 0, writer)
        if cache == tables.ROOMS_OF:
            rooms_of[None if keys is None else keys[0]].append(reported)
            continue
        for name in (tables.STATE, tables.MEMBERS) if cache == tables.ALL_OF_ROOM else (cache,):
            stale[name, keys[0]].append((reported, version))
    return StoredRooms(timeline, turns, recipients, stays, stale, rooms_of)


def _opened(truth: Truth, room: str, upto: Upto, state: State, stored: StoredRooms) -> RoomCount:
    """The state that a first sync returns: from the live events up to its position, without history or with all
    history."""
    placed = {id: row for id, row in stored.timeline.items() if row.room == room and id not in stored.recipients}
    live = {row.event for id, row in placed.items() if id > 0 and upto.passed(row)}
    history = {row.event for id, row in placed.items() if id < 0}
    least, most = (truth.part(part).current for part in (live, live | history))
    within = state.keys() <= most.keys() and all(
        least.get(key, entry) <= entry <= most[key] for key, entry in state.items()
    )
    return RoomCount(ClientKind.HISTORY, different=int(not within or not least.keys() <= state.keys()))


def _everything(connection: Connection, room: str) -> tuple[Collection[RoomEvent], dict[str, HeldAs]]:
    """Every event of a room on any server with its true kind, and the kind as which the own server has it."""
    rows = connection.execute("select event from rooms.events where room = %s", [room]).fetchall()
    stored = {id: event for id, (event, _) in tables.events_of(connection, [id for (id,) in rows]).items()}
    remote = connection.execute("select body from play.remote where room = %s", [room]).fetchall()
    others = {event.id: event for event in (msgspec.convert(body, RoomEvent) for (body,) in remote)}
    return {**stored, **others}.values(), {id: event.held_as for id, event in stored.items()}


def _is_right(connection: Connection, room: str) -> bool:
    everything, stored = _everything(connection, room)
    truth = Truth(everything, stored)
    groups = {id: group for id, (_, group) in tables.events_of(connection, [*stored]).items() if group is not None}
    states = {group: tables.state_of(connection, group) for group in {*groups.values()}}
    rows = connection.execute(
        "select event, turn, recipient from rooms.timeline where room = %s order by turn", [room]
    ).fetchall()
    placed = [(event, turn) for event, turn, recipient in rows if recipient is None]
    reported = Counter(event for event, _ in placed)
    sent = {event for event, _, recipient in rows if recipient is not None}
    members = connection.execute("select member, event from rooms.memberships where room = %s", [room]).fetchall()
    current = current_state(connection, room)[1]
    chains = tables.PostgresGroups(connection, room)
    return (
        {*tables.forward_extremities(connection, room)} == truth.forward
        and {*tables.backward_extremities(connection, room)} == truth.backward
        and groups.keys() == truth.placed
        and all(states[group] == truth.state_at(id) for id, group in groups.items())
        and current == truth.current
        and dict(members) == {key: entry.id for (kind, key), entry in current.items() if kind == MEMBER}
        and reported == Counter(truth.placed)
        and sent >= {id for id, as_ in stored.items() if as_ is HeldAs.OUT_OF_BAND}
        and _stays(connection, room) == {*truth.stays(placed)}
        and all(len(chains.chain(group)) <= LONGEST_CHAIN for group in states)
    )


def _stays(connection: Connection, room: str) -> set[tuple[Any, ...]]:
    """By member: the turns of the first and the last event, and the event that ended the membership."""
    rows = connection.execute(
        "select stays.member, began, ended, told.event from rooms.stays left join rooms.timeline as told"
        " on stream_ordering = left_by and recipient = stays.member where stays.room = %s",
        [room],
    )
    return {*rows.fetchall()}


CLIENTS = {
    "rooms-sync": (ClientKind.LINE, ClientKind.VECTOR),
    "rooms-others": (ClientKind.HISTORY, ClientKind.CACHES, ClientKind.OWN),
}
"""Clients by process."""


class RoomsWorkload(Workload):
    """A chat server of several processes, and its clients.

    One of the processes writes as the database itself, with `tidemark.append`, the others with `tidemark.Writer`; each
    also fetches history. The answers of clients are compared with the tables, and the tables with the definitions.
    """

    readers = (*CLIENTS,)
    writing_readers = ("rooms-others",)
    faults = ALL - OF_SOURCES

    @property
    def database(self) -> str:
        return "_".join(filter(None, ["rooms", self.plan.writer_plan.prefix.strip("_")]))

    @property
    def streams(self) -> Sequence[SimulatedStream]:
        return simulated_streams(room_streams(self.plan.writer_plan.prefix))

    def make_tables(self, facts: str, effects: str) -> None:
        simulation_tables.make_streams(facts, self.streams)
        with session_of(facts, simulation_tables.APPLICATION) as session:
            tables.SCHEMA.migrate(session)
        simulation_tables.make_tables(facts, REMOTE)
        simulation_tables.make_tables(effects, ANSWERS)

    def service(self, databases: SimulationDatabases, name: str, incarnation: int) -> ProcessRole:
        writer_plan, seed = self.plan.writer_plan, f"{self.plan.seed} {name} {incarnation}"
        writer = None if name == writer_plan.writer_name(1) else name
        streams = room_streams(writer_plan.prefix)
        role = RoomServiceRole(writer, streams, self.plan.faults, writer_plan.rate / writer_plan.writers, seed)
        return ProcessRole(databases.facts, databases.effects, room_service=role)

    def reader(self, databases: SimulationDatabases, name: str, incarnation: int) -> ProcessRole:
        prefix, seed = self.plan.writer_plan.prefix, f"{self.plan.seed} {name} {incarnation}"
        kinds = [kind for kind in CLIENTS[name] if not (self.services_ended and kind is ClientKind.OWN)]
        role = RoomClientRole(kinds, room_streams(prefix), f"{prefix}client", seed, kept=self.verify)
        return ProcessRole(databases.facts, databases.effects, room_client=role)

    def verification(self, databases: SimulationDatabases, tidemark: str) -> RoomsVerification:
        heads = partial(_heads, tidemark, self.streams)
        return RoomsVerification(databases.facts, databases.effects, heads, is_kept=self.verify)


def _heads(dsn: str, streams: Sequence[SimulatedStream]) -> dict[str, int]:
    """By stream, the highest ID that Tidemark knows. `dsn`: Tidemark's Postgres."""
    with closing(session_of(dsn, simulation_tables.APPLICATION)) as session, session.use() as connection:
        known = dict(connection.execute("select stream, head from tidemark.streams").fetchall())
    return {stream.name: known.get(stream.name, 0) for stream in streams}
