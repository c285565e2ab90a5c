"""The rooms workload. Its verification compares the answers of clients with the tables, and the tables with the
definitions of a room.

The verification uses no positions but those in the answers.
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
from tidemark.app.simulation.script import ALL, SOURCE_FAULTS, SimulatedStream, Successor
from tidemark.app.simulation.workload import ProcessRole, ReadCount, SimulationDatabases, Verification, Workload
from tidemark.common.errors import TidemarkError, Unavailable
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import session_of
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.reading import TimelineRow, VectorPosition, current_state, incarnation
from tidemark.sources.rooms.rules import MAX_CHAIN_LENGTH, MEMBER, EventKind, StateEntry, RoomEvent, State, Stay


@dataclass(frozen=True, slots=True)
class RoomCount(ReadCount):
    """Counts of one kind of client.

    Attributes:
        stale: number of cached values that were served after their invalidation.
        different: number of states and rooms that differ from the definitions.
    """

    stale: int = 0
    different: int = 0

    @property
    def is_right(self) -> bool:
        return not any(self.figures[2:])

    def __str__(self) -> str:
        names = ("missed", "duplicated", "out of order", "stale", "different")
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
    """By cache and room, the invalidations in ascending order, each with its version."""
    rooms_of: Mapping[str | None, Sequence[TimelineRow]]
    """By member (None: all members), invalidations of the member's list of rooms. The version of a value is the number
    of invalidations that it includes."""

    def min_version(self, cache: str, key: str, upto: VectorPosition) -> int:
        """The lowest correct version of a value that was read from the cache at position `upto`."""
        if cache == tables.JOINED_ROOMS_CACHE:
            return sum(upto.covers(row) for member in (key, None) for row in self.rooms_of.get(member, ()))
        reported = reversed(self.stale_from.get((cache, key), ()))
        return next((version for row, version in reported if upto.covers(row)), 0)

    def expected(self, member: str) -> set[int]:
        """The IDs of the events that a member must receive, without the events that end its memberships."""
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
        """The IDs of the events that ended memberships of a member."""
        return {
            stay.left_by for (name, _), stays in self.stays.items() if name == member for stay in stays if stay.left_by
        }


def compare_synced(answers: Iterable[Sequence[Any]], stored: StoredRooms) -> Iterable[RoomCount]:
    """Compare the answers of syncing clients with the tables.

    Args:
        answers: rows of (client, member, since, upto, answer), in the order of the answers.
        stored: the content of the services' database.
    """
    rows: dict[tuple[str, str], list[Sequence[Any]]] = defaultdict(list)
    for client, about, *answer in answers:
        rows[client, about].append(answer)
    counts: dict[str, RoomCount] = {}
    for (client, member), synced in rows.items():
        count = _compare_member(client, member, synced, stored)
        counts[client] = counts.get(client, RoomCount(client)) + count
    return counts.values()


def _compare_member(client: str, member: str, answers: Sequence[Sequence[Any]], stored: StoredRooms) -> RoomCount:
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
    until, ends = msgspec.convert(answers[-1][1], VectorPosition), stored.ends(member)
    expected = stored.expected(member)
    passed = {id for id in expected if until.covers(stored.timeline[id])} | {id for id in ends if id <= until.linear}
    missed, duplicated = _missed_and_duplicated(passed, got)
    return RoomCount(client, len(expected | ends), len(passed & {*got}), missed, duplicated, disordered)


def compare_answer(client: str, about: str, upto: VectorPosition, answer: Mapping[str, Any], stored: StoredRooms) -> RoomCount:
    match client:
        case ClientKind.HISTORY:
            return _compare_pages(about, upto, answer, stored)
        case ClientKind.CACHES:
            served = answer["served"]
            stale = sum(version < stored.min_version(cache, key, upto) for cache, key, version in served)
            return RoomCount(client, len(served), len(served), stale=stale)
        case _:
            return RoomCount(client, 1, int(answer["found"]), missed=int(not answer["found"]))


def _compare_pages(room: str, upto: VectorPosition, answer: Mapping[str, Any], stored: StoredRooms) -> RoomCount:
    """Compare a paged history: it must have all live events up to the position, and all history that existed when the
    client began. It may have history that arrived meanwhile."""
    got = [id for _, id in answer["events"]]
    of_room = {id: row for id, row in stored.timeline.items() if row.room == room and id not in stored.recipients}
    expected = {id for id, row in of_room.items() if (upto.covers(row) if id > 0 else id >= answer["history"])}
    extra = {id for id in got if id < 0 and id in of_room}
    missed, duplicated = _missed_and_duplicated(expected, [id for id in got if id in expected or id not in extra])
    duplicated += len(got) - len({*got}) if not duplicated else 0
    keys = [(depth, id) for depth, id in answer["events"]]
    disordered = int(keys != sorted(keys, reverse=True))
    return RoomCount(ClientKind.HISTORY, len(expected), len(expected & {*got}), missed, duplicated, disordered)


def _missed_and_duplicated(expected: set[int], got: Sequence[int]) -> tuple[int, int]:
    """The number of missed events, and of events that were received twice or by mistake."""
    counted = Counter(got)
    return len(expected - counted.keys()), sum(count - (id in expected) for id, count in counted.items())


APPLICATION = "tidemark simulate --verify"
REORDERED_ANSWERS = 1000
"""Answers may be committed in another order than that of their numbers; an answer with this many later ones is
committed."""


class RoomsDiffer(TidemarkError):
    """A client got a wrong answer, or the tables differ from the definitions."""

    def __init__(self, counts: Sequence[ReadCount], awaited: Collection[tuple[str, str]] = ()) -> None:
        wrong = [str(room_count) for room_count in counts if not room_count.is_complete]
        wrong += [
            f"{kind}: never answered" for kind in ClientKind if kind not in {room_count.reader for room_count in counts}
        ]
        wrong += [f"{kind} of {member}: no answer from the newest database" for kind, member in sorted(awaited)]
        super().__init__(f"answers or tables of the rooms differ from what was written: {'; '.join(wrong)}")
        self.counts = counts


class RoomsVerification(Verification):
    """Compares answers with the tables of the database incarnation that gave them, while that incarnation exists. The
    counts of earlier incarnations are kept.
    """

    columns = ("STALE", "DIFFERENT")
    seconds_between = 0.5

    def __init__(
        self, facts: str, effects: str, heads: Callable[[], Mapping[str, int]], *, is_kept: bool = True
    ) -> None:
        """
        Args:
            facts: DSN of the services' database.
            effects: DSN of the readers' database.
            heads: returns by stream the highest ID that Tidemark knows.
            is_kept: whether answers are stored for the verification.
        """
        self._is_kept = is_kept
        self._heads = heads
        self._names = [str(conninfo_to_dict(dsn)["dbname"]) for dsn in (facts, effects)]
        self._facts = session_of(facts, APPLICATION)
        self._effects = session_of(effects, APPLICATION)
        self._lock = Lock()
        self._compared: set[int] = set()
        """Numbers of the answers that were compared."""
        self._counts: dict[int, dict[str, RoomCount]] = defaultdict(dict)
        """By incarnation and client, the counts of answers other than syncs. Only the last incarnation still
        exists."""
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
        """Begin another incarnation on the new server if it may lack events that clients have received.

        Args:
            server: DSN of the new server of the services. No other process uses it yet.
            how: how the new server came to be.
        """
        if how is Successor.IN_STEP:
            return
        with _connected(server, self._names[0]) as connection:
            connection.execute("select rooms.begin_anew(%s)", [msgspec.json.encode(self._heads()).decode()])

    def readers_go_back(self, server: str) -> None:
        """Forget the comparisons of answers that the new server of the readers' database does not have.

        Args:
            server: DSN of the new server. No other process uses it yet.
        """
        with _connected(server, self._names[1]) as connection:
            ((newest,),) = connection.execute("select coalesce(max(number), 0) from play.answers").fetchall()
        self._compared = {number for number in self._compared if number <= newest}

    def has_begun(self) -> bool:
        """Whether each kind of client has answers. If answers are not stored, only syncing clients count."""
        expected = {*ClientKind} if self._is_kept else {*CLIENTS_BY_PROCESS["rooms-sync"]}
        with suppress(Unavailable), self._effects.use() as connection:
            rows = connection.execute("select distinct client from play.answers").fetchall()
            return {*rows} >= {(kind,) for kind in expected}
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
        """The counts of each client since the readers' database was created; empty if answers are not stored."""
        if not self._is_kept:
            return []
        with self._lock:
            now = self._compare()
            totals: dict[str, RoomCount] = {}
            for began, synced in self._synced.items():
                for count in [*synced, *self._counts[began].values()]:
                    # Open requests of another incarnation no longer exist.
                    reported = count if began == now else replace(count, written=count.read)
                    totals[count.reader] = totals.get(count.reader, RoomCount(count.reader)) + reported
        return [*totals.values()]

    @property
    def awaited(self) -> set[tuple[str, str]]:
        """The (client, member) pairs of syncing clients that have no answer of the newest incarnation yet."""
        return {
            (kind.value, member) for kind in (ClientKind.LINE, ClientKind.VECTOR) for member in SYNCING
        } - self._answered

    def _compare(self) -> int:
        """Compare the answers of the newest incarnation. Returns its number."""
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
                [now, max(self._compared, default=0) - REORDERED_ANSWERS],
            ).fetchall()
        with self._facts.use() as connection:  # read after the answers, so that it contains all of their events
            stored = _stored_rooms(connection)
            self._synced[now] = [*compare_synced(answers, stored)]
            self._answered = {(client, member) for client, member, *_ in answers}
            differences = self._counts[now]
            truths: dict[str, Truth] = {}
            for number, client, about, upto, answer in (
                answered for answered in others if answered[0] not in self._compared
            ):
                count = compare_answer(client, about, msgspec.convert(upto, VectorPosition), answer, stored)
                if client == ClientKind.HISTORY:
                    if about not in truths:
                        truths[about] = Truth(*_everything(connection, about))
                    state = {(kind, key): StateEntry(depth, id) for kind, key, depth, id in answer["state"]}
                    count += _compare_opened(truths[about], about, msgspec.convert(upto, VectorPosition), state, stored)
                differences[client] = differences.get(client, RoomCount(client)) + count
                self._compared.add(number)
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
def _connected(server: str, name: str) -> Iterator[Connection]:
    """Connect to the database `name` on a server."""
    with closing(session_of(make_conninfo(server, dbname=name), APPLICATION)) as session, session.use() as connection:
        yield connection


