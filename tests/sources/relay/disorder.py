"""A world whose rows and sequence do not stay together, and the oracle of what becomes of each fact.

Every committed fact is published once, or late, or its stream is held and named. IDs may be given out twice, so facts
are known by tokens, which are their rows.
"""

from collections.abc import Sequence
from contextlib import suppress

import psycopg
from psycopg.conninfo import make_conninfo

from tests.sources.relay.world import Core, World
from tidemark.sources.kafka_lookup import split_run
from tidemark.sources.relay.decider import Decider
from tidemark.streaming.core.effects import LateCompletion, StreamEffects
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Rdata

TABLES = ("append_streams", "append_outbox", "append_progress", "append_writers", "append_sent", "relay_schema_version")
SAVED = (
    "tidemark.append_outbox",
    "tidemark.append_progress",
    "tidemark.append_writers",
    "tidemark.append_sent",
    "truth",
)
RELAY = "relay_of_world"
FIT = "cache 1 no cycle increment by"


ROOM = 2000
"""IDs that a sequence has left."""


class TokenCore(Core):
    """Takes each record alone, so that it is known what became of each: `published` in time, or `named` as late."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.published: set[int] = set()
        self.named: set[int] = set()
        self.completions: list[LateCompletion] = []

    def take(self, values: list[bytes]) -> list[StreamEffects]:
        done: list[StreamEffects] = []
        for record in (one for value in values for one in split_run(records.decode(value))):
            effects = super().take([records.encode(record)])
            done += effects
            self.completions += [late for each in effects for late in each.late]
            if isinstance(record, Rdata) and isinstance(record.id, int):
                id, token = abs(record.id), int(bytes(record.row))
                for each in effects:
                    if any(abs(late.prev) < id <= abs(late.id) and late.facts for late in each.late):
                        self.named.add(token)
                    elif each.counts.get("applied"):
                        self.published.add(token)
        return done


class DisorderedWorld(World):
    """Relays have a login that may be filtered by row level security."""

    def __init__(self, dsn: str, *, direction: str = "forward") -> None:
        super().__init__(dsn, direction=direction)
        self.core: TokenCore = TokenCore(self.stream)
        with suppress(psycopg.errors.DuplicateObject):
            self._admin.execute(f"create role {RELAY} login password 'x' in role tidemark_relay".encode())
        for relay in self.relays:
            relay._dsn = make_conninfo(dsn, user=RELAY, password="x")
        self.secure(on=False)
        for table in SAVED:
            self._admin.execute(f"drop table if exists {self._copy(table)}".encode())
        self._saved: int | None = None
        self.rest = 2
        """After more rounds than these without a change, a relay has noticed everything."""

    def check(self) -> None:
        """No record is refused but those of epochs that are over; a position that went back would be an error."""
        assert self.core.rejected.keys() <= {"zombie"}, self.core.rejected

    def finish(self) -> None:
        """Everything ends and is mended as the messages say. Then no fact is missing."""
        self.make_again()
        for service in [*self.services, self.bystander]:
            service.run("commit")
            service.end()
        for gid in [*self.prepared]:
            self.resolve(gid, "commit")
        self.secure(on=False)
        self.options(FIT)
        self._admin.execute(
            f"select setval('{self.sequence}', {self._sign} * greatest(abs(last_value),"
            f" (select coalesce(max(abs(id)), 1) from tidemark.append_outbox))) from {self.sequence}".encode()
        )
        for relay in self.relays:
            relay.die()
        self.relays[0].finish()
        self.check()
        missing = self.tokens - self.core.published - self.core.named
        assert not missing, f"committed, and neither published nor late: {missing}"
        assert self._admin.execute("select count(*) from tidemark.append_outbox").fetchone() == (0,)

    @property
    def tokens(self) -> set[int]:
        """Of all facts that are committed."""
        found = self._admin.execute("select token from truth where rows > 0 and stream = %s", [self.stream])
        return {token for (token,) in found}

    @property
    def sequence(self) -> str:
        [(name,)] = self._admin.execute(
            "select ids::text from tidemark.append_streams where stream = %s", [self.stream]
        ).fetchall()
        return str(name)

    @property
    def held(self) -> str:
        """Why the relays that run hold the stream."""
        deciders = [relay._decider for relay in self.relays]
        return "; ".join(str(it.blocked.get(self.stream)) for it in deciders if isinstance(it, Decider))

    def secure(self, *, on: bool, tables: Sequence[str] = TABLES) -> None:
        """A house rule: row level security on every table, and no policy; not on one that a transaction has locked."""
        for table in tables:
            how = "enable" if on else "disable"
            self._alter(f"alter table tidemark.{table} {how} row level security")

    def options(self, options: str) -> None:
        """Of the sequence; nothing where a transaction is in its way."""
        if options.endswith("increment by"):
            options += f" {self._sign}"
        last = self._admin.execute(f"select last_value from {self.sequence}".encode()).fetchone()
        assert last is not None
        # A sequence that cycles in the wrong direction goes to its end: at 2**63 a relay would send voids for ever.
        end = f"{'maxvalue' if self._sign > 0 else 'minvalue'} {last[0] + self._sign * ROOM}"
        self._alter(f"alter sequence {self.sequence} {options} {end}")

    def move(self, by: int) -> None:
        """`setval`, which waits for nobody."""
        self._admin.execute(
            f"select setval('{self.sequence}', {self._sign} * greatest(1, abs(last_value) + {by}))"
            f" from {self.sequence}".encode()
        )

    def restart(self, at: int) -> None:
        self._alter(f"alter sequence {self.sequence} restart with {self._sign * at}")

    def replicate(self, back: int) -> None:
        """A row arrives at or below the floor, as with a logical replication that is behind."""
        row = self._admin.execute(
            "select number, floor from tidemark.append_progress join tidemark.append_streams using (number)"
            " where stream = %s",
            [self.stream],
        ).fetchone()
        assert row is not None
        number, id = row[0], row[1] - self._sign * back
        if id * self._sign > 0:
            token = self.services[0].token()
            with suppress(psycopg.errors.UniqueViolation), self._admin.transaction():
                self._admin.execute(
                    "insert into tidemark.append_outbox (number, id, rows, bytes) values (%s, %s, %s, 10)",
                    [number, id, [str(token)]],
                )
                self._admin.execute("insert into truth values (%s, %s, 1, '', %s)", [self.stream, id, token])

    def hole(self) -> None:
        """An ID is declared void, and a row comes there before the floor passes it."""
        service, relay = self.services[0], self.relays[0]
        service.begin("read committed", "on")
        id, token = service.append(self.stream, 1), service.token()
        service.run("rollback")
        service.end()
        while id not in self.core.voids:
            relay.round()
        with self._admin.transaction():
            self._admin.execute(
                "insert into tidemark.append_outbox (number, id, rows, bytes)"
                " select number, %s, %s, 10 from tidemark.append_streams where stream = %s",
                [id, [str(token)], self.stream],
            )
            self._admin.execute("insert into truth values (%s, %s, 1, '', %s)", [self.stream, id, token])
        while relay.unacknowledged:
            relay.acknowledge()
        relay.settle()

    def save(self) -> None:
        """What a backup of the rows and of the sequence holds."""
        for table in SAVED:
            self._admin.execute(f"drop table if exists {self._copy(table)}".encode())
            self._admin.execute(f"create table {self._copy(table)} as table {table}".encode())
        [(self._saved,)] = self._admin.execute(f"select last_value from {self.sequence}".encode()).fetchall()

    def restore(self) -> bool:
        """In place, under everybody's connections: the tables are the same, and hold what was saved. False: nothing
        was saved, or a transaction is in the way."""
        if self._saved is None or any(service.open for service in self.services) or self.prepared:
            return False
        with self._admin.transaction():
            self._put_back(self._saved)
        return True

    def promote(self, ahead: int) -> bool:
        """A standby that is as far as the backup takes the place of the server: every connection breaks, and open
        transactions are lost. Its rows are as a relay wrote them, and its sequence may be some IDs ahead, as the
        write-ahead log has it. False: there is no standby, or a prepared transaction."""
        if self._saved is None or self.prepared:
            return False
        for relay in self.relays:
            relay.die()
            relay.promotions += 1
        for service in [*self.services, self.bystander, self.operator]:
            if service.pid is not None:
                self._admin.execute("select pg_terminate_backend(%s, 5000)", [service.pid])
            service.end()
        with self._admin.transaction():
            self._put_back(self._saved + self._sign * ahead)
            self._admin.execute("update tidemark.append_progress set written_by = pg_current_xact_id()::xid")
        return True

    def _put_back(self, head: int) -> None:
        for table in SAVED:
            self._admin.execute(f"delete from {table}".encode())
            self._admin.execute(f"insert into {table} select * from {self._copy(table)}".encode())
        self._admin.execute("select setval(%s, %s)", [self.sequence, head])

    def _alter(self, statement: str) -> None:
        self._admin.execute("set lock_timeout = 50")
        with suppress(psycopg.errors.LockNotAvailable):
            self._admin.execute(statement.encode())
        self._admin.execute("reset lock_timeout")

    @property
    def _sign(self) -> int:
        return 1 if self._direction == "forward" else -1

    def _copy(self, table: str) -> str:
        return f"saved_{table.rpartition('.')[2]}"
