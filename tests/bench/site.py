"""The servers of a benchmark: a broker, a Postgres and a Redis of their own, in a home that is thrown away."""

import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import redis

from tidemark.app.pipeline import class_archive
from tidemark.app.settings import load
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer, free_port
from tidemark.app.stack.up import BROKER, JarList, fetch_jars
from tidemark.app.versions import find_java
from tidemark.sinks.postgres.database import migrate
from tidemark.sources.kafka import KafkaConnection

_CONNECTOR = "connector"


@dataclass(frozen=True, slots=True)
class BenchSite:
    home: Home
    java: str
    jars: Path
    kafka: KafkaServer
    postgres: PostgresServer
    redis: RedisServer
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def connection(self) -> KafkaConnection:
        return KafkaConnection(self.kafka.bootstrap_servers)

    @property
    def connector_jars(self) -> Path:
        """Of Spark's own Kafka source, fetched by the first who asks."""
        description = Path(__file__).with_name("ivy-connector.xml")
        fetch_jars(self.jars, self.java, lambda _: None, JarList(description, (_CONNECTOR,)))
        return self.jars / _CONNECTOR

    @property
    def sinks(self) -> list[int]:
        """The processes of Postgres and Redis, by their IDs."""
        return [pid for pid in (self.postgres.pid, self.redis.pid) if pid is not None]

    def fresh(self, what: str) -> str:
        """A name that was not used here before."""
        return f"{what}_{next(self._numbers)}"

    def directory(self, what: str) -> Path:
        path = self.home.root / self.fresh(what)
        path.mkdir()
        return path

    def database(self) -> str:
        """The DSN of a new database with Tidemark's schema."""
        name = self.fresh("bench")
        with psycopg.connect(self.postgres.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"create database {name}".encode())
        migrate(self.postgres.dsn(name))
        return self.postgres.dsn(name)

    def emptied_redis(self) -> str:
        with redis.Redis.from_url(self.redis.url) as client:
            client.flushall()
        return self.redis.url


@contextmanager
def servers() -> Iterator[BenchSite]:
    """Jars come from TIDEMARK_HOME and are fetched there if need be."""
    settings = load()
    java = find_java(settings.java_home)
    jars = Home(settings.home).jars
    fetch_jars(jars, java, say=lambda _: None)
    subprocess.run(class_archive.CREATE_COMMAND, check=True)
    with (
        tempfile.TemporaryDirectory(prefix="tidemark-bench-", ignore_cleanup_errors=True) as root,
        ExitStack() as stack,
    ):
        home = Home(Path(root))
        site = BenchSite(
            home,
            java,
            jars,
            KafkaServer(home, free_port(), java=java, jars=jars / BROKER),
            PostgresServer(home, free_port()),
            RedisServer(home, free_port()),
        )
        for server in (site.kafka, site.postgres, site.redis):
            server.start()
            stack.callback(server.stop)
        yield site