def _stored_rooms(connection: Connection) -> StoredRooms:
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
        if cache == tables.JOINED_ROOMS_CACHE:
            rooms_of[None if keys is None else keys[0]].append(reported)
            continue
        for name in (tables.STATE_CACHE, tables.MEMBERS_CACHE) if cache == tables.ROOM_CACHES else (cache,):
            stale[name, keys[0]].append((reported, version))
    return StoredRooms(timeline, turns, recipients, stays, stale, rooms_of)


def _compare_opened(truth: Truth, room: str, upto: VectorPosition, state: State, stored: StoredRooms) -> RoomCount:
    """Compare the state that a first sync returned. For each key it must lie between the state of the live events up to
    the position and the state of these events with all history."""
    placed = {id: row for id, row in stored.timeline.items() if row.room == room and id not in stored.recipients}
    live = {row.event for id, row in placed.items() if id > 0 and upto.covers(row)}
    history = {row.event for id, row in placed.items() if id < 0}
    lower, upper = (truth.part(part).current for part in (live, live | history))
    within = state.keys() <= upper.keys() and all(
        lower.get(key, entry) <= entry <= upper[key] for key, entry in state.items()
    )
    return RoomCount(ClientKind.HISTORY, different=int(not within or not lower.keys() <= state.keys()))


