"""The rooms workload. Its verification compares the answers of clients with the tables, and the tables with the
definitions of a room (`expected_room`).

Each answer is compared at the position that is stored with the answer.
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

from tidemark.app.simulation import workload as simulation_tables
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.app.simulation.room_services import (
    ANSWERS_TABLE,
    REMOTE_TABLE,
    SYNCING_MEMBERS,
    ClientKind,
    RoomClientRole,
    RoomServiceRole,
    make_room_streams,
    make_simulated_streams,
)
from tidemark.app.simulation.script import ALL_FAULTS, SOURCE_FAULTS, SimulatedStream, Successor
from tidemark.app.simulation.workload import ProcessRole, ReadCount, SimulationDatabases, Verification, Workload
from tidemark.common.errors import TidemarkError, Unavailable
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import session_of
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.reading import TimelineRow, VectorPosition, load_current_state, load_incarnation
from tidemark.sources.rooms.rules import MAX_CHAIN_LENGTH, MEMBER, EventKind, RoomEvent, State, StateEntry, Stay


@dataclass(frozen=True, slots=True)
class RoomCount(ReadCount):
    """Counts of one kind of client.

    Attributes:
        written: items that the clients should have received: events, cached values or rooms.
        read: items that the clients have received.
        stale: cached values that were served after their invalidation.
        different: states and rooms that differ from the definitions.
    """

    stale: int = 0
    different: int = 0

    @property
    def is_correct(self) -> bool:
        return not any(self.figures[2:])

    def __str__(self) -> str:
        names = ("missed", "duplicated", "out of order", "stale", "different")
        faults = [f"{count} {name}" for name, count in zip(names, self.figures[2:], strict=True) if count]
        return ", ".join([f"{self.reader}: {self.read} of {self.written}", *faults])


@dataclass
class StoredRooms:
    """The content of the services' database.

    Attributes:
        timeline: stream ID -> row of `rooms.timeline`.
        turn_by_id: stream ID -> turn of the room when the event was persisted.
        recipient_by_id: stream ID -> member, for events that only one member receives.
        stays: (member, room) -> stays of the member in the room.
        invalidations: (cache, room) -> invalidations in ascending order of ID, each with the version of the room.
        joined_rooms_invalidations: member -> invalidations of the member's list of joined rooms; None -> invalidations
            of the lists of all members. The version of a cached list is the number of invalidations that it includes.
    """

    timeline: dict[int, TimelineRow]
    turn_by_id: Mapping[int, int]
    recipient_by_id: Mapping[int, str]
    stays: Mapping[tuple[str, str], Sequence[Stay]]
    invalidations: Mapping[tuple[str, str], Sequence[tuple[TimelineRow, int]]]
    joined_rooms_invalidations: Mapping[str | None, Sequence[TimelineRow]]

    def find_min_version(self, cache: str, key: str, upto: VectorPosition) -> int:
        """The lowest version that a cached value may have when a client has applied the invalidations up to `upto`.

        Args:
            cache: the name of the cache.
            key: the key of the value: a room or a member.
            upto: the position in the stream `caches`.
        """
        if cache == tables.JOINED_ROOMS_CACHE:
            return sum(
                upto.covers(row) for member in (key, None) for row in self.joined_rooms_invalidations.get(member, ())
            )
        newest_first = reversed(self.invalidations.get((cache, key), ()))
        return next((version for row, version in newest_first if upto.covers(row)), 0)

    def expected_ids(self, member: str) -> set[int]:
        """The stream IDs of the events that a member must receive: the live events of the member's stays, and the
        out-of-band events for the member, without the facts that report the ends of stays."""
        return {
            id
            for id, row in self.timeline.items()
            if id > 0
            and (
                self.recipient_by_id[id] == member and id not in self.end_ids(member)
                if id in self.recipient_by_id
                else self.find_stay(member, id) is not None
            )
        }

    def find_stay(self, member: str, id: int) -> Stay | None:
        """The member's stay that covers the event with this stream ID; None if no stay does."""
        stays = self.stays.get((member, self.timeline[id].room), ())
        return next((stay for stay in stays if stay.covers(self.turn_by_id[id])), None)

    def end_ids(self, member: str) -> set[int]:
        """The stream IDs of the facts that report the ends of the member's stays."""
        return {
            stay.leave_id
            for (name, _), stays in self.stays.items()
            if name == member
            for stay in stays
            if stay.leave_id
        }


