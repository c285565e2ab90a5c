"""Random worlds whose rows and sequences do not stay together: no committed fact is lost without a word."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.examples import MODEL_CHECK, examples
from tests.sources.relay.disorder import FIT, DisorderedWorld
from tests.sources.relay.test_decider import Appending, relays
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay import epochs, queries, sequences
from tidemark.sources.relay.queries import AppendStream
from tidemark.sources.relay.sequences import StreamSnapshot
from tidemark.streaming.values.intervals import Intervals

pytestmark = pytest.mark.slow


class Disordered(Appending):
    """All that services and relays do elsewhere, and what nobody may do to a database under them."""

    @initialize(direction=st.sampled_from(["forward", "backward"]))
    def made(self, direction: str) -> None:
        self.world: DisorderedWorld = DisorderedWorld(self.dsn, direction=direction)

    @rule(on=st.booleans())
    def secure(self, *, on: bool) -> None:
        self.world.secure(on=on)

    @rule(by=st.integers(-12, 12))
    def move(self, by: int) -> None:
        self.world.move(by)

    @rule(at=st.integers(1, 20))
    def restart(self, at: int) -> None:
        self.world.restart(at)

    @rule(options=st.sampled_from(["cache 4", "cycle", "increment by 2", "increment by -2", FIT, FIT]))
    def options(self, options: str) -> None:
        self.world.options(options)

    @rule(back=st.integers(0, 10))
    def replicate(self, back: int) -> None:
        self.world.replicate(back)

    @rule()
    def save(self) -> None:
        self.world.save()

    @rule(relay=relays)
    def restore(self, relay: int) -> None:
        self.tell(relay)
        self.world.restore()

    @rule(ahead=st.sampled_from([0, 1, 32]))
    def promote(self, ahead: int) -> None:
        self.world.promote(ahead)


def test_every_committed_fact_is_published_or_late_or_its_stream_is_held(ready: str) -> None:
    """Filtered sessions, sequences that go back or jump or keep a cache, rows below the floor, restores in place,
    standbys that lag and are promoted."""
    Disordered.dsn = ready
    run_state_machine_as_test(
        Disordered, settings=settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
    )


def commit(world: DisorderedWorld) -> None:
    """A transaction that was open ends; where there is none, one begins."""
    service = world.services[1]
    if service.open:
        service.run("commit")
        service.end()
    else:
        service.begin("read committed", "on")
        service.append(world.stream, 1)


def relayed(world: DisorderedWorld) -> None:
    """Kafka takes all of a round."""
    relay = world.relays[0]
    relay.round()
    while relay.unacknowledged:
        relay.acknowledge()
    relay.settle()


EVENTS: list[Callable[[DisorderedWorld], object]] = [
    lambda world: world.services[0].append(world.stream, 1),
    commit,
    relayed,
    lambda world: world.relays[0].die(),
    lambda world: world.secure(on=True),
    lambda world: world.secure(on=False),
    lambda world: world.move(-4),
    lambda world: world.move(9),
    lambda world: world.restart(3),
    lambda world: world.options("cache 4"),
    lambda world: world.options(FIT),
    lambda world: world.replicate(2),
    lambda world: world.save(),
    lambda world: world.restore(),
    lambda world: world.promote(ahead=0),
]
"""Everything that may befall a database, and what services and relays do meanwhile."""


def test_every_order_of_a_few_events(ready: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two events in every order (outside `make model-check`: each by itself), after three facts of which two are
    published and saved: each fact is published, or late, or its stream is held.
    """
    monkeypatch.setattr(sequences, "QUICK_QUERY_SECONDS", float("inf"))
    for events in product(EVENTS, repeat=2 if settings.get_current_profile_name() == MODEL_CHECK else 1):
        world = DisorderedWorld(ready)
        try:
            for step in (*[EVENTS[0]] * 2, relayed, DisorderedWorld.save, EVENTS[0], *events):
                step(world)
            world.finish()
        except (AssertionError, RecursionError) as error:
            raise AssertionError([EVENTS.index(event) for event in events]) from error
        finally:
            world.close()


def appended(world: DisorderedWorld, *services: int) -> None:
    """Facts, in turns, and each is looked for."""
    for service in services:
        world.services[service].append(world.stream, 1)
        world.relays[0].round()


def filtered(world: DisorderedWorld) -> None:
    """Rows of the outbox are hidden for a while."""
    world.secure(on=True, tables=["append_outbox"])
    appended(world, 0, 1, 0)
    world.secure(on=False)
    world.finish()
    assert not world.core.voids


