"""Reader processes that are really killed, several copies at once, and servers that go away."""

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess

import psycopg
import pytest

from tests.processes import forked
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService, effect
from tests.waiting import eventually
from tidemark.sinks.reader import Positions, Reader


def serve(redis: str, dsn: str, mode: str, seed: int) -> None:
    """One copy of the service: dies by its own SIGKILL somewhere in a batch, or between two."""
    chance = random.Random(seed)
    with (
        psycopg.connect(dsn, autocommit=True) as sql,
        Positions(redis, dsn) as positions,
        Reader(positions, "s", **ReadingService(redis, dsn, sql).arguments(mode=mode, rows=7)) as reader,
    ):
        for batch in reader:
            for row in batch.rows:
                batch.connection.execute(*effect(row, batch))
                if chance.random() < 0.03:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(chance.random() * 0.01)


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_killed_copies_lose_and_double_nothing(service: ReadingService, pipeline: Pipeline, mode: str) -> None:
    """Two copies of one reader, killed in the middle of batches again and again: effects and truth are equal."""
    chance = random.Random(5)
    copies: list[BaseProcess] = []
    started = killed = 0

    def keep_two() -> None:
        nonlocal started, killed
        killed += sum(copy.exitcode is not None for copy in copies)
        copies[:] = [copy for copy in copies if copy.exitcode is None]
        while len(copies) < 2:
            copies.append(forked.Process(target=serve, args=(service.redis, service.dsn, mode, started), daemon=True))
            copies[-1].start()
            started += 1

    facts: list[int] = []
    positions = {"a": 0, "b": 0}
    try:
        for _ in range(40):
            keep_two()
            ids = {"a": [], "b": []}  # type: dict[str, list[int]]
            last = max(positions.values())
            for id in range(last + 1, last + 9):
                if chance.random() < 0.8:
                    ids[chance.choice("ab")].append(id)
            moves = []
            for writer, own in ids.items():
                service.write(*own, instance=writer)
                facts += own
                empty = last + 8 - positions[writer] - len(own)
                moves.append(advance(writer, positions[writer], last + 8, facts=len(own), empty=empty))
                positions[writer] = last + 8
            pipeline.publish(stream("s", *moves, linear=last + 8))
            time.sleep(0.05)

        def done() -> bool:
            keep_two()
            return len(service.effects()) >= len(facts)

        eventually(done, seconds=60)
    finally:
        for copy in copies:
            copy.kill()
            copy.join()
    assert killed > 2
    assert sorted(service.ids()) == sorted(facts)
    for writer in "ab":
        own = [id for id, who, _, _ in service.effects() if who == writer]
        assert own == sorted(own)
    if mode == "linear":
        assert service.ids() == sorted(facts)


def test_lost_sessions_are_made_again(service: ReadingService, pipeline: Pipeline) -> None:
    """The reader's sessions are cut between batches: it goes on from the place that is kept."""
    with service.running() as alive:
        for id in range(1, 5):
            service.write(id)
            pipeline.move("w", id - 1, id)
            eventually(lambda id=id: service.ids() == [*range(1, id + 1)] or not alive())  # type: ignore[misc]
            service.sql.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name like 'tidemark reader copier%' and datname = current_database()"
            )
    assert service.ids() == [1, 2, 3, 4]