def compare_syncs(answers: Iterable[Sequence[Any]], stored: StoredRooms) -> Iterable[RoomCount]:
    """Compare the answers of syncing clients with the tables.

    Args:
        answers: rows (client, member, since, upto, answer) of `play.answers`, in the order in which they were stored.
        stored: the content of the services' database.

    Returns:
        The counts of each kind of client.
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
    """Compare the syncs of one kind of client for one member with the tables.

    `answers`: (since, upto, answer) for each sync, in the order in which the answers were stored; not empty.
    """
    disordered = 0
    received: list[int] = []
    ended: set[int] = set()
    for (_, before, _), (since, _, answer) in pairwise([(None, answers[0][0], None), *answers]):
        sections = [answer[kind] for kind in ("events", "sent", "left")]
        disordered += since != before or sections != [sorted(ids) for ids in sections]
        stays = (stored.find_stay(member, id) for id in answer["events"] if id in stored.timeline)
        disordered += sum(stay is not None and stay.leave_id in ended for stay in stays)
        ended.update(answer["left"])
        received += [id for ids in sections for id in ids]
    until, ends = msgspec.convert(answers[-1][1], VectorPosition), stored.end_ids(member)
    expected = stored.expected_ids(member)
    covered = {id for id in expected if until.covers(stored.timeline[id])} | {id for id in ends if id <= until.linear}
    missed, duplicated = _count_missed_and_duplicated(covered, received)
    return RoomCount(client, len(expected | ends), len(covered & {*received}), missed, duplicated, disordered)


def compare_answer(
    client: str, about: str, upto: VectorPosition, answer: Mapping[str, Any], stored: StoredRooms
) -> RoomCount:
    """Compare one answer of a client with the tables. For all kinds of clients except `LINEAR` and `VECTOR`.

    Args:
        client: the kind of client.
        about: the room of a history; otherwise not used.
        upto: the position of the answer.
        answer: the column `answer` of `play.answers`.
        stored: the content of the services' database.
    """
    match client:
        case ClientKind.HISTORY:
            return _compare_pages(about, upto, answer, stored)
        case ClientKind.CACHES:
            served = answer["served"]
            stale = sum(version < stored.find_min_version(cache, key, upto) for cache, key, version in served)
            return RoomCount(client, len(served), len(served), stale=stale)
        case _:
            return RoomCount(client, 1, int(answer["found"]), missed=int(not answer["found"]))


def _compare_pages(room: str, upto: VectorPosition, answer: Mapping[str, Any], stored: StoredRooms) -> RoomCount:
    """Compare the pages of one room with the tables.

    The pages must have all live events up to `upto`, and all history that existed when the client began. They may have
    history that arrived later.
    """
    received = [id for _, id in answer["events"]]
    timeline = {id: row for id, row in stored.timeline.items() if row.room == room and id not in stored.recipient_by_id}
    expected = {id for id, row in timeline.items() if (upto.covers(row) if id > 0 else id >= answer["history"])}
    extra = {id for id in received if id < 0 and id in timeline}
    missed, duplicated = _count_missed_and_duplicated(
        expected, [id for id in received if id in expected or id not in extra]
    )
    duplicated += len(received) - len({*received}) if not duplicated else 0
    keys = [(depth, id) for depth, id in answer["events"]]
    disordered = int(keys != sorted(keys, reverse=True))
    return RoomCount(ClientKind.HISTORY, len(expected), len(expected & {*received}), missed, duplicated, disordered)


def _count_missed_and_duplicated(expected: set[int], received: Sequence[int]) -> tuple[int, int]:
    """Compare stream IDs. Returns the number of missed events, and the number of duplicated or unexpected events."""
    counted = Counter(received)
    return len(expected - counted.keys()), sum(count - (id in expected) for id, count in counted.items())


APPLICATION_NAME = "tidemark simulate --verify"
MAX_REORDERED_ANSWERS = 1000
"""Answers may be committed in another order than their numbers. A later comparison finds an answer whose number is at
most this much lower than the highest compared number."""


class RoomsDiffer(TidemarkError):
    """A client got a wrong answer or lacks answers, or the tables differ from the definitions.

    Args:
        counts: the counts of all clients.
        unanswered: the (client, member) pairs that have no answer of the newest incarnation.
    """

    def __init__(self, counts: Sequence[ReadCount], unanswered: Collection[tuple[str, str]] = ()) -> None:
        wrong = [str(room_count) for room_count in counts if not room_count.is_complete]
        wrong += [
            f"{kind}: no answers" for kind in ClientKind if kind not in {room_count.reader for room_count in counts}
        ]
        wrong += [f"{kind} of {member}: no answer from the current database" for kind, member in sorted(unanswered)]
        super().__init__(f"answers or tables of the rooms differ from what was written: {'; '.join(wrong)}")
        self.counts = counts


class RoomsVerification(Verification):
    """Compares the answers of clients with the tables of the services' database.

    A restore begins a new incarnation of the database. Only answers of the newest incarnation are compared. The counts
    of earlier incarnations are kept.
    """

    columns = ("STALE", "DIFFERENT")
    comparison_interval_seconds = 0.5

    def __init__(
        self,
        facts_dsn: str,
        effects_dsn: str,
        read_heads: Callable[[], Mapping[str, int]],
        *,
        stores_all_answers: bool = True,
    ) -> None:
        """
        Args:
            facts_dsn: the DSN of the services' database.
            effects_dsn: the DSN of the readers' database.
            read_heads: returns stream -> highest ID of the stream in Tidemark.
            stores_all_answers: whether the clients store all their answers (`RoomClientRole.stores_all`). If False,
                `counts` compares nothing.
        """
        self._stores_all_answers = stores_all_answers
        self._read_heads = read_heads
        self._database_names = [str(conninfo_to_dict(dsn)["dbname"]) for dsn in (facts_dsn, effects_dsn)]
        self._facts_session = session_of(facts_dsn, APPLICATION_NAME)
        self._effects_session = session_of(effects_dsn, APPLICATION_NAME)
        self._lock = Lock()
        self._compared_numbers: set[int] = set()
        """Numbers of the answers that were compared."""
        self._other_counts: dict[int, dict[str, RoomCount]] = defaultdict(dict)
        """Incarnation -> client -> the counts of answers other than syncs."""
        self._sync_counts: dict[int, Sequence[RoomCount]] = {}
        """Incarnation -> the counts of the kinds of syncing clients."""
        self._answered_clients: set[tuple[str, str]] = set()
        """The (client, member) pairs of syncing clients that have an answer of the newest incarnation."""

    def __exit__(self, *error: object) -> None:
        self._facts_session.close()
        self._effects_session.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compare once more if the databases answer, and pause comparisons while the block runs."""
        with self._lock:
            with suppress(Unavailable):
                self._compare()
            yield

    def prepare_services_server(self, server_dsn: str, successor: Successor) -> None:
        """Begin a new incarnation on the new server, if this server may lack events that clients have received.

        Args:
            server_dsn: the DSN of the new server of the services. No other process uses this server yet.
            successor: the kind of the new server.
        """
        if successor is Successor.SYNCHRONOUS_STANDBY:
            return
        with _connect(server_dsn, self._database_names[0]) as connection:
            connection.execute("select rooms.begin_anew(%s)", [msgspec.json.encode(self._read_heads()).decode()])

    def prepare_readers_server(self, server_dsn: str) -> None:
        """Drop the numbers of answers that the new server lacks: clients will store other answers with these numbers.

        Args:
            server_dsn: the DSN of the new server of the readers' database. No other process uses this server yet.
        """
        with _connect(server_dsn, self._database_names[1]) as connection:
            ((newest,),) = connection.execute("select coalesce(max(number), 0) from play.answers").fetchall()
        self._compared_numbers = {number for number in self._compared_numbers if number <= newest}

    def has_begun(self) -> bool:
        """Whether each kind of client has stored an answer. If only syncs are stored: each kind of syncing client.

        False if the readers' database does not answer.
        """
        expected = {*ClientKind} if self._stores_all_answers else {*CLIENTS_BY_PROCESS["rooms-sync"]}
        with suppress(Unavailable), self._effects_session.use() as connection:
            rows = connection.execute("select distinct client from play.answers").fetchall()
            return {*rows} >= {(kind,) for kind in expected}
        return False

    def final_counts(self) -> list[RoomCount]:
        return [*self.counts(), self.compare_rooms()]

    def is_complete(self, counts: Sequence[ReadCount]) -> bool:
        """Whether each kind of client and each syncing client has an answer, and all `counts` are complete."""
        kinds = {count.reader for count in counts}
        return kinds >= {*ClientKind} and all(count.is_complete for count in counts) and not self.unanswered_clients

    def error_for(self, counts: Sequence[ReadCount]) -> TidemarkError:
        return RoomsDiffer(counts, self.unanswered_clients)

    def counts(self) -> list[RoomCount]:
        """Compare the new answers, and return the counts of each kind of client since the database was created.

        Empty if answers are not stored.
        """
        if not self._stores_all_answers:
            return []
        with self._lock:
            newest = self._compare()
            totals: dict[str, RoomCount] = {}
            for incarnation_number, synced in self._sync_counts.items():
                for count in [*synced, *self._other_counts[incarnation_number].values()]:
                    # Unread events of another incarnation no longer exist.
                    adjusted = count if incarnation_number == newest else replace(count, written=count.read)
                    totals[count.reader] = totals.get(count.reader, RoomCount(count.reader)) + adjusted
        return [*totals.values()]

    @property
    def unanswered_clients(self) -> set[tuple[str, str]]:
        """The (client, member) pairs of syncing clients that have no answer of the newest incarnation yet."""
        return {
            (kind.value, member) for kind in (ClientKind.LINEAR, ClientKind.VECTOR) for member in SYNCING_MEMBERS
        } - self._answered_clients

    def _compare(self) -> int:
        """Compare answers of the newest incarnation: all answers to syncs, and the other answers that were not compared
        before. Returns the newest incarnation."""
        with self._facts_session.use() as connection:
            newest = load_incarnation(connection)
        with self._effects_session.use() as connection:
            answers = connection.execute(
                "select client, about, since, upto, answer from play.answers"
                " where kind = 'sync' and incarnation = %s order by number",
                [newest],
            ).fetchall()
            others = connection.execute(
                "select number, client, about, upto, answer from play.answers"
                " where kind <> 'sync' and incarnation = %s and number > %s order by number",
                [newest, max(self._compared_numbers, default=0) - MAX_REORDERED_ANSWERS],
            ).fetchall()
        with self._facts_session.use() as connection:  # read after the answers, so that it contains all of their events
            stored = _load_stored_rooms(connection)
            self._sync_counts[newest] = [*compare_syncs(answers, stored)]
            self._answered_clients = {(client, member) for client, member, *_ in answers}
            counts = self._other_counts[newest]
            expected_rooms: dict[str, ExpectedRoom] = {}
            for number, client, about, upto, answer in (
                answered for answered in others if answered[0] not in self._compared_numbers
            ):
                count = compare_answer(client, about, msgspec.convert(upto, VectorPosition), answer, stored)
                if client == ClientKind.HISTORY:
                    if about not in expected_rooms:
                        expected_rooms[about] = ExpectedRoom(*_load_all_events(connection, about))
                    state = {(kind, key): StateEntry(depth, id) for kind, key, depth, id in answer["state"]}
                    count += _compare_initial_state(
                        expected_rooms[about], about, msgspec.convert(upto, VectorPosition), state, stored
                    )
                counts[client] = counts.get(client, RoomCount(client)) + count
                self._compared_numbers.add(number)
        return newest

    def compare_rooms(self) -> RoomCount:
        """Compare the extremities, states, members, timelines and stays of all rooms with the definitions. Counts
        rooms."""
        with self._lock, self._facts_session.use() as connection:
            rows = connection.execute("select room from rooms.rooms order by room").fetchall()
            wrong = []
            for (room,) in rows:
                with connection.transaction():
                    connection.execute("set transaction isolation level repeatable read")
                    if not _matches_definitions(connection, room):
                        wrong.append(room)
        return RoomCount("tables", len(rows), len(rows) - len(wrong), different=len(wrong))


