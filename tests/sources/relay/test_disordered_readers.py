"""Readers in SQL of a database whose rows and sequences do not stay together: the effects are those of its facts, once
an operator has done what the errors say."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import psycopg
import pytest
from hypothesis import settings
from psycopg.types.json import Jsonb

from tests.examples import MODEL_CHECK
from tests.sources.relay.disorder import FIT, DisorderedWorld
from tests.sources.relay.position_world import SteppedKeeper
from tests.sources.relay.test_disorder import EVENTS
from tidemark.sources.relay import sequences

_SEEK = re.compile(r"tidemark_reader\.seek\('[^']+', 'reader', 'm(-?\d+)'\)")


_OWN = ("tidemark_reader.positions", "tidemark_reader.places", "tidemark_reader.timelines", "effects")


class ReadDisorderedWorld(DisorderedWorld):
    """With a process that keeps positions, and a reader. `restore` leaves their tables alone."""

    def __init__(self, dsn: str, *, direction: str = "forward") -> None:
        super().__init__(dsn, direction=direction)
        self.keeper = SteppedKeeper(self.relays[0]._dsn)
        self._admin.execute(
            "truncate tidemark_reader.positions, tidemark_reader.places, tidemark_reader.timelines,"
            " tidemark_reader.late_completions"
        )
        self._admin.execute("drop table if exists effects")
        self._admin.execute("create table effects (id bigint, token bigint)")

    def save(self) -> None:
        super().save()
        for table in _OWN:
            self._admin.execute(f"drop table if exists {self._copy(table)}".encode())
            self._admin.execute(f"create table {self._copy(table)} as table {table}".encode())

    def restore_all(self) -> None:
        """A restore of all tables, under everybody's connections."""
        with self._admin.transaction():
            if self.restore():
                self._put_own_back()

    def restore_own(self) -> None:
        """A restore of the tables of the reader alone."""
        if self._saved is not None:
            with self._admin.transaction():
                self._put_own_back()

    def promote(self, ahead: int) -> bool:
        """A standby has the tables of keeper and reader too."""
        if promoted := super().promote(ahead):
            self.keeper.die()
            with self._admin.transaction():
                self._put_own_back()
                self._admin.execute("update tidemark_reader.positions set written_by = pg_current_xact_id()::xid")
        return promoted

    def _put_own_back(self) -> None:
        for table in _OWN:
            self._admin.execute(f"delete from {table}".encode())
            self._admin.execute(f"insert into {table} select * from {self._copy(table)}".encode())

    def begin(self) -> None:
        """Two facts are read and saved, and three more are read."""
        append, relayed = EVENTS[0], EVENTS[2]
        for steps in ((append, append, relayed), (append, append, append, relayed)):
            for step in steps:
                step(self)
            for _ in range(3):
                self.keep()
                self.read()
            if self._saved is None:
                self.save()

    def keep(self) -> None:
        """A round of the keeper, unless it has no access to its tables now."""
        for _ in range(10):
            if self.keeper.look():
                return

    def follow(self) -> bool:
        """A round of the process that copies the published positions, of a stream that has a writer elsewhere. Returns
        whether the stream is published."""
        signed, positions = self._sign.__mul__, self.core.positions
        vector = Jsonb({writer: signed(id) for writer, id in positions.items()})
        linear, late = signed(self.core.line), [*enumerate(self.core.completions, 1)]
        row = self._admin.execute(
            "select tidemark_reader.share(%s, %s, %s, %s)", [self.stream, len(late), linear, vector]
        ).fetchone()
        if row != ("published",):
            return False
        columns = [[number for number, _ in late]] + [
            [getattr(completion, name) for _, completion in late]
            for name in ("writer", "epoch", "prev", "id", "facts", "why")
        ]
        with self._admin.transaction():
            self._admin.execute(
                "select tidemark_reader.publish_late(%s, 0, %s::bigint[], %s::text[], %s::bigint[], %s::bigint[],"
                " %s::bigint[], %s::bigint[], %s::text[])",
                [self.stream, *columns],
            )
            self._admin.execute(
                "select tidemark_reader.publish('published', array[%s], array[%s::bigint], array[%s::jsonb])",
                [self.stream, linear, vector],
            )
        return True

    def read(self) -> bool:
        """One range with its effects. False: nothing is new. An error that names a remedy is mended by it."""
        try:
            with self._admin.transaction():
                taken = self._admin.execute(
                    "select low, high, late, withdrawn from tidemark_reader.take(%s, 'reader', 3)", [self.stream]
                ).fetchone()
                if taken is not None:
                    low, high, late, withdrawn = taken
                    self._admin.execute("delete from effects where id <@ %s::int8multirange", [withdrawn])
                    self._admin.execute(
                        "insert into effects select id, token from truth where stream = %s and rows > 0"
                        " and (abs(id) > abs(%s) and abs(id) <= abs(%s) or id = any(%s))",
                        [self.stream, low, high, late],
                    )
        except psycopg.errors.UndefinedObject:  # no position is stored yet
            return False
        except psycopg.errors.ObjectNotInPrerequisiteState as error:
            match = _SEEK.search(error.diag.message_hint or "")
            if match is None:
                raise
            self._admin.execute("delete from effects where abs(id) > abs(%s)", [int(match[1])])
            self._admin.execute("select tidemark_reader.seek(%s, 'reader', %s)", [self.stream, "m" + match[1]])
            return True
        return taken is not None

    def finish(self) -> None:
        super().finish()
        for _ in range(4):
            self.keeper.round()
        if self.is_shared:
            assert self.follow()
        while self.read():
            pass
        effects = [token for (token,) in self._admin.execute("select token from effects").fetchall()]
        assert sorted(effects) == sorted(self.tokens)

    @property
    def is_shared(self) -> bool:
        """Whether the transactions of this database no longer decide the position."""
        row = self._admin.execute(
            "select source <> 'database' from tidemark_reader.positions where stream = %s", [self.stream]
        ).fetchone()
        return row == (True,)

    def close(self) -> None:
        self.keeper.die()
        super().close()


