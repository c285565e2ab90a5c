"""What each part of the order is for: a few steps after which the oracle is content, and without that part is not."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import psycopg
import pytest

from tests.sources.relay.world import WRITER, MakeDecider, World
from tidemark.common.postgres_session import Connection
from tidemark.sources import transactions
from tidemark.sources.relay import epochs, queries, sequences
from tidemark.sources.relay.decider import Decider, Decision, Steps, _StreamState
from tidemark.sources.relay.evidence import LockOwner, StreamEvidence, WriterChains
from tidemark.sources.relay.queries import AppendStream, Page
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals

pytestmark = pytest.mark.slow


class HeadLast(Decider):
    """Reads the head after it has looked who runs."""

    def run_round(self, max_bytes: int) -> Steps:
        real = sequences.read_snapshots
        transactions.use_up_transaction_number(self._connection)
        running = transactions.read_running_transactions(self._connection)
        yield "heads"
        with (
            patch.object(transactions, "read_running_transactions", lambda _: running),
            patch.object(sequences, "read_snapshots", real),
        ):
            return (yield from super().run_round(max_bytes))


class OutboxFirst(Decider):
    """Reads the outbox before it looks who runs."""

    def run_round(self, max_bytes: int) -> Steps:
        pages: dict[int, Page] = {}
        for each in self._streams.values():
            asked = Intervals.of([(each.evidence.floor, 2**62)])
            pages[each.stream_epoch.stream.number] = queries.read_page(
                self._connection, each.stream_epoch.stream, asked, max_bytes
            )
        yield "heads"

        def page(connection: Connection, stream: AppendStream, asked: Intervals, max_bytes: int) -> Page:
            old = pages[stream.number]
            facts = [fact for fact in old.facts if asked.within(fact.id - 1, fact.id)]
            return Page(facts, int(asked.highs[-1]), old.floor, old.version, 0)

        with patch.object(queries, "read_page", page):
            return (yield from super().run_round(max_bytes))


class Impatient(Decider):
    """Waits for nobody who runs for long."""

    def run_round(self, max_bytes: int) -> Steps:
        for each in self._streams.values():
            if each.evidence.needs_locks:
                each.evidence.observe(each.evidence.head, frozenset())
        return (yield from super().run_round(max_bytes))


class Deaf(Decider):
    """Does not look how far the floor is that another has raised."""

    def _decide(self, each, asked, page):  # type: ignore[no-untyped-def]
        return super()._decide(each, asked, replace(page, floor=each.evidence.floor))


class Eager(Decider):
    """Deletes what Kafka has, also above the floor."""

    def note_acknowledged(self, decided: Decision) -> None:
        super().note_acknowledged(decided)
        ids = [decided.stream_epoch.stream.direction.signed(fact.id) for fact in decided.facts]
        self._connection.execute("delete from tidemark.append_outbox where id = any(%s)", [ids])


class Unguarded(Decider):
    """Lets the database's own line pass what only others may have, as it lets the line of any other."""

    def run_round(self, max_bytes: int) -> Steps:
        def undecided_ids(each: _StreamState, writer: str) -> Intervals:
            return each.evidence.undecided_ids(each.stream_epoch.writers[writer].lock_keys)

        with patch.object(_StreamState, "undecided_ids", undecided_ids):
            return (yield from super().run_round(max_bytes))


class Hasty(Decider):
    """Cuts the lines of writers where it happens to look, and not where a fact or a common cut is."""

    def run_round(self, max_bytes: int) -> Steps:
        decided = yield from super().run_round(max_bytes)
        for each in self._streams.values():
            if each.chains is not None and not each.evidence.has_undecided:
                each.chains.note_common_cut(each.evidence.head)
                if announced := each.chains.announce(each.undecided_ids):
                    decided.append(Decision(each.stream_epoch, [], NO_INTERVALS, announced))
        return decided


class Deleting(Decider):
    """Raises the floor over what was told of lines and is not in Kafka."""

    def raise_floors(self, max_streams=None):  # type: ignore[no-untyped-def]
        with patch.object(WriterChains, "max_floor", lambda _, limit: limit):
            yield from super().raise_floors(max_streams)