@contextmanager
def _connect(server_dsn: str, name: str) -> Iterator[Connection]:
    """Connect to the database `name` on a server while the block runs."""
    with (
        closing(session_of(make_conninfo(server_dsn, dbname=name), APPLICATION_NAME)) as session,
        session.use() as connection,
    ):
        yield connection


def _load_stored_rooms(connection: Connection) -> StoredRooms:
    """Read the content of the services' database."""
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
    invalidations: dict[tuple[str, str], list[tuple[TimelineRow, int]]] = defaultdict(list)
    joined_rooms_invalidations: dict[str | None, list[TimelineRow]] = defaultdict(list)
    for id, cache, keys, writer, version in connection.execute(
        "select stream_id, cache, keys, writer, version from rooms.invalidations order by stream_id"
    ).fetchall():
        invalidation = TimelineRow(id, "", "", 0, writer)
        if cache == tables.JOINED_ROOMS_CACHE:
            joined_rooms_invalidations[None if keys is None else keys[0]].append(invalidation)
            continue
        for name in (tables.STATE_CACHE, tables.MEMBERS_CACHE) if cache == tables.ROOM_CACHES else (cache,):
            invalidations[name, keys[0]].append((invalidation, version))
    return StoredRooms(timeline, turns, recipients, stays, invalidations, joined_rooms_invalidations)


