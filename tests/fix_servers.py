"""Real servers for tests: started when a test first asks for one, in a home that is thrown away, and shared by all.

A test that stops or kills a server starts it again before it ends. The jars are those of TIDEMARK_HOME.
"""

import itertools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import psycopg
import pytest
import redis
from confluent_kafka.admin import AdminClient
from psycopg import sql

from tests.jvm_classes import ArchivedKafka, broker_options
from tests.services.pgbouncer import PgBouncer, pgbouncer
from tidemark.app.pipeline import class_archive
from tidemark.app.settings import load
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer, ServerProcess, free_port
from tidemark.app.stack.up import BROKER, DEMO_JARS, JDBC, fetch_jars
from tidemark.app.versions import find_java
from tidemark.sinks.postgres.database import migrate
from tidemark.sources.kafka import KafkaConnection

S = TypeVar("S", bound=ServerProcess)
_numbers = itertools.count(1)


@contextmanager
def _started(server: S) -> Iterator[S]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The home of the test servers; nothing of the user's own stack is in it."""
    return Home(tmp_path_factory.mktemp("tidemark"))


@pytest.fixture(scope="session")
def java() -> str:
    return find_java(load().java_home)


@pytest.fixture(scope="session")
def jars(java: str) -> Path:
    """The directory with the jars, one directory for each configuration of `ivy-broker.xml`."""
    directory = Home(load().home).jars
    fetch_jars(directory, java, say=lambda _: None)
    return directory


@pytest.fixture(scope="session")
def jdbc(java: str) -> Path:
    """The directory with Postgres's driver for Java."""
    directory = Home(load().home).jars
    fetch_jars(directory, java, say=lambda _: None, jar_list=DEMO_JARS)
    return directory / JDBC


@pytest.fixture(scope="session")
def archived(java: str, jars: Path, pytestconfig: pytest.Config) -> list[str]:
    """Options of a broker's JVM."""
    return broker_options(java, jars / BROKER, pytestconfig.cache.mkdir("jvm"))


@pytest.fixture(scope="session")
def warm_jvm() -> Iterator[None]:
    """From now on every JVM of Spark's begins with archived classes, and without what pays in a life of minutes."""
    subprocess.run(class_archive.CREATE_COMMAND, check=True, stdout=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JDK_JAVA_OPTIONS", "-XX:+UseSerialGC")
        yield


class Unsynced(PostgresServer):
    """Outlives its own death, but not that of the machine: nothing of it is forced to the disk."""

    def command(self) -> Sequence[str]:
        return [*super().command(), "-c", "fsync=off", "-c", "max_prepared_transactions=10"]

    def run_preparation(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        super().run_preparation([*command, "--no-sync"], environment)


@contextmanager
def own_postgres(directory: Path) -> Iterator[PostgresServer]:
    """Nobody else's: for tests by which others would lose what they committed."""
    with _started(Unsynced(Home(directory), free_port())) as server:
        yield server


@pytest.fixture(scope="session")
def postgres(home: Home) -> Iterator[PostgresServer]:
    with own_postgres(home.root) as server:
        yield server


@contextmanager
def made_database(postgres: PostgresServer, template: str) -> Iterator[str]:
    """The DSN of a database of its own, which begins as the template is."""
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        made = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        connection.execute(made.format(sql.Identifier(name), sql.Identifier(template)))
    yield postgres.dsn(name)
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """The DSN of an empty database that only this test uses."""
    with made_database(postgres, "template1") as dsn:
        yield dsn


@pytest.fixture
def another_database(postgres: PostgresServer) -> Iterator[str]:
    """The DSN of a second one."""
    with made_database(postgres, "template1") as dsn:
        yield dsn


def migrated_template(postgres: PostgresServer) -> str:
    """The name of a database with the schema of the sink, to be copied, which takes half as long as to migrate. Made
    when a test first asks for it."""
    name = "migrated"
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        if connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone() is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            migrate(postgres.dsn(name))
    return name


@pytest.fixture(scope="session")
def _migrated(postgres: PostgresServer) -> str:
    return migrated_template(postgres)


@pytest.fixture
def migrated(postgres: PostgresServer, _migrated: str) -> Iterator[str]:
    """The DSN of a database with the schema of the sink, which only this test uses."""
    with made_database(postgres, _migrated) as dsn:
        yield dsn


@pytest.fixture
def pooler(home: Home, postgres: PostgresServer) -> Iterator[PgBouncer]:
    with _started(PgBouncer(home, free_port(), postgres, pgbouncer() or "pgbouncer")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(home: Home) -> Iterator[RedisServer]:
    with _started(RedisServer(home, free_port())) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of a Redis that is empty as the test begins."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def kafka(home: Home, java: str, jars: Path, archived: list[str]) -> Iterator[KafkaServer]:
    with _started(ArchivedKafka(home, free_port(), java=java, jars=jars / BROKER, options=archived)) as server:
        yield server
        server.kill()  # its orderly end takes seconds, and everything of it is thrown away


@pytest.fixture
def connection(kafka: KafkaServer) -> KafkaConnection:
    return KafkaConnection(kafka.bootstrap_servers)


@pytest.fixture
def admin(connection: KafkaConnection) -> AdminClient:
    return AdminClient(connection.client_settings())


@pytest.fixture
def prefix() -> str:
    """A name that no other test of this run uses, for topics: `f"{prefix}.facts"`."""
    return f"test{next(_numbers)}"


@contextmanager
def away(server: ServerProcess) -> Iterator[None]:
    """The server is stopped meanwhile, and answers again at the end."""
    server.stop()
    try:
        yield
    finally:
        server.start()


@contextmanager
def deaf(server: ServerProcess) -> Iterator[None]:
    """The server's port takes connections and nobody answers them: what a dead disk or a firewall looks like."""
    parent = psutil.Process(server.pid)
    family = [parent, *parent.children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):  # a session that ends just then
            process.suspend()
    try:
        yield
    finally:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()
