"""What a start finds that the last run did not leave so: half a load, old checkpoints or no place for any, a database
from a backup; and a database that goes back under a pipeline that runs."""

import shutil
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import redis

from tests.app.proofs import RedisWatcher, as_undisturbed, settled
from tests.app.running import PATIENCE
from tests.fix_pipeline import ROOT, Site
from tests.play.cast import Cast
from tests.waiting import eventually
from tidemark.app.pipeline.engine import SLOW_PYTHON_START
from tidemark.app.pipeline.supervisor import MAX_FAILURES

pytestmark = pytest.mark.slow

CAST = Cast(streams=3, writers=3, rate=200.0)


def test_what_a_start_finds_behind_or_beyond_the_database_leaves_no_trace(site: Site) -> None:
    """Rules 2, 3 and 5: SIGTERM ends the batch in hand, with code 0 within ten seconds; with the folder for
    checkpoints deleted the next start comes to the positions and the history of an undisturbed run. Then Postgres is
    set back behind Redis: everything since is applied once more and once only, and no reader of Redis sees a step back
    meanwhile."""
    play = site.play(seed=11, cast=CAST)
    play.until(20.0)
    first = site.start(max_records_per_batch=100)
    eventually(lambda: len(site.sql("select 1 from tidemark.applied_batches")) >= 5, PATIENCE, lambda: "five batches")
    first.terminate()
    assert "The pipeline has stopped" in first.log()
    head = sum(end for (end,) in site.sql("select next from tidemark.kafka_offsets"))  # type: ignore[misc]
    assert 0 < head < play.sent, "there was no load left"
    eventually(first.alone, PATIENCE, lambda: "the end of the JVM, which may still write to the checkpoint")
    shutil.rmtree(site.checkpoint)
    second = site.start()
    site.shows(play)
    as_undisturbed(site)
    second.terminate()

    backup = site.snapshot()
    third = site.start()
    for now in (24.0, 28.0, 30.0):  # batches that the backup has not
        play.until(now)
        site.shows(play)
    third.terminate()
    site.restore(backup)
    with RedisWatcher(site, play) as watcher:
        site.start()
        play.until(34.0)
        play.end()
        site.shows(play)
    assert watcher.looks
    assert not watcher.wrong
    settled(site)


class Failover:
    """Takes the database back, at `lose`, to what it held when this was made; sessions and the lease stay."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._tables = [
            str(name)
            for (name,) in site.sql(
                "select relname from pg_class c where relnamespace = 'tidemark'::regnamespace and relkind in ('r', 'p')"
                " and not relispartition and relname not in ('schema_version', 'query_lease')"
            )
        ]
        copies = "".join(f"create table saved.{name} as table tidemark.{name};" for name in self._tables)
        self._at_once(f"create schema saved; {copies}")

    def lose(self) -> None:
        back = "".join(
            f"delete from tidemark.{name}; insert into tidemark.{name} overriding system value table saved.{name};"
            for name in self._tables
        )
        self._at_once(back)

    def _at_once(self, statements: str) -> None:
        """Between two batches: each holds the lease's row."""
        lock = "select token from tidemark.query_lease for update"
        with psycopg.connect(self._site.dsn) as connection:
            connection.execute(lock)
            connection.execute(statements.encode())


def torn(place: Path) -> None:
    """What a killed process left, as a disk that was full leaves it."""
    files = list(place.glob("query-*/state/**/*.delta"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:7])


def of_an_older_version(place: Path) -> None:
    """It kept its one checkpoint in the place itself."""
    for name in ("metadata", "seed", "offsets/7", "commits/9"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(b"older")


def test_old_checkpoints_are_not_looked_at_and_lost_commits_made_again(site: Site) -> None:
    """Rules 2, 3 and 5: whatever lies in the folder for checkpoints, the query begins from Postgres and goes on where
    the one before was, at the first attempt. Then a failover takes the newest commits back under the pipeline that
    runs: it begins anew with what is left, every record counts once, and no reader of Redis sees a step back. Fences
    that owners left in Redis of whom this database knows nothing are passed in one step."""
    play = site.play(seed=14, cast=CAST)
    running = site.start().ready()
    for number, damage in enumerate((torn, of_an_older_version)):
        play.until(5.0 * number + 3.0)
        site.shows(play)
        running.kill()
        eventually(running.alone, PATIENCE, lambda: "the end of the JVM, which may still write to the checkpoint")
        damage(site.checkpoint)
        running = site.start()
        play.until(5.0 * number + 5.0)
        site.shows(play)
        assert "could not start; trying again" not in running.log()
    left = sorted(path.name for path in site.checkpoint.iterdir() if not path.name.startswith("query-"))
    assert left == ["commits", "metadata", "offsets", "seed"]
    assert len(list(site.checkpoint.glob("query-*"))) == 1
    as_undisturbed(site)

    with RedisWatcher(site, play) as watcher:
        failover = Failover(site)
        for now in (13.0, 16.0):
            play.until(now)
            site.shows(play)
        failover.lose()
        play.until(19.0)
        running.says("commits were lost")
        site.shows(play)
        (((token,)),) = site.sql("select token from tidemark.query_lease")
        with redis.Redis.from_url(site.redis_url, decode_responses=True) as client:
            for name in client.smembers("tidemark:streams"):
                client.hset(f"tidemark:{{{name}}}:fence", "token", int(str(token)) + 10**9)
        play.until(22.0)
        play.end()
        site.shows(play)
    assert running.log().count("the lease was taken over") == 1
    assert watcher.looks
    assert not watcher.wrong
    settled(site)


SLOW = """
import os, sys, time
from pathlib import Path

if any("python_streaming_source_runner" in word for word in sys.orig_argv):
    starts = Path(__file__).parent / "starts"
    starts.mkdir(exist_ok=True)
    if len([*starts.iterdir()]) <= {failures}:
        (starts / str(os.getpid())).touch()
        time.sleep(12)
"""


def test_a_machine_that_is_too_busy_for_spark_only_delays_the_start(site: Site) -> None:
    """Spark gives a Python process ten seconds to start. However often that is too little, the pipeline goes on, and
    its log says what it waits for."""
    slow = site.home / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW.format(failures=MAX_FAILURES))
    play = site.play(seed=3, cast=CAST)
    play.until(2.0)
    busy = replace(site, variables={**site.variables, "PYTHONPATH": f"{slow}:{ROOT}"})
    running = busy.start()
    running.says(SLOW_PYTHON_START, 3 * PATIENCE, times=MAX_FAILURES + 1)
    play.end()
    site.shows(play)