def _compare_initial_state(
    expected_room: ExpectedRoom, room: str, upto: VectorPosition, state: State, stored: StoredRooms
) -> RoomCount:
    """Compare the state that an initial sync returned with an expected lower and upper limit for each state key.

    The lower limit is the entry in the state of the live events up to `upto`. The upper limit is the entry in the state
    of these events and all history. A state out of the limits counts as different.
    """
    timeline = {id: row for id, row in stored.timeline.items() if row.room == room and id not in stored.recipient_by_id}
    live = {row.event for id, row in timeline.items() if id > 0 and upto.covers(row)}
    history = {row.event for id, row in timeline.items() if id < 0}
    lower, upper = (expected_room.restricted_to(part).current_state for part in (live, live | history))
    within = state.keys() <= upper.keys() and all(
        lower.get(key, entry) <= entry <= upper[key] for key, entry in state.items()
    )
    return RoomCount(ClientKind.HISTORY, different=int(not within or not lower.keys() <= state.keys()))


def _load_all_events(connection: Connection, room: str) -> tuple[Collection[RoomEvent], dict[str, EventKind]]:
    """Read the events of a room.

    Returns:
        All events on all servers, with their true kinds; and event ID -> kind of the event in the services' tables.
    """
    rows = connection.execute("select event from rooms.events where room = %s", [room]).fetchall()
    stored = {id: event for id, (event, _) in tables.load_events(connection, [id for (id,) in rows]).items()}
    remote = connection.execute("select body from play.remote where room = %s", [room]).fetchall()
    others = {event.id: event for event in (msgspec.convert(body, RoomEvent) for (body,) in remote)}
    return {**stored, **others}.values(), {id: event.kind for id, event in stored.items()}