@contextmanager
def read_world(dsn: str, direction: str) -> Iterator[ReadDisorderedWorld]:
    """A world after `begin`."""
    world = ReadDisorderedWorld(dsn, direction=direction)
    try:
        world.begin()
        yield world
    finally:
        world.close()


READ_EVENTS: list[Callable[[ReadDisorderedWorld], object]] = [
    *EVENTS,
    ReadDisorderedWorld.keep,
    lambda world: world.keeper.die(),
    ReadDisorderedWorld.read,
    ReadDisorderedWorld.restore_all,
    ReadDisorderedWorld.restore_own,
    ReadDisorderedWorld.follow,
]
"""What may befall a database, and what its keeper of positions and its reader do meanwhile."""


def test_readers_after_every_order_of_a_few_events(ready: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two events in every order (outside `make model-check`: each by itself), after five facts of which two are saved
    and all are read. Services go on with five facts before the next relay looks."""
    monkeypatch.setattr(sequences, "QUICK_QUERY_SECONDS", float("inf"))
    append = EVENTS[0]
    for events in product(READ_EVENTS, repeat=2 if settings.get_current_profile_name() == MODEL_CHECK else 1):
        world = ReadDisorderedWorld(ready)
        try:
            world.begin()
            for step in (*events, *[append] * 5):
                step(world)
            world.finish()
        except (AssertionError, RecursionError) as error:
            raise AssertionError([READ_EVENTS.index(event) for event in events]) from error
        finally:
            world.close()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("alive", [True, False])
def test_readers_of_a_stream_that_was_restored_in_place(ready: str, direction: str, *, alive: bool) -> None:
    """The sequence passes the places of the readers before a relay and a keeper look again."""
    append = EVENTS[0]
    with read_world(ready, direction) as world:
        if not alive:
            world.keeper.die()
            world.relays[0].die()
        world.restore()
        for _ in range(6):
            append(world)
        world.finish()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_readers_beyond_what_kafka_has_when_the_tables_are_restored(ready: str, direction: str) -> None:
    """The process that copies published positions misses a writer in the restored tables before the relay sees the
    restore. Kafka never had the facts that the readers have passed, so nobody would report them as late."""
    append = EVENTS[0]
    with read_world(ready, direction) as world:
        for _ in range(3):
            append(world)
            world.keep()
            world.read()
        world.restore()
        world.follow()
        for _ in range(9):
            append(world)
        world.finish()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("change", ["failover", "writer"])
def test_readers_of_restored_tables_with_an_unfit_sequence(ready: str, direction: str, change: str) -> None:
    """Nothing is decided before the sequence is repaired. Until then, neither a failover nor a new writer makes the
    relay forget that the tables were restored."""
    append = EVENTS[0]
    with read_world(ready, direction) as world:
        world.restore()
        world.options("cache 4")
        world.keeper.die()
        world.keep()
        if change == "failover":
            world.relays[0].die()
            world.relays[0].promotions += 1
        else:
            world.services[0].append(world.stream, 1, writer="web")
        for _ in range(3):
            world.relays[0].round()
        world.options(FIT)
        for _ in range(6):
            append(world)
        for _ in range(3):
            world.keep()
            world.read()
        world.finish()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("first", ["relay", "keeper"])
def test_readers_of_a_void_id_that_got_a_fact_while_nobody_looked(ready: str, direction: str, first: str) -> None:
    """Kafka is away, so the void is above the floor. The sequence goes back to it and passes the position again."""
    append = EVENTS[0]
    with read_world(ready, direction) as world:
        for _ in range(2):
            world.services[0].begin("read committed", "on")
            append(world)
            world.services[0].run("rollback")
            world.services[0].end()
        for _ in range(3):
            world.keep()
            world.read()
        world.keeper.die()
        world.relays[0].die()
        world.move(-2)
        for _ in range(4):
            append(world)
        if first == "keeper":
            world.keep()
            world.read()
        world.finish()