class Remembering(Decider):
    """Goes on with what another connection has seen."""

    remembered: ClassVar[dict[int, StreamEvidence]] = {}

    def __init__(self, connection, told):  # type: ignore[no-untyped-def]
        super().__init__(connection, told)
        for number, each in self._streams.items():
            each.evidence = self.remembered.setdefault(number, each.evidence)


def shared_only(connection: Connection, running: Collection[int]) -> dict[int, frozenset[LockOwner]]:
    """No lock looks as if its holder retires a writer."""
    return {
        number: frozenset(each._replace(is_exclusive=False) for each in lock_owners)
        for number, lock_owners in real_holders(connection, running).items()
    }


def sessions_only(connection: Connection, running: Collection[int]) -> dict[int, frozenset[LockOwner]]:
    """Only locks of sessions, as if a prepared transaction held none."""
    row = connection.execute("select array_agg(transaction::text::bigint) from pg_prepared_xacts").fetchone()
    prepared = set(row[0] or []) if row else set()
    found = real_holders(connection, running)
    return {
        number: frozenset(each for each in lock_owners if each.transaction_number & 0xFFFF_FFFF not in prepared)
        for number, lock_owners in found.items()
    }


real_holders = queries.read_lock_owners


def unnoticed(connection: Connection, number: int, found: Mapping[str, int]) -> None:
    """Other relays go on with the writers that they know."""
    real_introduce(connection, number, found)
    connection.execute("update tidemark.append_progress set version = version - 1 where number = %s", [number])


def unheard(connection: Connection, number: int, found: Mapping[str, int]) -> None:
    """What a writer has told is told before Kafka has its JOIN."""
    real_introduce(connection, number, found)
    connection.execute("update tidemark.append_writers set state = 'joined' where number = %s", [number])


def at_the_floor(connection: Connection, number: int, found: Mapping[str, int]) -> None:
    """A writer that is back joins where it has told more already."""
    real_introduce(connection, number, dict.fromkeys(found, 0))


real_introduce = epochs._store_new_writers


def head_first(world: World) -> None:
    """An ID is given out while the relay looks."""
    relay, service = world.relays[0], world.services[0]
    relay.look()
    service.begin("read committed", "on")
    service.append(world.stream, 1)
    relay.round()
    service.run("commit")
    world.finish()


def outbox_last(world: World) -> None:
    """A fact is committed while the relay looks."""
    relay, service = world.relays[0], world.services[0]
    relay.look()
    service.append(world.stream, 1)
    relay.round()
    world.finish()


def open_long(world: World) -> None:
    """A transaction stays open while the relay looks again and again."""
    world.relays[0].round()
    service = world.services[0]
    service.begin("read committed", "on")
    service.append(world.stream, 1)
    for _ in range(4):
        world.relays[0].round()
    service.run("commit")
    world.finish()


def reserved_long(world: World) -> None:
    """The same with an ID that is reserved first."""
    world.relays[0].round()
    service = world.services[0]
    service.begin("read committed", "on")
    service.reserve(world.stream)
    for _ in range(4):
        world.relays[0].round()
    service.complete(world.stream, 1)
    service.run("commit")
    world.finish()


def prepared_long(world: World) -> None:
    """The same with a prepared transaction, which has no session any more."""
    service = world.services[0]
    service.begin("read committed", "on")
    service.append(world.stream, 1)
    world.prepare(service)
    for _ in range(4):
        world.relays[0].round()
    world.finish()


def completed_by_another(world: World) -> None:
    """A reserved ID is committed without a fact; later another transaction tries to complete it."""
    first, second = world.services[:2]
    first.begin("read committed", "on")
    first.reserve(world.stream)
    [id] = first.reserved
    first.run("commit")
    world.relays[0].round()
    second.reserved, second.open = [id], True
    second.complete(world.stream, 1)
    world.finish()


def deleted_between(world: World) -> None:
    """Another relay sends and deletes a fact after this one has seen its ID given out."""
    one, other = world.relays
    world.services[0].append(world.stream, 1)
    for _ in range(6):
        one.look()
    other.finish()
    one.round()
    world.finish()


