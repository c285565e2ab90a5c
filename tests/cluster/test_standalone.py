"""The pipeline on a Spark standalone cluster of two workers, one of which dies. Run by `make cluster-test`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.feeding import PlayFeed
from tests.app.running import PATIENCE, Running
from tests.cluster.standalone import ClusterWorker, Master
from tests.fix_pipeline import Site
from tests.play.cast import Cast
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import free_port

SPEED = 5.0  # seconds of the play in one of ours


@pytest.fixture
def disks(site: Site) -> Path:
    """The path of the checkpoint, which on each worker is on another disk."""
    site.checkpoint.mkdir(parents=True)
    return site.checkpoint


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(Home(tmp_path / "spark"), free_port())
    master.start()
    yield master
    master.stop()


@pytest.fixture
def workers(master: Master, disks: Path) -> Iterator[list[ClusterWorker]]:
    workers = [ClusterWorker(master.home, master, number, disks) for number in (1, 2)]
    for worker in workers:
        worker.start()
    yield workers
    for worker in workers:
        worker.stop(seconds=5)


def start(site: Site, master: Master, **changed: Any) -> Running:
    return site.start(spark_master=master.url, spark_executor_memory="512m", shards=8, **changed).ready()


def plays(play: PlayFeed, since: float, until: float) -> None:
    """Facts flow from `since` to `until`, seconds of the play, while time passes."""
    moment = since
    while moment < until:
        moment += 1.0
        play.until(moment)
        time.sleep(1.0 / SPEED)


def test_positions_survive_the_death_of_a_worker(site: Site, master: Master, workers: list[ClusterWorker]) -> None:
    """Rules 1 to 5: two workers that see neither each other's disk nor the driver's give the positions of the truth;
    when one of them dies with its states while facts flow, the query begins anew from Postgres on the other."""
    play = site.play(7, Cast(streams=6, writers=3, rate=50.0))
    running = start(site, master)
    plays(play, 0, 40)
    running.says("Published a batch", times=2)
    workers[0].crash()
    plays(play, 40, 80)
    running.says("could not start; trying again")
    running.says("The query runs", times=2)
    play.end()
    site.shows(play)
    running.terminate()


def test_states_are_missed_before_a_batch_waits_for_them(
    site: Site, master: Master, workers: list[ClusterWorker]
) -> None:
    """A worker dies while nothing is to be done: the query begins anew at once. Spark would have found out with the
    next batch, after two minutes of waiting for the dead."""
    play = site.play(7, Cast(streams=6, writers=3, rate=50.0))
    running = start(site, master)
    plays(play, 0, 40)
    running.says("Published a batch", times=2)
    time.sleep(3.0)  # until no batch is in hand
    workers[0].crash()
    running.says("a Spark executor ended, and its states were lost")
    running.says("The query runs", times=2)
    plays(play, 40, 60)
    play.end()
    site.shows(play)
    running.terminate()


def test_without_an_executor_it_is_not_ready_and_says_so(
    site: Site, master: Master, disks: Path, tmp_path: Path
) -> None:
    """The query runs and none of its batches can: that is told where people look, until a worker comes."""
    play = site.play(7, Cast(streams=2, writers=2, rate=20.0))
    running = site.start(spark_master=master.url, spark_executor_memory="512m", shards=8)
    running.says("no Spark executor has registered")
    play.until(10)
    assert running.metric("tidemark_pipeline_ready") == 0.0
    assert time.time() - (running.metric("tidemark_last_batch_timestamp_seconds") or 0.0) < 3600
    worker = ClusterWorker(master.home, master, 1, disks)
    worker.start()
    try:
        running.ready()
        play.end()
        site.shows(play)
        running.terminate()
    finally:
        worker.stop(seconds=5)


def test_with_a_store_the_query_outlives_a_worker(
    site: Site, master: Master, workers: list[ClusterWorker], tmp_path: Path
) -> None:
    """States that lie where both workers reach them: one dies while facts flow, and the same query goes on."""
    play = site.play(8, Cast(streams=6, writers=3, rate=50.0))
    store = tmp_path / "store"
    running = start(site, master, checkpoint_store=store.as_uri())
    plays(play, 0, 40)
    running.says("Published a batch", times=2)
    workers[0].crash()
    plays(play, 40, 80)
    play.end()
    site.shows(play)
    assert running.log().count("The query runs") == 1
    running.terminate()
    assert [*store.iterdir()] == []


def test_with_a_store_executors_come_with_the_work(
    site: Site, master: Master, workers: list[ClusterWorker], tmp_path: Path
) -> None:
    """One to begin with; tasks of the cold first batch wait for more than a second, so Spark asks for the other."""
    play = site.play(9, Cast(streams=6, writers=3, rate=50.0))
    store = (tmp_path / "store").as_uri()
    running = start(site, master, checkpoint_store=store, spark_executors=1, spark_executors_max=2)
    assert sum(worker.executors for worker in workers) == 1
    plays(play, 0, 40)
    eventually(lambda: [worker.executors for worker in workers] == [1, 1], PATIENCE)
    plays(play, 40, 60)
    play.end()
    site.shows(play)
    assert running.log().count("The query runs") == 1
    running.terminate()
