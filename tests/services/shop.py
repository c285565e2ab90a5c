"""A database with the table and the stream of docs/how-to/write-facts.md, a relay, and the records on Kafka."""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.sources.relay.judge import Judge
from tests.waiting import eventually
from tidemark.app.stack.processes import KafkaServer
from tidemark.common.environment import child_environment
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.kafka_lookup import split_run
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.wire.records import Rdata, Record

PAGE = (Path(__file__).parents[2] / "docs/how-to/write-facts.md").read_text()
STREAM = "orders"
WRITER = "shop"
TIDEMARK = (sys.executable, "-P", "-m", "tidemark")


@dataclass(frozen=True, slots=True)
class Shop:
    """`truth` is what its services committed: what each order's fact holds, by stream ID."""

    dsn: str
    judge: Judge

    @property
    def environment(self) -> dict[str, str]:
        """What a service finds its database by, as psql does."""
        at = conninfo_to_dict(self.dsn)
        names = {"PGHOST": "host", "PGPORT": "port", "PGDATABASE": "dbname", "PGUSER": "user", "PGPASSWORD": "password"}
        return child_environment({name: str(at[key]) for name, key in names.items()})

    @contextmanager
    def sql(self) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            yield connection

    def truth(self) -> dict[int, object]:
        with self.sql() as sql:
            return {id: {"total": total} for id, total in sql.execute("select stream_id, total from orders").fetchall()}

    def head(self) -> int:
        with self.sql() as sql:
            row = sql.execute("select coalesce(pg_sequence_last_value('tidemark.append_ids_1'), 0)").fetchone()
        assert row is not None
        return int(row[0])

    def proved(self) -> dict[int, object]:
        """The rows of Kafka's facts by ID, once the relay has decided everything: they are the truth, each was counted
        once, and every other ID up to the head is void.
        """
        eventually(self._settled, 60.0)
        verdict = self.judge.verdict()
        facts = dict(_facts(chain.from_iterable(map(split_run, verdict.records))))
        assert facts == self.truth()
        head = self.head()
        assert verdict.position(STREAM, WRITER) == head
        moves = verdict.effects[STREAM].advances
        assert sum(move.facts for move in moves) == len(facts)
        assert sum(move.empty for move in moves) == head - len(facts)
        assert verdict.effects[STREAM].late == []
        assert verdict.rejected == {}
        return facts

    def _settled(self) -> bool:
        with self.sql() as sql:
            row = sql.execute("select floor from tidemark.append_progress").fetchone()
        return row is not None and row[0] == self.head()


def _facts(told: Iterable[Record]) -> Iterator[tuple[int, object]]:
    for record in told:
        if isinstance(record, Rdata) and isinstance(record.id, int):
            yield record.id, msgspec.json.decode(bytes(record.row))


@contextmanager
def opened(dsn: str, kafka: KafkaServer, topic: str, *, relay_dsn: str | None = None) -> Iterator[Shop]:
    """Prepared as the page says. `relay_dsn` is how the relay reaches the database, where that is another way."""
    connection = KafkaConnection(kafka.bootstrap_servers)
    Topics(connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    stack = {
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": topic,
        "TIDEMARK_POSTGRES_DSN": dsn,
    }
    subprocess.run(
        [*TIDEMARK, "relay", "migrate", "--stream", STREAM],
        env=child_environment(stack),
        check=True,
        capture_output=True,
    )
    with psycopg.connect(dsn, autocommit=True) as sql:
        sql.execute(table().encode())
    with _relay(stack | {"TIDEMARK_POSTGRES_DSN": relay_dsn or dsn}):
        yield Shop(dsn, Judge(connection, topic))


def table() -> str:
    """The statement of the page that makes the table of its services."""
    (found,) = re.findall(r"CREATE TABLE orders \(.*?\);", PAGE, re.DOTALL)
    return str(found)


@contextmanager
def _relay(stack: Mapping[str, str]) -> Iterator[None]:
    with subprocess.Popen([*TIDEMARK, "relay", "--writer", WRITER], env=child_environment(stack)) as process:
        try:
            yield
        finally:
            process.terminate()