def held_below(world: World) -> None:
    """A fact above an open ID is sent by one relay, and looked for by another."""
    one, other = world.relays
    holding, service = world.services[:2]
    holding.begin("read committed", "on")
    holding.append(world.stream, 1)
    service.append(world.stream, 1)
    one.round()
    one.acknowledge()
    one.settle()
    holding.run("commit")
    other.round()
    world.finish()


def crashed_after_telling(world: World) -> None:
    """The server dies right after a fact was told whose transaction did not wait for the disk."""
    for _ in range(10):
        world.relays[0].round()
        service = world.services[0]
        service.begin("read committed", "off")
        service.append(world.stream, 1)
        service.run("commit")
        world.relays[0].round()
        world.crash()
        world.check()
    world.finish()


def crashed_while_looking(world: World) -> None:
    """The server dies while an ID is open, and gives the same to another transaction."""
    for _ in range(10):
        one, another = world.services[:2]
        one.begin("read committed", "on")
        one.append(world.stream, 1)
        world.relays[0].round()
        world.crash()
        for _ in range(3):
            world.bystander.run("select pg_current_xact_id()::text::bigint")
        another.begin("read committed", "on")
        another.append(world.stream, 1)
        world.relays[0].round()
        world.relays[0].round()
        another.run("commit")
        world.check()
    world.finish()


def overtaken(world: World) -> None:
    """A writer has an ID open, facts of it and of others are committed above, then it commits."""
    for writer in ("till", "web"):
        world.services[0].append(world.stream, 1, writer)
    world.relays[0].finish()
    holding, service = world.services[:2]
    holding.begin("read committed", "on")
    holding.append(world.stream, 1, "till")
    for writer in ("web", "till", "", "web"):
        service.append(world.stream, 1, writer)
        for relay in world.relays:
            relay.round()
    world.relays[0].cut_chains()
    for _ in range(3):
        world.relays[0].round()
    holding.run("commit")
    holding.end()
    world.relays[0].finish()
    world.finish()


def held_by_nobody_known(world: World) -> None:
    """A writer that has never appended has an ID open, while others go on."""
    relay, (holding, service, _) = world.relays[0], world.services
    service.append(world.stream, 1, "till")
    relay.finish()
    holding.begin("read committed", "on")
    holding.append(world.stream, 1, "web")
    for writer in ("till", ""):
        service.append(world.stream, 1, writer)
        relay.round()
        relay.cut_chains()
        for _ in range(3):
            relay.round()
    holding.run("commit")
    holding.end()
    relay.finish()
    world.finish()


def taken_over(world: World) -> None:
    """A relay dies after each of its steps, and another one goes on, while writers take turns."""
    one, other = world.relays
    for number in range(12):
        world.services[0].append(world.stream, number % 2, ("till", "web", "")[number % 3])
        one.round()
        if number % 4 == 0:
            one.cut_chains()
        if number % 2:
            one.round()
            for _ in range(number % 3):
                one.acknowledge(first=True)
            one.settle()
            one.die()
        other.round()
    world.finish()


def unacknowledged(world: World) -> None:
    """Facts are in Kafka, the ranges between them are not, and the relay is gone."""
    one, other = world.relays
    service = world.services[0]
    for writer in ("till", "web"):
        service.append(world.stream, 1, writer)
    one.finish()
    for writer in ("till", "web", "web", "till"):
        service.append(world.stream, 1, writer)
    one.lose_ranges()
    other.finish()
    world.finish()


def met_late(world: World) -> None:
    """One relay meets a writer while another, which does not know it, raises the floor over a common cut."""
    one, other = world.relays
    service = world.services[0]
    service.append(world.stream, 1, "till")
    one.finish()
    service.append(world.stream, 1, "")
    one.round()
    one.cut_chains()
    one.round()
    service.append(world.stream, 1, "web")
    other.round()
    other.begin()
    other.die()
    while one.unacknowledged:
        one.acknowledge()
    one.settle()
    world.finish()


