"""`tidemark follow`: published positions in a database of readers."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psycopg
import pytest
import redis
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import make_conninfo

from tests.fix_servers import away
from tests.processes import forked
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.terminals import shown_on_a_terminal
from tests.waiting import eventually
from tidemark.app import follow_positions
from tidemark.app.cli import main
from tidemark.app.follow_positions import FollowMetrics, PositionFollower
from tidemark.app.relay import migrate
from tidemark.app.settings import load
from tidemark.app.stack.processes import RedisServer, free_port
from tidemark.sinks.reader_database import install, reader_session
from tidemark.sinks.redis.client import RedisAddress
from tidemark.streaming.core.effects import LateCompletion

FOLLOWER_KILLS = 12


@pytest.fixture
def readers(database: str) -> Iterator[psycopg.Connection]:
    """A database of readers with an append stream `s`, too."""
    migrate(database, ["s"], "forward", say=lambda _: None)
    with reader_session(database, "test") as session:
        install(session)
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def other_stream(readers: psycopg.Connection) -> psycopg.Connection:
    """The same without the stream."""
    readers.execute("delete from tidemark.append_streams")
    return readers


@contextmanager
def following(redis_url: str, database: str) -> Iterator[PositionFollower]:
    halt, failures = threading.Event(), list[BaseException]()
    follower = PositionFollower(RedisAddress(redis_url), database, halt)

    def run() -> None:
        try:
            follower.run()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield follower
    finally:
        halt.set()
        thread.join(20)
        if failures:
            raise failures[0]


def late_fact(prev: int, id_: int) -> LateCompletion:
    return LateCompletion(writer="web", epoch=1, prev=prev, id=id_, facts=1, why="regressed")


def token(readers: psycopg.Connection, stream: str = "s") -> str | None:
    row = readers.execute("select token from tidemark_reader.positions where stream = %s", [stream]).fetchone()
    return row[0] if row else None


def is_at(readers: psycopg.Connection, expected: str) -> Callable[[], bool]:
    return lambda: token(readers) == expected


def test_positions_follow_redis(
    redis_url: str, pipeline: Pipeline, database: str, other_stream: psycopg.Connection
) -> None:
    """Also after Redis lost everything and has less for a while."""
    readers = other_stream
    pipeline.move("web", 0, 5)
    with following(redis_url, database):
        eventually(is_at(readers, "m5"))
        pipeline.move("web", 5, 9, linear=7)
        eventually(is_at(readers, "m7~web.9"))
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
            client.set("tidemark:{s}:linear", 3)
            client.sadd("tidemark:streams", "s")
            client.publish("tidemark:{s}", "POSITION s web 0 3")
        eventually(lambda: readers.execute("select 1").fetchone() is not None)
        assert token(readers) == "m7~web.9"


def test_late_facts_are_handed_out_once(
    redis_url: str, pipeline: Pipeline, database: str, other_stream: psycopg.Connection
) -> None:
    readers = other_stream
    pipeline.move("web", 0, 9)
    taking = "select low, high, late from tidemark_reader.take('s', 'mailer')"
    with following(redis_url, database):
        eventually(is_at(readers, "m9"))
        assert readers.execute(taking).fetchall() == [(0, 9, [])]
        pipeline.publish(stream("s", advance("web", 9, 10), linear=10, late=[late_fact(3, 4)]))
        eventually(is_at(readers, "m10"))
        assert readers.execute(taking).fetchall() == [(9, 10, [4])]
    pipeline.publish(stream("s", advance("web", 10, 11), linear=11, late=[late_fact(4, 5), late_fact(5, 6)]))
    with following(redis_url, database):
        eventually(is_at(readers, "m11"))
        assert readers.execute(taking).fetchall() == [(10, 11, [5, 6])]
        assert readers.execute(taking).fetchall() == []


def test_a_stream_with_writers_here_is_left_to_its_transactions(
    redis_url: str, pipeline: Pipeline, database: str, readers: psycopg.Connection
) -> None:
    readers.execute("update tidemark.append_progress set writer = 'shop'")
    pipeline.move("shop", 0, 9)
    with following(redis_url, database) as follower:
        eventually(lambda: follower.is_local("s"))
        assert token(readers) is None


def test_a_stream_with_writers_elsewhere_is_moved_by_what_is_published(
    redis_url: str, pipeline: Pipeline, database: str, readers: psycopg.Connection
) -> None:
    """Also if they are found only later."""
    readers.execute("update tidemark.append_progress set writer = 'shop'")
    readers.execute("select tidemark_reader.publish('database', array['s'], array[4])")
    with following(redis_url, database) as follower:
        eventually(lambda: follower.is_local("s"))
        pipeline.move("elsewhere", 0, 9)
        eventually(is_at(readers, "m9"))
        assert not follower.is_local("s")


def source(readers: psycopg.Connection) -> str:
    [(source,)] = readers.execute("select source from tidemark_reader.positions where stream = 's'").fetchall()
    return str(source)


def test_positions_are_copied_once_they_have_reached_those_of_the_database(
    redis_url: str, pipeline: Pipeline, database: str, readers: psycopg.Connection
) -> None:
    """A writer elsewhere is found while this database is ahead, also of another writer. Nothing moves until the
    published positions are as far; also across a start of the process. What the database finds out meanwhile about a
    restore still counts."""
    readers.execute("update tidemark.append_progress set writer = 'shop'")
    readers.execute("select tidemark_reader.publish('database', array['s'], array[12], array[jsonb '{\"shop\": 15}'])")
    assert readers.execute("select low, high from tidemark_reader.take('s', 'mailer')").fetchall() == [(0, 12)]
    with following(redis_url, database):
        pipeline.move("elsewhere", 0, 9)
        eventually(lambda: source(readers) == "handover")
        assert token(readers) == "m12~shop.15"
    with following(redis_url, database) as follower:
        pipeline.move("elsewhere", 9, 14, linear=13)
        eventually(lambda: not follower.is_local("s"))
        time.sleep(1.5)  # it has read all streams
        assert (source(readers), token(readers)) == ("handover", "m12~shop.15")
        readers.execute("select tidemark_reader.went_back('s', 7)")
        eventually(is_at(readers, "m13~elsewhere.14"))
        assert source(readers) == "published"
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="went back to ID 7"):
        readers.execute("select * from tidemark_reader.take('s', 'mailer')")


@pytest.mark.parametrize(("epoch", "position"), [(7, "m9"), (6, "m4")])
def test_an_override_moves_the_stream(
    redis_url: str, pipeline: Pipeline, database: str, readers: psycopg.Connection, epoch: int, position: str
) -> None:
    """An operator has settled ID 5, which is open here. An override of an epoch from before a restore is ignored."""
    readers.execute("update tidemark.append_progress set writer = 'shop'")
    readers.execute(
        "insert into tidemark.append_writers (number, writer, epoch, last)"
        " select number, 'shop', 7, 0 from tidemark.append_streams"
    )
    readers.execute("select tidemark_reader.publish('database', array['s'], array[4])")
    with following(redis_url, database) as follower:
        pipeline.publish(stream("s", advance("shop", 0, 4, epoch=epoch, facts=4), linear=4))
        eventually(lambda: follower.is_local("s"))
        pipeline.publish(stream("s", advance("shop", 4, 9, epoch=epoch, skipped=1, facts=4), linear=9, linear_prev=4))
        if epoch == 6:
            time.sleep(2.5)  # it has looked twice
        eventually(is_at(readers, position))


@contextmanager
def relaying(dsn: str, home: Path, **environment: str) -> Iterator[None]:
    """A relay without Kafka, which is killed at the end."""
    variables = {"TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9", "TIDEMARK_HOME": str(home), **environment}
    command = [sys.executable, "-m", "tidemark", "relay", "--dsn", dsn]
    relay = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        relay.kill()
        relay.wait()


def test_a_relay_that_has_no_kafka_and_is_killed_serves_the_readers(
    database: str, readers: psycopg.Connection, tmp_path: Path
) -> None:
    """Each fact has its effects once, in order, whatever dies; some transactions stay open meanwhile, or roll back."""
    readers.execute("create table facts (id bigint)")
    reader = SqlEffects(database)
    appending = "insert into facts select tidemark.append('s', '{}') returning id"
    last = 0
    with reading(reader):
        for number in range(3):
            with relaying(database, tmp_path):
                with psycopg.connect(database) as slow:
                    slow.execute(appending)
                    for _ in range(20):
                        row = readers.execute(appending).fetchone()
                        assert row is not None
                        last = row[0]
                    slow.execute("commit" if number else "rollback")
                if number < 2:
                    eventually(lambda: (token(readers) or "") not in {"", "m0"})
                else:
                    eventually(is_at(readers, f"m{last}"))
                    eventually(lambda: reader.seen() == facts(readers))
    assert reader.seen() == facts(readers)


def test_a_redis_that_is_away_stops_no_stored_stream(
    database: str, readers: psycopg.Connection, redis_url: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Also in a relay that starts meanwhile. A new stream waits for Redis, because it may have writers elsewhere."""
    append(readers, 1)
    with relaying(database, tmp_path, TIDEMARK_REDIS_URL=redis_url):
        eventually(is_at(readers, "m1"))
        with away(redis_server):
            append(readers, 1)
            eventually(is_at(readers, "m2"))
    with ExitStack() as stack:
        with away(redis_server):
            stack.enter_context(relaying(database, tmp_path, TIDEMARK_REDIS_URL=redis_url))
            append(readers, 1)
            eventually(is_at(readers, "m3"))
            readers.execute("select tidemark.create_stream('new')")
            append(readers, 1, "new")
            for last in range(4, 9):
                append(readers, 1)
                eventually(is_at(readers, f"m{last}"))
            assert token(readers, "new") is None
            assert readers.execute("select * from tidemark_reader.take('new', 'mailer')").fetchall() == []
        eventually(lambda: token(readers, "new") == "m1")


