"""`tidemark simulate --workload rooms`: a chat server of several processes, its clients, and what befalls them.

One of the processes writes as the database itself, with `tidemark.append`, the others with `tidemark.Writer`; each
also fetches history. What clients were answered is held against the tables, and these against the definitions.
"""

import signal
import time
from collections.abc import Sequence, Set
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from threading import Event

import click

from tidemark.app.settings import Settings
from tidemark.app.signals import told_to_end
from tidemark.app.simulation import tables
from tidemark.app.simulation.fault_injector import Director
from tidemark.app.simulation.processes import Actor, Company, Member, Part, Stage
from tidemark.app.simulation.room_services import (
    ANSWERS,
    REMOTE,
    ClientKind,
    RoomClientRole,
    RoomServiceRole,
    played,
    room_streams,
)
from tidemark.app.simulation.rooms_verification import RoomCount, RoomsDiffer, RoomsVerification
from tidemark.app.simulation.script import PlayedStream
from tidemark.app.simulation.simulate import (
    CATCH_UP_SECONDS,
    TICK_SECONDS,
    Play,
    directed,
    play_through,
    require_own,
    services_server,
)
from tidemark.app.simulation.verification import table
from tidemark.app.stack.home import Home
from tidemark.common.errors import Unavailable
from tidemark.sources.relay.queries import session_of
from tidemark.sources.rooms.tables import SCHEMA
from tidemark.sources.topics import Topics

CLIENTS = {
    "rooms-sync": (ClientKind.LINE, ClientKind.VECTOR),
    "rooms-others": (ClientKind.HISTORY, ClientKind.CACHES, ClientKind.OWN),
}
"""Clients by process."""


@dataclass(frozen=True, slots=True)
class RoomsCompany(Company):
    """Services and clients of rooms in the places of others; `kept`: whether answers are, to be verified."""

    kept: bool

    def readers(self) -> list[Member]:
        return [Member(name, partial(self._client, kinds)) for name, kinds in CLIENTS.items()]

    def service(self, name: str) -> Member:
        return Member(name, self._room_service)

    def _room_service(self, member: Member) -> Actor:
        first = member.name == self.cast.writer_name(1)
        role = RoomServiceRole(
            None if first else member.name,
            room_streams(self.cast.prefix),
            self.faults,
            self.cast.rate / self.cast.writers,
            f"{self.seed} {member.name} {member.incarnation}",
        )
        return self.actor(member, Part(self.stage.facts, self.stage.effects, room_service=role))

    def _client(self, kinds: Sequence[ClientKind], member: Member) -> Actor:
        streams, seed = room_streams(self.cast.prefix), f"{self.seed} {member.name} {member.incarnation}"
        role = RoomClientRole(kinds, streams, f"{self.cast.prefix}client", seed, kept=self.kept)
        return self.actor(member, Part(self.stage.facts, self.stage.effects, room_client=role))


def run(settings: Settings, play: Play, *, verify: bool) -> None:
    """Play to the end, or until SIGTERM or Ctrl-C, as `simulate.run` does.

    Raises `RoomsDiffer` where `verify` finds it; `StreamTaken`, `TopicMissing`, `AlreadyRunning`, `StartFailed`,
    `Unavailable`.
    """
    with ExitStack() as stack:
        own = services_server(settings, play, stack)
        stage = _stage(settings, play.cast.prefix, own.server.dsn() if own else settings.postgres())
        stopping = told_to_end(again=signal.SIG_DFL)
        heads = partial(_heads, settings.postgres(), played(room_streams(play.cast.prefix)))
        verification = stack.enter_context(RoomsVerification(stage.facts, stage.effects, heads))
        servers = stack.enter_context(closing(own.with_stack(settings, verification))) if own else None
        director = stack.enter_context(
            directed(RoomsCompany(stage, play.cast, play.faults, play.seed, verify), servers)
        )
        _await_all(director, {*ClientKind} if verify else {*CLIENTS["rooms-sync"]}, stopping)
        play_through(director, play, stopping, verification.counts if verify else list, RoomsDiffer if verify else None)
        if verify:
            _conclude(director, verification)


def _stage(settings: Settings, prefix: str, services: str) -> Stage:
    """Everything that the play needs, made where it is missing; `services` is the DSN of their server."""
    Topics(settings.kafka).describe([settings.kafka_facts_topic])
    play = "_".join(filter(None, ["rooms", prefix.strip("_")]))
    facts, effects = tables.make_database(services, play), tables.make_database(settings.postgres(), play)
    tables.prepare_writing(facts)
    streams = played(room_streams(prefix))
    require_own(settings, facts, streams)
    tables.make_streams(facts, streams)
    with session_of(facts, tables.APPLICATION) as session:
        SCHEMA.migrate(session)
    tables.make_tables(facts, REMOTE)
    tables.make_tables(effects, ANSWERS)
    return Stage(Home(settings.home), facts, effects)


def _heads(dsn: str, streams: Sequence[PlayedStream]) -> dict[str, int]:
    """Up to which ID Tidemark, whose Postgres is at `dsn`, knows each stream."""
    with closing(session_of(dsn, tables.APPLICATION)) as session, session.use() as connection:
        known = dict(connection.execute("select stream, head from tidemark.streams").fetchall())
    return {stream.name: known.get(stream.name, 0) for stream in streams}


def _await_all(director: Director, clients: Set[ClientKind], stopping: Event) -> None:
    """The play begins when everybody is at work, these among them: processes need their time on a busy machine."""
    deadline = time.monotonic() + CATCH_UP_SECONDS
    with closing(session_of(director.company.stage.effects, tables.APPLICATION)) as session:
        while time.monotonic() < deadline and not stopping.wait(TICK_SECONDS):
            director.tick()
            with suppress(Unavailable), session.use() as connection:
                if {*connection.execute("select distinct client from play.answers")} >= {(kind,) for kind in clients}:
                    return


def _conclude(director: Director, verification: RoomsVerification) -> None:
    """Wait until the syncing clients have everything; print how each did. Raises `RoomsDiffer`."""
    deadline = time.monotonic() + CATCH_UP_SECONDS
    counts: list[RoomCount] = []
    while not (_is_complete(counts) and not verification.awaited) and time.monotonic() < deadline:
        director.tick()
        time.sleep(5 * TICK_SECONDS)
        with suppress(Unavailable):
            counts = verification.counts()
    found = [*counts, verification.rooms()]
    click.echo(table(found, "STALE", "DIFFERENT"))
    if verification.awaited or not (_is_complete(counts) and found[-1].complete):
        raise RoomsDiffer(found, verification.awaited)


def _is_complete(counts: Sequence[RoomCount]) -> bool:
    """Every kind of client was answered, and rightly."""
    return len(counts) == len(ClientKind) and all(count.complete for count in counts)
