"""Readers in SQL, killed at random, while their database goes back: compared with the table as in a simulation."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import psycopg
import pytest

from tests.processes import forked
from tests.sources.relay.position_world import SteppedKeeper
from tests.waiting import eventually
from tidemark.app.settings import load
from tidemark.app.simulation import workload
from tidemark.app.simulation.script import Fault, PlannedFault, SimulatedStream
from tidemark.app.simulation.source_faults import SourceFaults
from tidemark.app.simulation.sql_readers import READERS, SqlReaderRole, run_sql_reader
from tidemark.app.simulation.streams import SQL_PROCESSES, StreamsCount, StreamsVerification
from tidemark.app.simulation.workload import SimulationDatabases
from tidemark.app.stack.home import Home

STREAMS = [SimulatedStream("events"), SimulatedStream("backfill", "backward")]
WRITERS = ["w1", "w2", "w3", "w4"]
ROUNDS = 6


def serve(dsn: str, log: Path) -> None:
    """One copy of the readers; it logs to the file that the operator follows."""
    sys.stdout = log.open("a", buffering=1)
    run_sql_reader(SqlReaderRole(STREAMS), dsn, threading.Event())


class World:
    """Writers, what keeps the positions, copies of the readers, and faults. While `still` is held nobody writes."""

    def __init__(self, dsn: str, readers: str, home: Home, verification: StreamsVerification) -> None:
        self.dsn = dsn
        self.readers = readers
        self.home = home
        self.verification = verification
        databases = SimulationDatabases(home, dsn, dsn, dsn, readers)
        self.faults = SourceFaults(load(), databases, STREAMS, "w1", verification)
        self.keeper = SteppedKeeper(dsn)
        self.still = threading.Lock()
        self.ending = threading.Event()
        self.chance = random.Random(38)
        self.copies = dict[str, BaseProcess]()
        self.started = 0

    def write(self) -> None:
        chance = random.Random(7)
        with psycopg.connect(self.dsn, autocommit=True) as sql:
            for number in count():
                if self.ending.wait(0.01):
                    return
                stream, writer = chance.choice(STREAMS).name, WRITERS[number % len(WRITERS)]
                with self.still, suppress(psycopg.IntegrityError, ZeroDivisionError), sql.transaction():
                    ((id,),) = sql.execute("select tidemark.append_as(%s, %s, '1')", [writer, stream]).fetchall()
                    sql.execute(
                        f"insert into demo.{stream} (stream_id, part, writer, written_at)"
                        " values (%s, 1, %s, now())".encode(),
                        [id, writer],
                    )
                    if chance.random() < 0.1:
                        raise ZeroDivisionError

    def keep_positions(self) -> None:
        while not self.ending.wait(0.02):
            with self.still:
                self.keeper.round()

    def are_connected(self) -> bool:
        with psycopg.connect(self.dsn) as sql:
            query = "select count(*) from pg_stat_activity where usename = %s and datname = current_database()"
            return sql.execute(query, [workload.LOGINS[1]]).fetchone() == (len(SQL_PROCESSES),)

    def is_beyond_rows(self) -> bool:
        """Whether the sequences have passed all rows: until then a position waits for the IDs of rows beyond."""
        with psycopg.connect(self.dsn) as sql:
            heads = workload.read_floors_and_heads(sql)
            query = "select coalesce(max(abs(stream_id)), 0) from demo.{}"
            rows = {stream.name: sql.execute(query.format(stream.name).encode()).fetchone() for stream in STREAMS}
            return all(row is not None and heads[name][1] >= row[0] for name, row in rows.items())

    def keep_copies(self) -> None:
        for name in SQL_PROCESSES:
            if name not in self.copies or self.copies[name].exitcode is not None:
                log = self.home.log(f"simulate-{name}")
                self.copies[name] = forked.Process(target=serve, args=(self.readers, log), daemon=True)
                self.copies[name].start()
                self.started += 1

    def kill(self) -> None:
        process = self.copies[self.chance.choice(SQL_PROCESSES)]
        process.kill()
        process.join()

    def go_back(self, fault: Fault) -> None:
        """The positions are looked at before anybody writes again (docs/design.md 6b: a set-back between two looks)."""
        self.faults.begin(PlannedFault(0.0, fault, self.chance.random(), 0.2))
        while self.faults.pending_count:
            with self.still:
                self.faults._step()
                self.keeper.round()
            time.sleep(0.1)

    def remedy(self) -> None:
        self.faults._run_remedies(float("inf"))

    def counts(self, *, final: bool = False) -> dict[str, StreamsCount]:
        return {count.reader: count for count in self.verification.counts(is_final=final) if count.reader in READERS}


@contextmanager
def world(database: str, home: Home) -> Iterator[World]:
    workload.prepare_writing(database)
    workload.make_fact_tables(database, STREAMS)
    workload.make_effect_tables(database)
    _, readers = workload.make_logins(database, STREAMS)
    home.log("simulate-relay").parent.mkdir(parents=True, exist_ok=True)
    with StreamsVerification(database, database, STREAMS) as verification:
        made = World(database, readers, home, verification)
        threads = [threading.Thread(target=work, daemon=True) for work in (made.write, made.keep_positions)]
        for thread in threads:
            thread.start()
        try:
            yield made
        finally:
            made.ending.set()
            for thread in threads:
                thread.join(30)
            for process in made.copies.values():
                process.kill()
                process.join()
            made.keeper.die()


@pytest.mark.slow
def test_nothing_is_missed_doubled_or_out_of_order(database: str, tmp_path: Path) -> None:
    """Of both directions, alone and in partitions; sequences are set back, tables and sequences are restored in place,
    and operators move readers as the errors of `take` say."""
    with world(database, Home(tmp_path)) as made:
        for number in range(ROUNDS):
            made.keep_copies()
            eventually(made.are_connected, seconds=60)
            time.sleep(made.chance.random() / 2)
            made.kill()
            if number % 3 == 2:
                made.go_back(Fault.RESTORE_IN_PLACE if number % 2 else Fault.SEQUENCE_BACK)
            made.remedy()
            assert {count.reader: count for count in made.counts().values() if not count.is_correct} == {}
        eventually(made.is_beyond_rows, seconds=60)
        made.ending.set()

        def is_complete() -> bool:
            made.keep_copies()
            made.remedy()
            made.keeper.round()
            return all(count.is_complete for count in made.counts(final=True).values())

        eventually(is_complete, seconds=120, what=lambda: str(made.counts(final=True)))
        logs = "".join(made.home.log(f"simulate-{name}").read_text() for name in SQL_PROCESSES)
        assert "went back to ID" in logs
        assert made.started > ROUNDS
        for counts in made.counts(final=True).values():
            assert counts.written > 100