def _matches_definitions(connection: Connection, room: str) -> bool:
    """Whether extremities, states, members, timeline and stays of a room in the tables match `ExpectedRoom`."""
    all_events, stored = _load_all_events(connection, room)
    expected_room = ExpectedRoom(all_events, stored)
    groups = {id: group for id, (_, group) in tables.load_events(connection, [*stored]).items() if group is not None}
    states = {group: tables.load_state(connection, group) for group in {*groups.values()}}
    rows = connection.execute(
        "select event, turn, recipient from rooms.timeline where room = %s order by turn", [room]
    ).fetchall()
    arrivals = [(event, turn) for event, turn, recipient in rows if recipient is None]
    published = Counter(event for event, _ in arrivals)
    sent = {event for event, _, recipient in rows if recipient is not None}
    members = connection.execute("select member, event from rooms.memberships where room = %s", [room]).fetchall()
    current = load_current_state(connection, room)[1]
    chains = tables.PostgresStateGroups(connection, room)
    return (
        {*tables.load_forward_extremities(connection, room)} == expected_room.forward_extremities
        and {*tables.load_backward_extremities(connection, room)} == expected_room.backward_extremities
        and groups.keys() == expected_room.non_outliers
        and all(states[group] == expected_room.state_at(id) for id, group in groups.items())
        and current == expected_room.current_state
        and dict(members) == {key: entry.id for (kind, key), entry in current.items() if kind == MEMBER}
        and published == Counter(expected_room.non_outliers)
        and sent >= {id for id, kind in stored.items() if kind is EventKind.OUT_OF_BAND}
        and _load_stays(connection, room) == {*expected_room.compute_stays(arrivals)}
        and all(len(chains.chain(group)) <= MAX_CHAIN_LENGTH for group in states)
    )