def retired_and_back(world: World) -> None:
    """A writer retires, while an ID below is open and common cuts have settled more of it, and appends again; then once
    more, when its RETIRE was sent."""
    (holding, service, _), (relay, other) = world.services, world.relays
    for writer in ("till", "web"):
        service.append(world.stream, 1, writer)
    relay.finish()
    holding.begin("read committed", "on")
    holding.append(world.stream, 1, "till")
    service.append(world.stream, 1)
    relay.round()
    relay.cut_chains()
    for _ in range(3):
        relay.round()
    service.retire(world.stream, "web")
    relay.round()
    service.append(world.stream, 1, "web")
    for each in (relay, other, relay):
        each.round()
    holding.run("commit")
    holding.end()
    relay.finish()
    service.retire(world.stream, "web")
    relay.finish()
    assert world.core.retired == {"web"}
    service.append(world.stream, 1, "web")
    world.finish()


def dropped_and_made_again(world: World) -> None:
    """A stream is dropped, which nobody can append to then, and is made again, once before that was told and once
    after."""
    (one, other), service = world.relays, world.services[0]
    for writer in ("", "web"):
        service.append(world.stream, 1, writer)
    one.finish()
    assert world.drop()
    assert service.append(world.stream, 1) is None
    world.make_again()
    service.append(world.stream, 1, "web")
    one.finish()
    assert world.drop()
    other.finish()
    assert world.core.retired == {WRITER, "web"}
    world.make_again()
    service.append(world.stream, 1)
    one.finish()
    world.finish()


def dropped_while_open(world: World) -> None:
    """Somebody drops a stream of which IDs are open, and one of which no row is left after a savepoint."""
    relay, (holding, service, _) = world.relays[0], world.services
    service.append(world.stream, 1)
    relay.finish()
    holding.begin("read committed", "on")
    holding.run("savepoint one")
    holding.append(world.stream, 1)
    holding.run("rollback to one")
    assert not world.drop()
    holding.append(world.stream, 1)
    assert not world.drop()
    world.prepare(holding)
    assert not world.drop()
    world.resolve(world.prepared[0], "commit")
    assert not world.drop()
    relay.finish()
    service.begin("read committed", "on")
    service.append(world.stream, 1)
    service.run("rollback")
    service.end()
    assert not world.drop()
    relay.finish()
    assert world.drop()
    world.finish()


def retiring_while_open(world: World) -> None:
    """Somebody retires a writer that has an ID open; only what holds it keeps that from being done."""
    relay, (holding, service, _) = world.relays[0], world.services
    service.append(world.stream, 1, "web")
    relay.finish()
    holding.begin("read committed", "on")
    holding.append(world.stream, 1, "web")
    service.retire(world.stream, "web")
    for _ in range(3):
        relay.round()
    holding.run("commit")
    holding.end()
    world.finish()


def retiring_long(world: World) -> None:
    """The transaction that retires a writer is prepared, and several common cuts and facts come before it commits."""
    relay, (retiring, service, _) = world.relays[0], world.services
    for writer in ("web", "till"):
        service.append(world.stream, 1, writer)
        relay.finish()
    retiring.begin("read committed", "on")
    retiring.retire(world.stream, "web")
    world.prepare(retiring)
    for _ in range(3):
        service.append(world.stream, 1, "till")
        for _ in range(3):
            relay.round()
        relay.cut_chains()
    relay.round()
    assert world.core.positions["till"] > world.core.line
    world.resolve(world.prepared[0], "commit")
    relay.finish()
    assert world.core.retired == {"web"}
    service.append(world.stream, 1, "web")
    world.finish()


def retiring_before_it_is_told(world: World) -> None:
    """Somebody retires a writer whose fact Kafka does not have."""
    relay, service = world.relays[0], world.services[0]
    service.append(world.stream, 1, "web")
    relay.finish()
    service.append(world.stream, 1, "web")
    service.retire(world.stream, "web")
    world.finish()


