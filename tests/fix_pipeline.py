"""Real pipeline processes on the real servers, each test in a site of its own: topics, database, Redis and home.

What it did is seen by what stands in Postgres, Redis and Kafka.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import psycopg
import pytest
import redis
from psycopg import sql

from tests.app.feeding import PlayFeed
from tests.app.running import PATIENCE, Running
from tests.fix_servers import migrated_template
from tests.play.cast import Cast
from tests.play.published import RedisReader, differences
from tests.shadows import shadowed
from tests.waiting import eventually
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer, free_port
from tidemark.common.errors import Unavailable
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import RecordProducer
from tidemark.sources.topics import Topics, topic_plans
from tidemark.streaming.wire.records import Record, encode

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
PARTITIONS = 4

_OURS = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[(debug|info|warning|error) *\] |Error: ")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Ended:
    """What a process left that ended by itself; `lines` are its output but for log lines below a warning."""

    code: int
    lines: Sequence[str]


@dataclass(frozen=True)
class Site:
    """One test's world. `variables` are the settings of its pipelines."""

    postgres: PostgresServer
    database: str
    home: Path
    variables: Mapping[str, str]
    _started: list[Running] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return self.variables["TIDEMARK_POSTGRES_DSN"]

    @property
    def redis_url(self) -> str:
        return self.variables["TIDEMARK_REDIS_URL"]

    @property
    def kafka(self) -> KafkaConnection:
        return KafkaConnection(self.variables["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"])

    @property
    def facts(self) -> str:
        return self.variables["TIDEMARK_KAFKA_FACTS_TOPIC"]

    @property
    def control(self) -> str:
        return self.variables["TIDEMARK_KAFKA_CONTROL_TOPIC"]

    @property
    def dead_letters(self) -> str:
        return self.variables["TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC"]

    @property
    def checkpoint(self) -> Path:
        return Path(self.variables["TIDEMARK_CHECKPOINT"])

    def start(self, *arguments: str, module: Sequence[str] = ("tidemark.app.cli",), **changed: object) -> Running:
        """Start `python -m MODULE pipeline ARGUMENTS`; `changed` replaces settings (`shards=8`)."""
        port = int(str(changed.get("metrics_port", 0))) or free_port()
        settings = {f"TIDEMARK_{name.upper()}": str(value) for name, value in changed.items()}
        clean = {name: text for name, text in os.environ.items() if not name.startswith("TIDEMARK_")}
        log_file = self.home / f"pipeline-{len(self._started) + 1}.log"
        with log_file.open("wb") as log:
            process = psutil.Popen(
                [sys.executable, "-P", "-m", *module, "pipeline", *arguments],
                stdin=-3,  # /dev/null
                stdout=log,
                stderr=log,
                cwd=shadowed(self.home / "folder"),
                env={
                    **clean,
                    "PYTHONPATH": str(ROOT),
                    **self.variables,
                    "TIDEMARK_METRICS_PORT": str(port),
                    **settings,
                },
                start_new_session=True,
            )
        running = Running(process, log_file, port)
        self._started.append(running)
        return running

    def refused(self, *arguments: str, **changed: object) -> Ended:
        """Start a pipeline that is to end by itself before it reads anything."""
        running = self.start(*arguments, module=("tidemark.app.cli",), **{"log_level": "error", **changed})
        return Ended(running.ends(), running.log().splitlines())

    @property
    def first(self) -> Running:
        """The process that was started first."""
        return self._started[0]

    @property
    def latest(self) -> Running:
        """The process that was started last."""
        return self._started[-1]

    def leave(self) -> None:
        """End all that was started. Fails where a log holds anything but lines of ours: a person is to read it."""
        for running in self._started:
            running.leave()
        strange = [line for running in self._started for line in running.log().splitlines() if not _OURS.match(line)]
        assert not strange, "\n".join(strange[:20])

    def sql(self, query: sql.SQL | str, *parameters: object) -> list[tuple[object, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(sql.SQL(query) if isinstance(query, str) else query, parameters)
            return cursor.fetchall() if cursor.description else []

    def snapshot(self) -> str:
        """A copy of the database, for `restore`; no process may be using it."""
        copy = f"{self.database}_copy{next(_numbers)}"
        self._administer("CREATE DATABASE {} TEMPLATE {}", copy, self.database)
        return copy

    def restore(self, copy: str) -> None:
        """The database as it was at `snapshot`, as from a backup."""
        self._administer("DROP DATABASE {} WITH (FORCE)", self.database)
        self._administer("ALTER DATABASE {} RENAME TO {}", copy, self.database)

    def _administer(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.postgres.dsn("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def make_topics(self, partitions: int = PARTITIONS) -> None:
        Topics(self.kafka).create_missing(topic_plans(self.facts, self.control, self.dead_letters, partitions))

    def send(self, *records: Record) -> None:
        """Send facts; they are in Kafka when this returns."""
        producer = RecordProducer(self.kafka, self.facts, give_up_after=30.0)
        for record in records:
            producer.send(record.stream, encode(record))
        assert producer.flush(30.0) == 0

    def positions(self, stream: str) -> dict[str, int | None]:
        """What a reader of Redis finds: the writers' positions and `linear`."""
        return RedisReader(self.redis_url).read([stream])[stream].line_and_positions()

    def reaches(self, stream: str, seconds: float = PATIENCE, /, **wanted: int) -> None:
        """Wait until Redis has at least the `wanted` positions."""

        def found() -> bool:
            seen = self.positions(stream)
            return all(seen.get(name) == position for name, position in wanted.items())

        eventually(
            found, seconds, lambda: f"{stream} at {wanted}, it is at {self.positions(stream)}\n{self._last_log()}"
        )

    def play(self, seed: int, cast: Cast) -> PlayFeed:
        """A simulation whose records go to this site's topic."""
        return PlayFeed(self.kafka, self.facts, seed, cast)

    def lacks(self, play: PlayFeed) -> list[str]:
        """Where Redis differs from the truth of the play."""
        with play.truth() as streams:
            try:
                return differences(streams, RedisReader(self.redis_url).read(stream.name for stream in streams))
            except Unavailable as problem:
                return [str(problem)]

    def shows(self, play: PlayFeed) -> None:
        """Wait until Redis has exactly the truth of the play."""
        eventually(
            lambda: not self.lacks(play),
            PATIENCE,
            lambda: f"Redis has the truth: {self.lacks(play)}\n{self._last_log()}",
        )

    def _last_log(self) -> str:
        return self.latest.log() if self._started else ""


@contextmanager
def made_site(kafka: KafkaServer, postgres: PostgresServer, server: RedisServer, home: Path) -> Iterator[Site]:
    number = next(_numbers)
    name = f"site{number}"
    url = server.url.replace("/0", f"/{number % 15 + 1}")
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    site = Site(
        postgres,
        name,
        home,
        {
            "TIDEMARK_HOME": str(home),
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "TIDEMARK_KAFKA_FACTS_TOPIC": f"{name}.facts",
            "TIDEMARK_KAFKA_CONTROL_TOPIC": f"{name}.control",
            "TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC": f"{name}.dead-letters",
            "TIDEMARK_POSTGRES_DSN": postgres.dsn(name),
            "TIDEMARK_REDIS_URL": url,
            "TIDEMARK_CHECKPOINT": str(home / "checkpoint"),
            "TIDEMARK_SPARK_DRIVER_MEMORY": "512m",
            "TIDEMARK_BATCH_CPU_SHARE": "1000",  # tests take many small steps
            "TIDEMARK_LOG_LEVEL": "debug",
        },
    )
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        made = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        connection.execute(made.format(*map(sql.Identifier, (name, migrated_template(postgres)))))
    site.make_topics()
    try:
        yield site
    finally:
        site.leave()


@pytest.fixture
def site(
    kafka: KafkaServer, postgres: PostgresServer, redis_server: RedisServer, warm_jvm: None, tmp_path: Path
) -> Iterator[Site]:
    """A site that only this test uses, with its topics and a migrated database; no pipeline runs."""
    with made_site(kafka, postgres, redis_server, tmp_path) as made:
        yield made