def _load_stays(connection: Connection, room: str) -> set[tuple[Any, ...]]:
    """The stays in the tables, in the form of `ExpectedRoom.compute_stays`."""
    rows = connection.execute(
        "select stays.member, began, ended, ended_by.event from rooms.stays left join rooms.timeline as ended_by"
        " on stream_ordering = left_by and recipient = stays.member where stays.room = %s",
        [room],
    )
    return {*rows.fetchall()}


CLIENTS_BY_PROCESS = {
    "rooms-sync": (ClientKind.LINEAR, ClientKind.VECTOR),
    "rooms-others": (ClientKind.HISTORY, ClientKind.CACHES, ClientKind.OWN_EVENT),
}


class RoomsWorkload(Workload):
    """A chat server of several processes, and its clients.

    The first service appends with the SQL functions as the database's own writer. The other services append with
    `tidemark.Writer`. Each service also backfills history.
    """

    readers = (*CLIENTS_BY_PROCESS,)
    writing_readers = ("rooms-others",)
    faults = ALL_FAULTS - SOURCE_FAULTS

    @property
    def database_suffix(self) -> str:
        return "_".join(filter(None, ["rooms", self.plan.writer_plan.prefix.strip("_")]))

    @property
    def streams(self) -> Sequence[SimulatedStream]:
        return make_simulated_streams(make_room_streams(self.plan.writer_plan.prefix))

    def make_tables(self, facts_dsn: str, effects_dsn: str) -> None:
        simulation_tables.make_streams(facts_dsn, self.streams)
        with session_of(facts_dsn, simulation_tables.APPLICATION_NAME) as session:
            tables.SCHEMA.migrate(session)
        simulation_tables.run_script(facts_dsn, REMOTE_TABLE)
        simulation_tables.run_script(effects_dsn, ANSWERS_TABLE)

    def make_service_role(self, databases: SimulationDatabases, name: str, start_number: int) -> ProcessRole:
        writer_plan, seed = self.plan.writer_plan, f"{self.plan.seed} {name} {start_number}"
        writer = None if name == writer_plan.writer_name(1) else name
        streams = make_room_streams(writer_plan.prefix)
        role = RoomServiceRole(
            writer, streams, self.plan.faults, writer_plan.transactions_per_second / writer_plan.writer_count, seed
        )
        return ProcessRole(databases.facts_dsn, databases.effects_dsn, room_service=role)

    def make_reader_role(self, databases: SimulationDatabases, name: str, start_number: int) -> ProcessRole:
        prefix, seed = self.plan.writer_plan.prefix, f"{self.plan.seed} {name} {start_number}"
        kinds = [
            kind for kind in CLIENTS_BY_PROCESS[name] if not (self.have_services_ended and kind is ClientKind.OWN_EVENT)
        ]
        role = RoomClientRole(kinds, make_room_streams(prefix), f"{prefix}client", seed, stores_all=self.verify)
        return ProcessRole(databases.facts_dsn, databases.effects_dsn, room_client=role)

    def make_verification(self, databases: SimulationDatabases, tidemark_dsn: str) -> RoomsVerification:
        read_heads = partial(_read_heads, tidemark_dsn, self.streams)
        return RoomsVerification(databases.facts_dsn, databases.effects_dsn, read_heads, stores_all_answers=self.verify)


def _read_heads(dsn: str, streams: Sequence[SimulatedStream]) -> dict[str, int]:
    """Read stream -> highest ID of the stream in Tidemark; 0 if Tidemark does not have the stream. `dsn`: the DSN of
    Tidemark's own database."""
    with closing(session_of(dsn, simulation_tables.APPLICATION_NAME)) as session, session.use() as connection:
        known = dict(connection.execute("select stream, head from tidemark.streams").fetchall())
    return {stream.name: known.get(stream.name, 0) for stream in streams}