def facts(readers: psycopg.Connection) -> list[int]:
    return [id for (id,) in readers.execute("select id from facts order by id").fetchall()]


class SqlEffects:
    """The loop of docs/how-to/read-in-any-language.md; its effects are rows of a table."""

    def __init__(self, dsn: str, most: int = 7) -> None:
        self._dsn = dsn
        self._most = most
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "create table if not exists effects (n bigint generated always as identity, reader text, id bigint)"
            )

    def run(self, halt: threading.Event) -> None:
        with psycopg.connect(self._dsn) as connection:
            while not halt.is_set():
                has_taken = self._take(connection)
                connection.commit()
                if not has_taken:
                    halt.wait(0.05)

    def _take(self, connection: psycopg.Connection) -> bool:
        """Read the next range. Returns whether there was one."""
        query = "select low, high, late from tidemark_reader.take('s', 'mailer', most => %s)"
        taken = connection.execute(query, [self._most]).fetchone()
        if taken is not None:
            connection.execute(
                "insert into effects (reader, id) select 'mailer', id from facts"
                " where id > %s and id <= %s or id = any (%s) order by id",
                taken,
            )
        return taken is not None

    def seen(self, reader: str = "mailer") -> list[int]:
        with psycopg.connect(self._dsn) as connection:
            query = "select id from effects where reader = %s order by n"
            return [id for (id,) in connection.execute(query, [reader]).fetchall()]