Scene = Callable[[World], None]
DECIDERS: list[tuple[Scene, MakeDecider]] = [
    (head_first, HeadLast),
    (outbox_last, OutboxFirst),
    (open_long, Impatient),
    (deleted_between, Deaf),
    (held_below, Eager),
    (crashed_while_looking, Remembering),
    (held_by_nobody_known, Unguarded),
    (taken_over, Hasty),
    (unacknowledged, Deleting),
]
LOOKS: list[tuple[Scene, ModuleType, str, Any]] = [
    (open_long, transactions, "use_up_transaction_number", lambda _: None),
    (prepared_long, queries, "read_lock_owners", sessions_only),
    (retiring_long, queries, "read_lock_owners", shared_only),
    (crashed_after_telling, queries, "store_heads", lambda *_: True),
]
FUNCTIONS = [
    (
        open_long,
        "append_fact",
        "not pg_try_advisory_xact_lock_shared(1414087749 + _number, hashtext(_writer))",
        "false",
    ),
    (overtaken, "append_fact", "hashtext(_writer)", "hashtext('')"),
    (
        reserved_long,
        "take_lock",
        "not pg_try_advisory_xact_lock_shared(1414087749 + _of.number, hashtext(_writer))",
        "false",
    ),
    (completed_by_another, "complete", "and kept.reserved_by = pg_current_xact_id()", ""),
    (retiring_while_open, "retire_writer", "pg_try_advisory_xact_lock(1", "pg_try_advisory_xact_lock_shared(1"),
    (dropped_and_made_again, "create_stream", "_known.after + _sign", "_sign"),
    (dropped_while_open, "drop_stream", "progress.number = _of.number and progress.floor <> _head", "false"),
    (
        retiring_before_it_is_told,
        "retire_writer",
        "kept.number = _of.number and kept.writer = _known.writer",
        "false",
    ),
]
JOINS: list[tuple[Scene, str, Any]] = [
    (met_late, "_store_new_writers", unnoticed),
    (overtaken, "_store_new_writers", unheard),
    (retired_and_back, "_store_new_writers", at_the_floor),
]
SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (
        *(scene for scene, _ in DECIDERS),
        *(scene for scene, *_ in LOOKS),
        *(scene for scene, *_ in JOINS),
        *(scene for scene, *_ in FUNCTIONS),
    )
}


def played(dsn: str, scene: Scene, make: MakeDecider = Decider) -> None:
    world = World(dsn, make)
    try:
        scene(world)
    finally:
        world.close()


def caught(dsn: str, scene: Scene, make: MakeDecider = Decider) -> None:
    with pytest.raises(AssertionError):
        played(dsn, scene, make)


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_as_it_is(ready: str, scene: str) -> None:
    """In each of the scenes the relay says what is true."""
    played(ready, SCENES[scene])


@pytest.mark.parametrize(("scene", "mutant"), DECIDERS, ids=[scene.__name__ for scene, _ in DECIDERS])
def test_decider(ready: str, scene: Scene, mutant: MakeDecider) -> None:
    """A relay that looks in another order, or leaves a look out, says what is not true."""
    caught(ready, scene, mutant)


@pytest.mark.parametrize(("scene", "module", "name", "wrong"), LOOKS, ids=[scene.__name__ for scene, *_ in LOOKS])
def test_looks(ready: str, scene: Scene, module: ModuleType, name: str, wrong: object) -> None:
    """A look that does not see all who may own an ID, or does not wait for the disk, leads to what is not true."""
    with patch.object(module, name, wrong):
        caught(ready, scene)


@pytest.mark.parametrize(
    ("scene", "name", "line", "instead"), FUNCTIONS, ids=[scene.__name__ for scene, *_ in FUNCTIONS]
)
def test_functions(ready: str, scene: Scene, name: str, line: str, instead: str) -> None:
    """Without its lock an ID looks as if nobody held it, or another one; without its mark anybody completes it."""
    with psycopg.connect(ready, autocommit=True) as connection:
        row = connection.execute("select pg_get_functiondef(%s::regproc)", [f"tidemark.{name}"]).fetchone()
        assert row is not None
        assert line in row[0]
        connection.execute(row[0].replace(line, instead).encode())
    caught(ready, scene)


@pytest.mark.parametrize(("scene", "name", "wrong"), JOINS, ids=[wrong.__name__ for *_, wrong in JOINS])
def test_joins(ready: str, scene: Scene, name: str, wrong: object) -> None:
    """A writer that other relays do not notice, or that does not join, has a line with a hole."""
    with patch.object(epochs, name, wrong):
        caught(ready, scene)