def _everything(connection: Connection, room: str) -> tuple[Collection[RoomEvent], dict[str, EventKind]]:
    """All events of a room on all servers with their true kinds, and by ID the kind as which the services store
    each."""
    rows = connection.execute("select event from rooms.events where room = %s", [room]).fetchall()
    stored = {id: event for id, (event, _) in tables.load_events(connection, [id for (id,) in rows]).items()}
    remote = connection.execute("select body from play.remote where room = %s", [room]).fetchall()
    others = {event.id: event for event in (msgspec.convert(body, RoomEvent) for (body,) in remote)}
    return {**stored, **others}.values(), {id: event.held_as for id, event in stored.items()}


def _is_right(connection: Connection, room: str) -> bool:
    everything, stored = _everything(connection, room)
    truth = Truth(everything, stored)
    groups = {id: group for id, (_, group) in tables.load_events(connection, [*stored]).items() if group is not None}
    states = {group: tables.load_state(connection, group) for group in {*groups.values()}}
    rows = connection.execute(
        "select event, turn, recipient from rooms.timeline where room = %s order by turn", [room]
    ).fetchall()
    placed = [(event, turn) for event, turn, recipient in rows if recipient is None]
    reported = Counter(event for event, _ in placed)
    sent = {event for event, _, recipient in rows if recipient is not None}
    members = connection.execute("select member, event from rooms.memberships where room = %s", [room]).fetchall()
    current = current_state(connection, room)[1]
    chains = tables.PostgresStateGroups(connection, room)
    return (
        {*tables.forward_extremities(connection, room)} == truth.forward
        and {*tables.backward_extremities(connection, room)} == truth.backward
        and groups.keys() == truth.placed
        and all(states[group] == truth.state_at(id) for id, group in groups.items())
        and current == truth.current
        and dict(members) == {key: entry.id for (kind, key), entry in current.items() if kind == MEMBER}
        and reported == Counter(truth.placed)
        and sent >= {id for id, as_ in stored.items() if as_ is EventKind.OUT_OF_BAND}
        and _stays(connection, room) == {*truth.stays(placed)}
        and all(len(chains.chain(group)) <= MAX_CHAIN_LENGTH for group in states)
    )