@contextmanager
def reading(*readers: SqlEffects) -> Iterator[None]:
    """Run the readers in threads."""
    halt = threading.Event()
    threads = [threading.Thread(target=reader.run, args=(halt,)) for reader in readers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        halt.set()
        for thread in threads:
            thread.join(30)


class SqlVectorEffects(SqlEffects):
    """The same with one range for each writer."""

    def _take(self, connection: psycopg.Connection) -> bool:
        query = "select writer, low, high, late from tidemark_reader.take_vector('s', 'search', most => %s)"
        rows = connection.execute(query, [self._most]).fetchall()
        named = [writer for writer, *_ in rows if writer is not None]
        for writer, low, high, late in rows:
            connection.execute(
                "insert into effects (reader, id) select 'search', id from facts"
                " where (writer = %(writer)s::text or %(writer)s::text is null and writer <> all (%(named)s))"
                " and (id > %(low)s and id <= %(high)s or id = any (%(late)s)) order by id",
                {"writer": writer, "named": named, "low": low, "high": high, "late": late},
            )
        return rows != []


class PublishedFacts:
    """Facts of two writers in a database of readers, and the positions that the pipeline publishes.

    An operator settles some IDs, and the facts of some of them are committed later. A fact that is committed while a
    reader reads its range may be handed out twice (docs/design.md 6b). So the others of these facts come only after
    the readers have passed their IDs, or while nothing copies positions.
    """

    def __init__(self, readers: psycopg.Connection, pipeline: Pipeline, chance: random.Random) -> None:
        readers.execute("create table facts (id bigint primary key, writer text)")
        self.readers = readers
        self.pipeline = pipeline
        self.chance = chance
        self.head = 0
        self.open: dict[str, deque[int]] = {"web": deque(), "till": deque()}
        self.positions = dict.fromkeys(self.open, 0)
        self.settled = dict[int, str]()
        self.passed = set[int]()
        """IDs whose facts were committed after the readers had passed them."""
        self.skipped = set[int]()
        """IDs whose facts were committed after they were settled, and before any reader knew of them."""

    def publish(self, *, is_followed: bool = True, is_last: bool = False) -> None:
        """Give out IDs, end some transactions of each writer, and publish the positions."""
        for _ in range(self.chance.randrange(6)):
            self.head += 1
            self.open[self.chance.choice([*self.open])].append(self.head)
        late = [*self._commit_late(is_followed=is_followed)]
        advances = []
        for writer, ids in self.open.items():
            ended = [ids.popleft() for _ in range(len(ids) if is_last else self.chance.randint(0, len(ids)))]
            if ended:
                facts = [id for id in ended if self.chance.random() < 0.7]
                self._commit(writer, *facts)
                self.settled |= dict.fromkeys(set(ended) - {*facts}, writer)
                prev, self.positions[writer] = self.positions[writer], ended[-1]
                empty, skipped = ended[-1] - prev - len(ended), len(ended) - len(facts)
                advances.append(advance(writer, prev, ended[-1], facts=len(facts), empty=empty, skipped=skipped))
        linear = min((ids[0] - 1 for ids in self.open.values() if ids), default=self.head)
        self.pipeline.publish(stream("s", *advances, linear=linear, late=late))

    def _commit(self, writer: str, *ids: int) -> None:
        self.readers.cursor().executemany("insert into facts values (%s, %s)", [(id, writer) for id in ids])

    def _commit_late(self, *, is_followed: bool) -> Iterator[LateCompletion]:
        for id, writer in [*self.settled.items()]:
            if self._is_passed(id, writer):
                late = self.passed
            elif not is_followed and self._is_unknown(id, writer):
                late = self.skipped
            else:
                continue
            del self.settled[id]
            if self.chance.random() < 0.7:
                late.add(id)
                self._commit(writer, id)
                yield LateCompletion(writer=writer, epoch=1, prev=id - 1, id=id, facts=1, why="skipped")

    def _is_passed(self, id: int, writer: str) -> bool:
        query = """
            select count(*) from tidemark_reader.places
            where case mode when 'vector' then coalesce((positions ->> %s)::bigint, linear) else linear end >= %s
        """
        return self.readers.execute(query, [writer, id]).fetchone() == (2,)

    def _is_unknown(self, id: int, writer: str) -> bool:
        query = "select greatest(linear, (vector ->> %s)::bigint) < %s from tidemark_reader.positions"
        return self.readers.execute(query, [writer, id]).fetchone() == (True,)


def follow(redis_url: str, dsn: str) -> None:
    """`tidemark follow`, forked."""
    follow_positions.run(load(redis_url=redis_url), dsn, None, None, None)


def is_copying(readers: psycopg.Connection) -> bool:
    """Whether a transaction with positions is open."""
    query = """
        select exists (select from pg_stat_activity where datname = current_database() and state <> 'idle'
            and application_name = 'tidemark follow' and query like '%publish%')
    """
    return readers.execute(query).fetchone() == (True,)


def is_connected(readers: psycopg.Connection) -> bool:
    """Whether the follower has a session, also if its process is dead."""
    query = """
        select exists (select from pg_stat_activity where datname = current_database()
            and application_name = 'tidemark follow')
    """
    return readers.execute(query).fetchone() == (True,)


def test_a_follower_that_is_killed_serves_the_readers(
    redis_url: str, pipeline: Pipeline, database: str, other_stream: psycopg.Connection
) -> None:
    """Readers of both modes have each fact once, also facts that come late. Half of the kills hit a transaction that
    copies positions."""
    readers, chance = other_stream, random.Random(38)
    facts_of_writers = PublishedFacts(readers, pipeline, chance)
    # Makes transactions long, so that kills hit them.
    readers.execute(
        "create function linger() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.03); return null; end $$;"
        "create trigger linger after insert or update on tidemark_reader.positions execute function linger();"
        "create trigger linger after insert on tidemark_reader.late_completions execute function linger()"
    )
    effects, inside, follower = SqlEffects(database, most=7), 0, None
    facts_of_writers.publish()
    with following(redis_url, database):
        eventually(lambda: token(readers) is not None)
    with reading(effects, SqlVectorEffects(database, most=7)):
        try:
            for number in range(FOLLOWER_KILLS + 1):
                follower = forked.Process(target=follow, args=(redis_url, database), daemon=True)
                follower.start()
                eventually(lambda: is_connected(readers))
                for _ in range(chance.randrange(1, 8)):
                    facts_of_writers.publish()
                    time.sleep(chance.random() * 0.1)
                if number == FOLLOWER_KILLS:
                    break
                while number % 2 and not is_copying(readers):
                    facts_of_writers.publish()
                assert follower.pid is not None
                os.kill(follower.pid, signal.SIGSTOP)  # so that what is seen is how it dies
                inside += is_copying(readers)
                follower.kill()
                follower.join()
                eventually(lambda: not is_connected(readers))
                for _ in range(chance.randrange(4)):
                    facts_of_writers.publish(is_followed=False)
            facts_of_writers.publish(is_last=True)
            committed = {*facts(readers)}
            eventually(lambda: {*effects.seen()} >= committed and {*effects.seen("search")} >= committed)
        finally:
            if follower is not None:
                follower.kill()
                follower.join()
    assert is_at(readers, f"m{facts_of_writers.head}")()
    assert inside > 1
    assert facts_of_writers.passed
    assert facts_of_writers.skipped
    assert sorted(effects.seen("mailer")) == facts(readers)
    assert sorted(effects.seen("search")) == facts(readers)
    in_time = [id for id in effects.seen() if id not in facts_of_writers.passed]
    assert in_time == sorted(in_time)
    for writer in facts_of_writers.open:
        row = readers.execute("select array_agg(id) from facts where writer = %s", [writer]).fetchone()
        assert row is not None
        own = {*row[0]} - facts_of_writers.passed
        assert [id for id in effects.seen("search") if id in own] == sorted(own)


def scrape(port: int, path: str = "/metrics") -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as problem:
        return problem.code, problem.read().decode()


def samples(port: int) -> dict[str, float]:
    """The metrics of readers, by name, for the reader `mailer`."""
    families = text_string_to_metric_families(scrape(port)[1])
    of_mailer = {"stream": "s", "reader": "mailer"}
    return {it.name: it.value for family in families for it in family.samples if it.labels == of_mailer}


@pytest.fixture
def relay_user(database: str, readers: psycopg.Connection) -> Iterator[str]:
    """The DSN of a user with the role tidemark_relay, and nothing else."""
    readers.execute("drop role if exists follower_of_metrics")
    readers.execute("create role follower_of_metrics login password 'secret' in role tidemark_relay")
    yield make_conninfo(database, user="follower_of_metrics", password="secret")
    readers.execute("drop role follower_of_metrics")


@contextmanager
def serving(command: str, dsn: str, **environment: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A process with metrics and probes, and their port. Killed at the end."""
    port = free_port()
    words = [command, "--dsn", dsn, "--metrics", f"127.0.0.1:{port}"]
    variables = {**environment, "PATH": os.environ["PATH"]}
    process = subprocess.Popen([sys.executable, "-m", "tidemark", *words], env=variables)
    try:
        yield port, process
    finally:
        process.kill()
        process.wait(30)


def append(readers: psycopg.Connection, count: int, stream: str = "s") -> None:
    readers.execute("select tidemark.append(%s, '{}') from generate_series(1, %s)", [stream, count])


@pytest.mark.parametrize("command", ["follow", "relay"])
def test_metrics_of_readers(
    redis_url: str, pipeline: Pipeline, readers: psycopg.Connection, relay_user: str, tmp_path: Path, command: str
) -> None:
    """The process that keeps the positions shows how far each reader lags, and since when. The relay has neither Kafka
    nor Redis."""
    environment = {"TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9", "TIDEMARK_HOME": str(tmp_path)}
    if command == "follow":
        readers.execute("delete from tidemark.append_streams")
        environment = {"TIDEMARK_REDIS_URL": redis_url}

    def move(prev: int, id: int) -> None:
        if command == "follow":
            pipeline.move("web", prev, id)
        else:
            append(readers, id - prev)

    with serving(command, relay_user, **environment) as (port, _):
        move(0, 5)
        eventually(is_at(readers, "m5"))
        readers.execute("select tidemark_reader.take('s', 'mailer')")
        lag = "tidemark_reader_lag_ids"
        eventually(lambda: samples(port).get(lag) == 0)
        assert samples(port)["tidemark_reader_linear_position"] == 5
        assert samples(port)["tidemark_reader_parked"] == 0
        readers.execute(
            "insert into tidemark_reader.parked (reader, stream, id, reason) values ('mailer', 's', 4, 'x')"
        )
        move(5, 9)
        eventually(lambda: samples(port).get(lag) == 4 and samples(port)["tidemark_reader_parked"] == 1)
        eventually(lambda: samples(port)["tidemark_reader_lag_seconds"] > 0)
        readers.execute("select tidemark_reader.take('s', 'mailer')")
        eventually(lambda: samples(port).get(lag) == samples(port)["tidemark_reader_lag_seconds"] == 0)
        readers.execute("delete from tidemark_reader.places")
        eventually(lambda: samples(port) == {})


def test_probes_of_a_follower(
    redis_url: str, pipeline: Pipeline, other_stream: psycopg.Connection, relay_user: str
) -> None:
    """It ends if its rights are taken away."""
    pipeline.move("web", 0, 5)
    with serving("follow", relay_user, TIDEMARK_REDIS_URL=redis_url) as (port, process):
        eventually(is_at(other_stream, "m5"))
        eventually(lambda: scrape(port, "/readyz")[0] == 200)
        assert scrape(port, "/livez")[0] == 200
        assert "tidemark_follow_streams 1.0" in scrape(port)[1]
        other_stream.execute("revoke tidemark_relay from follower_of_metrics")
        assert process.wait(60) == 2


def test_a_follower_that_cannot_read_is_alive_and_not_ready() -> None:
    """A probe must not end a process that waits for a server; one whose loop hangs is ended."""
    metrics = FollowMetrics(CollectorRegistry())
    assert metrics.liveness_problem(time.time()) is None
    assert metrics.readiness_problem() is not None
    metrics.last_read.set_to_current_time()
    assert metrics.readiness_problem() is None
    assert metrics.liveness_problem(time.time() + 100) is not None


def test_follow_migrate_shows_a_bar_on_a_terminal(database: str) -> None:
    """Its one script may wait for a lock. Without a terminal there is no bar, and a second run has nothing to do."""
    program = "from tidemark.app.cli import main; main(['follow', 'migrate'])"
    shown = shown_on_a_terminal(program, environment={"TIDEMARK_POSTGRES_DSN": database})
    assert "1/1" in shown
    assert "scripts/s" in shown
    assert "installed the functions of readers" in shown
    done = CliRunner(env={"TIDEMARK_POSTGRES_DSN": database}).invoke(main, ["follow", "migrate"])
    assert (done.stdout, done.stderr) == ("the functions of readers are up to date\n", "")
