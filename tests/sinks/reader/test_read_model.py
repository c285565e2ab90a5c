"""The whole reading program on a real Postgres against the model: skips, late facts, crashes at every step."""

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING
from tests.sinks.reader.service import ReadingService, effect
from tests.sinks.reader.test_follow_model import FollowWorld
from tidemark.sinks.reader import Positions, Reader
from tidemark.sinks.reader.requests import Answer, AwaitEntry, Pause, Request
from tidemark.streaming.values.direction import is_beyond


class Idle(Exception):
    """The reader has nothing to do but wait."""


class ModelPositions(Positions):
    """Answers out of the model instead of out of Redis."""

    def __init__(self, world: "ReadWorld") -> None:
        self.world = world
        self.waits = 0

    def carry_out(self, request: Request, stopping: Any) -> Answer:
        if isinstance(request, Pause):  # the session of one that was killed still has the place
            return None
        if isinstance(request, AwaitEntry):
            self.waits += 1
            if self.waits % 2:
                raise Idle
            return None
        return self.world.model.answer(request, postgres=True)


SCHEMAS = {"effects": "public", "places": "tidemark_reader", "delivered": "tidemark_reader"}
TABLES = tuple(SCHEMAS)


class Crash(Exception):
    """The process is killed."""


class DoomedReader(Reader):
    """Is killed before so many steps on the databases."""

    steps_left: int

    def _carry_out(self, request: Request) -> Answer:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Crash
        return super()._carry_out(request)


class ReadWorld(FollowWorld):
    """Two readers, one of each mode, that crash and come back; every fact that is in the table was committed there."""

    service: ReadingService
    restored = False  # whether the readers' database goes back now and then
    old_rows: tuple[str | None, ...] = ()  # the writers of a table that is older than its stream

    def begin(self, sign: int) -> None:
        super().begin(sign, True)
        self.model.old_table(self.old_rows)
        self.stored: set[int] = set()
        self.service.sql.execute("truncate facts, effects")
        self.service.sql.execute("drop schema if exists tidemark_reader cascade")
        self.service.sql.execute("drop schema if exists backup cascade")
        self.service.sql.execute("create schema backup")
        self.backed_up = False
        self.readers = {mode: self._reader(mode) for mode in ("linear", "vector")}

    def _reader(self, mode: str) -> DoomedReader:
        reader = DoomedReader(ModelPositions(self), "s", **self.service.arguments(name=mode, mode=mode, rows=2))
        reader.steps_left = 1_000_000
        return reader

    def read(self, mode: str, steps: int | None) -> None:
        """Until there is nothing to do, or until it is killed."""
        self._store()
        reader = self.readers[mode]
        reader.steps_left = 1_000_000 if steps is None else steps
        try:
            for batch in reader:
                for row in batch.rows:
                    batch.connection.execute(*effect(row, batch, mode))
        except Crash:
            reader.close()
            self.readers[mode] = self._reader(mode)
        except Idle:
            self._hold_against_the_truth(mode)

    def prune(self, count: int) -> None:
        """Not here: of what Postgres has forgotten nobody knows whether an operator skipped it."""

    def look(self, both: bool) -> None:
        """The readers look for themselves."""

    def publish_and_look(self) -> None:
        self.model.publish()

    def restart(self) -> None:
        """The readers crash by themselves."""

    def back_up(self) -> None:
        for table in TABLES:
            self.service.sql.execute(f"create table backup.{table} as table {SCHEMAS[table]}.{table}")
        self.backed_up = True

    def restore(self) -> None:
        """The readers' database goes back, effects and places together; they are started again."""
        for table in TABLES:
            name = f"{SCHEMAS[table]}.{table}"
            self.service.sql.execute(
                f"delete from {name}; insert into {name} overriding system value table backup.{table};"
                f" drop table backup.{table}"
            )
        self.backed_up = False
        for mode, reader in self.readers.items():
            reader.close()
            self.readers[mode] = self._reader(mode)

    def observe(self, chance: Random) -> None:
        if self.restored and chance.random() < 0.2 and self.places():
            self.restore() if self.backed_up else self.back_up()
        self.read(chance.choice(("linear", "vector")), chance.choice((None, chance.randrange(1, 40))))

    def places(self) -> bool:
        return self.service.sql.execute("select to_regclass('tidemark_reader.places')").fetchone() != (None,)

    def _store(self) -> None:
        new = [(id, who, 0) for id, who in self.model.facts.items() if id not in self.stored]
        self.service.sql.cursor().executemany("insert into facts values (%s, %s, %s)", new)
        self.stored |= {id for id, _, _ in new}

    def _hold_against_the_truth(self, mode: str) -> None:
        effects = self.service.effects(mode)
        ids = [id for id, _, _, _ in effects]
        assert len(ids) == len(set(ids)), "handed over twice"
        ordered = [(who, id) for id, who, _, late in effects if not late]
        if mode == "vector":
            ordered.sort(key=lambda it: it[0] or "")
            assert ordered == sorted(ordered, key=lambda it: (it[0] or "", abs(it[1])))
        else:
            assert ordered == sorted(ordered, key=lambda it: abs(it[1]))
        line = self.model.shown_line
        for fact, who in self.model.facts.items():
            position = line if mode == "linear" else self.model.shown.get(who or "", line)
            if not is_beyond(fact, position) and fact not in self.model.untold() and self.model.known:
                assert fact in ids, f"{fact} of {who} was stepped over"

    def teardown(self) -> None:
        for reader in getattr(self, "readers", {}).values():
            reader.close()


@settings(max_examples=40, suppress_health_check=SHARING)
@given(
    seed=st.integers(0, 2**32),
    sign=st.sampled_from((1, -1)),
    restored=st.booleans(),
    old_rows=st.lists(st.sampled_from((None, "a", "b", "old", "older")), max_size=12).map(tuple),
)
def test_every_fact_is_handed_over_once(
    service: ReadingService, seed: int, sign: int, restored: bool, old_rows: tuple[str | None, ...]
) -> None:
    """Exactly once in effect and in order, in both modes, whatever the writers, operators, Redis and kill -9 do, though
    the readers' own database is restored from a backup, and though the table is older than the stream."""
    chance = Random(seed)
    world = ReadWorld()
    world.service = service
    world.restored = restored
    world.old_rows = old_rows
    try:
        world.begin(sign)
        for _ in range(200):
            world.anything(chance)
        for mode in ("linear", "vector"):
            world.read(mode, None)
            world.read(mode, None)
    finally:
        world.teardown()