def _stays(connection: Connection, room: str) -> set[tuple[Any, ...]]:
    """The memberships in the tables, as `Truth.stays` gives them."""
    rows = connection.execute(
        "select stays.member, began, ended, ended_by.event from rooms.stays left join rooms.timeline as ended_by"
        " on stream_ordering = left_by and recipient = stays.member where stays.room = %s",
        [room],
    )
    return {*rows.fetchall()}


CLIENTS_BY_PROCESS = {
    "rooms-sync": (ClientKind.LINE, ClientKind.VECTOR),
    "rooms-others": (ClientKind.HISTORY, ClientKind.CACHES, ClientKind.OWN),
}


class RoomsWorkload(Workload):
    """A chat server of several processes, and its clients.

    One process writes with `tidemark.append`, as the database's writer; the others write with `tidemark.Writer`. Each
    process also backfills history.
    """

    readers = (*CLIENTS_BY_PROCESS,)
    writing_readers = ("rooms-others",)
    faults = ALL - SOURCE_FAULTS

    @property
    def database_suffix(self) -> str:
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
        kinds = [kind for kind in CLIENTS_BY_PROCESS[name] if not (self.services_ended and kind is ClientKind.OWN)]
        role = RoomClientRole(kinds, room_streams(prefix), f"{prefix}client", seed, kept=self.verify)
        return ProcessRole(databases.facts, databases.effects, room_client=role)

    def verification(self, databases: SimulationDatabases, tidemark: str) -> RoomsVerification:
        heads = partial(_heads, tidemark, self.streams)
        return RoomsVerification(databases.facts, databases.effects, heads, is_kept=self.verify)


def _heads(dsn: str, streams: Sequence[SimulatedStream]) -> dict[str, int]:
    """By stream, the highest ID that Tidemark knows, or 0. `dsn` is that of Tidemark's Postgres."""
    with closing(session_of(dsn, simulation_tables.APPLICATION)) as session, session.use() as connection:
        known = dict(connection.execute("select stream, head from tidemark.streams").fetchall())
    return {stream.name: known.get(stream.name, 0) for stream in streams}
