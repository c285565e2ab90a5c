"""Readers in partitions: copies share them, in any form, and the facts of a key stay in order."""

import hashlib
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

import psycopg
import pytest

from tests.processes import forked
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService, effect
from tests.waiting import eventually
from tidemark.common.errors import BadSetting, ReaderPartitionsChanged
from tidemark.sinks.reader import Positions, Reader, Table, partitions
from tidemark.sinks.reader_database import StreamUpdate, install, publish, reader_session
from tidemark.streaming.core.effects import LateCompletion

KEYS = ["ann", "bob", "cid", "dan", "eve"]


@pytest.fixture(params=["threads", "asyncio"])
def copier(service: ReadingService, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReadingService:
    monkeypatch.setattr(partitions, "HEARTBEAT_SECONDS", 0.1)
    service.form = request.param
    service.given = {"partitions": 4, "key": "instance"}
    return service


def write_keys(service: ReadingService, first: int, last: int) -> None:
    for id in range(first, last + 1):
        service.write(id, instance=KEYS[id % len(KEYS)])


def require_order(service: ReadingService, count: int) -> None:
    """Each fact once, and those of a key in order."""
    effects = service.effects()
    assert sorted(id for id, *_ in effects) == [*range(1, count + 1)]
    for key in KEYS:
        own = [id for id, instance, *_ in effects if instance == key]
        assert own == sorted(own)


def test_every_partition_is_read_in_order_of_keys(copier: ReadingService, pipeline: Pipeline) -> None:
    """By one copy, then by two; rows without a key are in the partition of the empty key."""
    write_keys(copier, 1, 20)
    pipeline.move("w", 0, 20)
    copier.until(lambda: len(copier.effects()) == 20, rows=3)
    write_keys(copier, 21, 40)
    with copier.running(rows=3) as alive, copier.running(rows=3) as other:
        pipeline.move("w", 20, 40)
        eventually(lambda: len(copier.effects()) == 40 or not alive() or not other())
    require_order(copier, 40)
    copier.write(41, instance=None)
    pipeline.move("w", 40, 41)
    copier.until(lambda: len(copier.effects()) == 41)


def test_places_are_those_of_take(copier: ReadingService, pipeline: Pipeline) -> None:
    """A program in another language goes on where a copy in Python ended, and the reverse."""
    write_keys(copier, 1, 10)
    pipeline.move("w", 0, 10)
    copier.until(lambda: places(copier) == [(f"copier[{number}/4]", 10) for number in range(4)])
    with reader_session(copier.dsn, "test") as session:
        install(session)
        publish(session, {"s": StreamUpdate(12, {})})
    query = "select low, high from tidemark_reader.take('s', 'copier', partition => %s, partitions => 4)"
    write_keys(copier, 11, 15)
    for number in range(4):
        assert copier.sql.execute(query, [number]).fetchall() == [(10, 12)]
    pipeline.move("w", 10, 15)
    copier.until(lambda: len(copier.effects()) == 13)
    assert sorted(copier.ids()) == [*range(1, 11), 13, 14, 15]
    for number in range(4):
        condition = partitions.Partitioning(4, "instance").table(Table("facts"), number).where
        different = f"select from facts where (tidemark_reader.partition_of(instance, 4) = {number}) <> ({condition})"
        assert copier.sql.execute(different.encode()).fetchall() == []


def places(service: ReadingService) -> list[tuple[str, int]]:
    try:
        return service.sql.execute(
            "select reader, linear from tidemark_reader.places where version > 0 order by reader"
        ).fetchall()
    except psycopg.errors.UndefinedTable:
        return []


def serve(redis: str, dsn: str, seed: int, kills: float) -> None:
    """One copy, which dies by its own SIGKILL somewhere in a batch, or between two."""
    chance = random.Random(seed)
    with (
        psycopg.connect(dsn, autocommit=True) as sql,
        Positions(redis, dsn) as positions,
        Reader(
            positions,
            "s",
            **ReadingService(redis, dsn, sql).arguments(rows=5, partitions=8, key="instance"),
        ) as reader,
    ):
        for batch in reader:
            for row in batch.rows:
                batch.connection.execute(*effect(row, batch, f"{os.getpid()}"))
                if chance.random() < kills:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(chance.random() * 0.01)


class Copies:
    """Processes of one reader."""

    def __init__(self, service: ReadingService) -> None:
        self._service = service
        self.processes: list[BaseProcess] = []
        self.started = self.killed = 0

    def keep(self, count: int, kills: float = 0.0) -> None:
        self.killed += sum(copy.exitcode is not None for copy in self.processes)
        self.processes[:] = [copy for copy in self.processes if copy.exitcode is None]
        while len(self.processes) < count:
            arguments = (self._service.redis, self._service.dsn, self.started, kills)
            self.processes.append(forked.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            self.started += 1

    def end(self) -> None:
        for copy in self.processes:
            copy.kill()
            copy.join()


def all_effects(service: ReadingService) -> list[tuple[int, str, str]]:
    return service.sql.execute("select stream_id, instance, reader from effects order by n").fetchall()


def test_killed_copies_lose_and_double_nothing(service: ReadingService, pipeline: Pipeline) -> None:
    """Three copies, killed in the middle of batches again and again: effects and table are equal, in order of keys."""
    chance = random.Random(38)
    copies = Copies(service)
    try:
        last, facts = 0, dict[int, str]()
        for _ in range(40):
            copies.keep(3, kills=0.03)
            written = {id: chance.choice(KEYS) for id in range(last + 1, last + 9) if chance.random() < 0.8}
            for id, key in written.items():
                service.write(id, instance=key)
            facts |= written
            pipeline.publish(
                stream("s", advance("w", last, last + 8, facts=len(written), empty=8 - len(written)), linear=last + 8)
            )
            last += 8
            time.sleep(0.05)

        def done() -> bool:
            copies.keep(3, kills=0.03)
            return len(all_effects(service)) >= len(facts)

        eventually(done, seconds=120)
    finally:
        copies.end()
    assert copies.killed > 2
    effects = all_effects(service)
    assert sorted((id, key) for id, key, _ in effects) == sorted(facts.items())
    for key in KEYS:
        own = [id for id, instance, _ in effects if instance == key]
        assert own == sorted(own)
    assert len({reader for *_, reader in effects}) > 3


def test_copies_share_the_partitions_until_one_dies(service: ReadingService, pipeline: Pipeline) -> None:
    """Both work; after a kill -9 the other one has all, within the time for which a copy counts as alive."""
    copies = Copies(service)
    count = 0

    def move_on() -> None:
        nonlocal count
        for id in range(count + 1, count + 11):
            service.write(id, instance=f"key {id}")
        pipeline.move("w", count, count + 10)
        count += 10

    def shared() -> bool:
        if len(all_effects(service)) == count:
            move_on()
        return len({reader for *_, reader in all_effects(service)[-20:]}) == 2

    def is_read() -> bool:
        return len(all_effects(service)) == count

    try:
        copies.keep(2)
        move_on()
        eventually(shared, seconds=60)
        eventually(is_read, seconds=60)
        dead = copies.processes[0]
        dead.kill()
        dead.join()
        for _ in range(3):
            move_on()
            eventually(is_read, seconds=60)
        assert {reader for *_, reader in all_effects(service)[-10:]} == {f"{copies.processes[1].pid}"}
    finally:
        copies.end()


@pytest.mark.parametrize("other", [{"partitions": 3, "key": "instance"}, {"partitions": None, "key": None}])
def test_the_number_of_partitions_is_not_changed_in_silence(
    copier: ReadingService, pipeline: Pipeline, other: dict[str, Any]
) -> None:
    """Facts would be read twice: the reader stops, and the stored function changes the number."""
    write_keys(copier, 1, 10)
    pipeline.move("w", 0, 10)
    copier.until(lambda: [linear for _, linear in places(copier)] == [10] * 4)
    with pytest.raises(ReaderPartitionsChanged, match=r"copier.* has another number of partitions than copier"):
        copier.until(lambda: False, **other)
    with reader_session(copier.dsn, "test") as session:
        install(session)
    if other["partitions"]:
        copier.sql.execute("select tidemark_reader.repartition('s', 'copier', 3)")
        write_keys(copier, 11, 20)
        pipeline.move("w", 10, 20)
        copier.until(lambda: len(copier.effects()) == 20, **other)
        require_order(copier, 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partitions": 4},
        {"key": "instance"},
        {"partitions": 0, "key": "instance"},
        {"partitions": 1001, "key": "instance"},
        {"partitions": 4, "key": "instance", "mode": "vector"},
    ],
)
def test_partitions_that_make_no_sense_are_refused(service: ReadingService, wrong: dict[str, Any]) -> None:
    with Positions(service.redis) as positions, pytest.raises(BadSetting, match="partitions"):
        Reader(positions, "s", **service.arguments(**wrong))


def test_withdrawn_ids_do_not_depend_on_the_partition(copier: ReadingService, pipeline: Pipeline) -> None:
    """An ID whose new fact is in another partition had its effects in the former one: both partitions get it."""
    copier.write(1, 2, 3, instance="ann")
    pipeline.move("w", 0, 3)
    copier.until(lambda: [linear for _, linear in places(copier)] == [3] * 4)
    copier.sql.execute("update facts set instance = 'bob' where stream_id = 2")
    copier.given["table"] = Table("facts", then=("ordinal",))
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[LateCompletion("w", 1, 1, 3, 1, "regressed")]))
    copier.until(lambda: len(copier.withdrawn) == 4)
    assert copier.withdrawn == [[(2, 3)]] * 4


def test_partitions_take_turns(service: ReadingService, pipeline: Pipeline) -> None:
    """A partition with many facts delays the others, and the note that the copy runs, by a batch and not by all."""
    for id in range(1, 61):
        service.write(id, instance=KEYS[id % len(KEYS)])
    pipeline.move("w", 0, 60)
    keyed = service.arguments(rows=2, partitions=4, key="instance")
    with Positions(service.redis, service.dsn) as positions, Reader(positions, "s", **keyed) as reader:
        first = [next(reader).partition for _ in range(6)]
    used = {partition_of(key) for key in KEYS}
    assert first == [*sorted(used), *sorted(used), *sorted(used)][:6]


def partition_of(key: str) -> int:
    return int(hashlib.md5(key.encode()).hexdigest()[:8], 16) % 4
