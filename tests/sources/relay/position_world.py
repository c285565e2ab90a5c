"""A world of services and relays with keepers of positions and a reader, one step at a time; and what must be true."""

from collections.abc import Callable, Iterator

import psycopg

from tests.sources.relay.world import _DIED, MakeDecider, World
from tidemark.common.postgres_session import PostgresSession
from tidemark.sources.relay.decider import Decider
from tidemark.sources.relay.local_positions import PositionDecider
from tidemark.sources.relay.queries import session_of


class SteppedKeeper:
    """A process that keeps positions, a step at a time; after an error of its connection it begins again."""

    def __init__(self, dsn: str, is_local: Callable[[str], bool] = lambda _: True) -> None:
        self._dsn = dsn
        self._is_local = is_local
        self._session: PostgresSession | None = None
        self._decider: PositionDecider | None = None
        self._steps: Iterator[str] | None = None

    def look(self) -> bool:
        """One step of a round; whether the round has ended."""
        try:
            self._session = self._session or session_of(self._dsn, "keeper")
            with self._session.use() as connection:
                self._decider = self._decider or PositionDecider(connection, self._is_local)
                self._steps = self._steps or self._decider.run_round()
                try:
                    next(self._steps)
                except StopIteration:
                    self._steps = None
                    return True
        except _DIED:
            self.die()
        return False

    def round(self) -> None:
        for _ in range(100):
            if self.look():
                return
        raise AssertionError("a round does not end")

    def wait(self, pause: float, most: float) -> bool:
        """Between two rounds, as an idle process does."""
        assert self._decider is not None
        return self._decider.wait_for_ids(pause, most)

    def die(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._decider = self._steps = None


class ReadingWorld(World):
    """`delivered` are the facts that a reader has, in order. `_below` are the facts up to the position seen last:
    another one may never come."""

    def __init__(self, dsn: str, make: MakeDecider = Decider, *, direction: str = "forward") -> None:
        super().__init__(dsn, make, direction=direction)
        self.sign = 1 if direction == "forward" else -1
        self.keepers = [SteppedKeeper(dsn) for _ in range(2)]
        self.delivered: list[int] = []
        self._seen = 0
        self._below: set[int] = set()
        self._vector: dict[str, int] = {}
        self._checked: dict[str, int] = {}
        self._counted: dict[str, set[int]] = {}
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("truncate tidemark_reader.positions, tidemark_reader.places, tidemark_reader.timelines")

    @property
    def sql(self) -> psycopg.Connection:
        return self._admin

    @property
    def position(self) -> int:
        """A magnitude."""
        row = self._admin.execute(
            "select abs(linear) from tidemark_reader.positions where stream = %s", [self.stream]
        ).fetchone()
        return row[0] if row else 0

    @property
    def timeline(self) -> int:
        row = self._admin.execute("select timeline from tidemark_reader.positions").fetchone()
        assert row is not None
        return int(row[0])

    def reached(self, position: int) -> bool:
        return self.position == position

    def keep(self) -> None:
        """Rounds of the first keeper until nothing moves."""
        for _ in range(4):
            self.keepers[0].round()

    def check_positions(self) -> None:
        position = self.position
        assert position >= self._seen, f"the position went back from {self._seen} to {position}"
        facts = {abs(id) for id, (rows, _) in self._truth().items() if rows}
        now_below = {id for id in facts if id <= self._seen}
        assert now_below == self._below, f"the position was {self._seen}, and there are new facts below"
        self._seen, self._below = position, {id for id in facts if id <= position}
        self._check_vector()
        row = self._admin.execute("select abs(tidemark_reader.last_id(%s))", [self.stream]).fetchone()
        assert row is not None
        assert row[0] is None or max(facts, default=0) <= row[0], "a fact has an ID that was not given out"

    def _check_vector(self) -> None:
        """No fact of a writer may come at or below a position that the writer had."""
        row = self._admin.execute("select vector from tidemark_reader.positions").fetchone()
        for name, id in (row[0] if row else {}).items():
            self._vector[name] = max(abs(id), self._vector.get(name, 0))
        for name, position in self._vector.items():
            facts = {abs(id) for id, (rows, writer) in self._truth().items() if rows and writer == name}
            late = {id for id in facts if id <= self._checked.get(name, 0)} - self._counted.get(name, set())
            assert not late, f"{name} was at {self._checked[name]}, and there are new facts {late}"
            self._checked[name], self._counted[name] = position, {id for id in facts if id <= position}

    def read(self, most: int, *, commit: bool) -> None:
        """A reader of the table of facts takes what is new, in a transaction."""
        if not self.position:
            return
        with psycopg.connect(self.dsn) as connection:
            taken = connection.execute(
                "select low, high, late from tidemark_reader.take(%s, 'reader', %s)", [self.stream, most]
            ).fetchone()
            if taken is not None:
                low, high, late = taken
                assert late == []
                rows = connection.execute(
                    "select abs(id) from truth where stream = %s and rows > 0 and abs(id) > %s and abs(id) <= %s"
                    " order by 1",
                    [self.stream, abs(low), abs(high)],
                ).fetchall()
                if commit:
                    connection.commit()
                    self.delivered += [id for (id,) in rows]
            connection.rollback()

    def finish(self) -> None:
        super().finish()
        self.keep()
        (head,) = self._admin.execute(
            "select abs(coalesce(pg_sequence_last_value(ids), after)) from tidemark.append_streams"
        ).fetchone() or (0,)
        assert self.position == head
        while self.position and self.delivered_upto() < self.position:
            self.read(1000, commit=True)
        assert self.delivered == sorted(abs(id) for id, (rows, _) in self._truth().items() if rows)

    def delivered_upto(self) -> int:
        row = self._admin.execute("select abs(linear) from tidemark_reader.places where stream = %s", [self.stream])
        found = row.fetchone()
        return found[0] if found else 0

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.die()
        super().close()


class SqlReader:
    """A reader whose effects are rows of a table in the same database: whatever happens to one happens to both."""

    def __init__(self, dsn: str, stream: str = "orders") -> None:
        self._dsn = dsn
        self._stream = stream
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table effects (n bigint generated always as identity, id bigint)")

    def drain(self, most: int = 3) -> None:
        """Read everything that is complete."""
        with psycopg.connect(self._dsn) as connection:
            while True:
                taken = connection.execute(
                    "select low, high, late from tidemark_reader.take(%s, 'reader', %s)", [self._stream, most]
                ).fetchone()
                if taken is None:
                    return
                connection.execute(
                    "insert into effects (id) select id from truth where stream = %s and rows > 0"
                    " and (id > %s and id <= %s or id = any (%s)) order by id",
                    [self._stream, *taken],
                )
                connection.commit()

    def check(self) -> None:
        """Each fact of the table has had its effects once, in order."""
        with psycopg.connect(self._dsn) as connection:
            effects = [id for (id,) in connection.execute("select id from effects order by n").fetchall()]
            facts = connection.execute(
                "select id from truth where stream = %s and rows > 0 order by id", [self._stream]
            )
            assert effects == [id for (id,) in facts.fetchall()]