def set_back(world: DisorderedWorld) -> None:
    """The sequence goes back, facts come, and it goes beyond what was published, all between two queries."""
    world.move(-4)
    world.services[0].append(world.stream, 1)
    world.move(9)
    appended(world, 0)
    world.finish()


def cached(world: DisorderedWorld) -> None:
    """Two sessions keep IDs."""
    world.options("cache 20")
    appended(world, 0, 1, 0, 1)
    world.options(FIT)
    appended(world, 0, 1)
    world.finish()
    assert not world.core.named


def filled_in(world: DisorderedWorld) -> None:
    """A row comes above the floor where a void was declared, and the floor passes it."""
    world.hole()
    world.finish()


def restored(world: DisorderedWorld) -> None:
    """In place, while no relay runs, and services go beyond what was published."""
    world.save()
    appended(world, 0, 1)
    world.relays[0].finish()
    world.relays[0].die()
    world.restore()
    appended(world, 0, 1, 0)
    world.finish()


def restored_under(world: DisorderedWorld) -> None:
    """In place, under a relay that runs: the sequence is below what was published."""
    world.save()
    appended(world, 0, 1, 0)
    world.relays[0].finish()
    world.restore()
    appended(world, 0)
    world.finish()
    assert world.core.named


def promoted(world: DisorderedWorld) -> None:
    """A standby that lags takes over, and services go on before a relay is there."""
    world.save()
    appended(world, 0, 1, 0)
    world.relays[0].finish()
    world.promote(ahead=0)
    for service in (0, 1, 0, 1, 0):
        world.services[service].append(world.stream, 1)
    world.finish()
    assert world.core.timelines


def blind(_: object) -> dict[int, sequences.MisplacedRows]:
    """No look for stray rows."""
    return {}


def trusting(connection: Connection) -> dict[AppendStream, StreamSnapshot]:
    """Whoever wrote the floor."""
    return {stream: replace(look, foreign_write=0) for stream, look in real_heads(connection).items()}


def careless(connection: Connection) -> dict[AppendStream, StreamSnapshot]:
    """Whatever options a sequence has."""
    found = real_heads(connection)
    return {stream: replace(it, sequence=replace(it.sequence, defect="")) for stream, it in found.items()}


def thorough(connection: Connection, stream: AppendStream, version: int, old: int, new: int, _: Intervals) -> bool:
    """Every row up to the floor is deleted."""
    return real_raise_floor(connection, stream, version, old, new, Intervals.of([(old, new)]))


real_heads, real_raise_floor = sequences.read_snapshots, queries.raise_floor

Scene = Callable[[DisorderedWorld], None]
MUTANTS: list[tuple[Scene, list[tuple[ModuleType, str, object]]]] = [
    (set_back, [(sequences, "read_misplaced_rows", blind)]),
    (restored, [(sequences, "read_snapshots", trusting)]),
    (promoted, [(epochs, "_begin_new_epochs", lambda *_: None)]),
    (restored_under, [(sequences, "find_regressions", lambda _: [])]),
    (cached, [(sequences, "read_snapshots", careless), (sequences, "read_sequence_defects", lambda *_: {})]),
    (filled_in, [(queries, "raise_floor", thorough)]),
    (filtered, [(queries, "_USE", replace(queries._USE, options=(("row_security", "on"),)))]),
]


@pytest.fixture
def world(ready: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DisorderedWorld]:
    """Five facts are published."""
    monkeypatch.setattr(sequences, "QUICK_QUERY_SECONDS", float("inf"))
    world = DisorderedWorld(ready)
    for _ in range(5):
        world.services[0].append(world.stream, 1)
    world.relays[0].finish()
    yield world
    world.close()


@pytest.mark.parametrize("scene", [scene for scene, _ in MUTANTS], ids=lambda scene: scene.__name__)
def test_as_it_is(world: DisorderedWorld, scene: Scene) -> None:
    scene(world)


@pytest.mark.parametrize(("scene", "changes"), MUTANTS, ids=lambda given: getattr(given, "__name__", ""))
def test_each_look_is_needed(
    world: DisorderedWorld, monkeypatch: pytest.MonkeyPatch, scene: Scene, changes: list[tuple[ModuleType, str, object]]
) -> None:
    """Without it a fact is lost in this scene."""
    for relay in world.relays:
        relay.die()
    for module, name, wrong in changes:
        monkeypatch.setattr(module, name, wrong)
    with pytest.raises((AssertionError, RecursionError)):
        scene(world)
