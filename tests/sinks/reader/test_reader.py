"""What handlers do to the loop of a service: fail, end its transaction, fork, take long, are cancelled; both forms."""

import asyncio
import os
import threading
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService, effect
from tests.waiting import eventually
from tidemark.common.errors import Refused, RowUnreadable, TransactionEnded
from tidemark.sinks.reader import AsyncPositions, AsyncReader, Place, Positions, Reader, Table, Token
from tidemark.sinks.reader.batch import Parking
from tidemark.sinks.reader.checkpoint import CheckpointStore


@pytest.fixture
def three(service: ReadingService, pipeline: Pipeline) -> ReadingService:
    """With three facts to be read."""
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3)
    return service


def parked(service: ReadingService) -> list[tuple[str, str, int, str]]:
    return service.sql.execute("select reader, stream, id, reason from tidemark_reader.parked order by id").fetchall()


def fail_on(row: dict[str, Any]) -> None:
    if row["stream_id"] == 2:
        raise ValueError("no such \0 order \udcff")


REASON = "ValueError: no such ? order ?"


def test_fact_that_fails_is_parked_where_the_service_says_so(three: ReadingService) -> None:
    """Its effects are taken back, its ID and the reason stay in a table, and the loop goes on with the next one."""
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments()) as reader:
        batch = next(reader)
        for id, rows in batch.facts():
            with batch.parking(id, ValueError):
                for row in rows:
                    batch.connection.execute(*effect(row, batch))
                    fail_on(row)
        assert parked(three) == []
        reader._stopping.set()
        assert next(reader, None) is None
    assert three.ids() == [1, 3]
    assert three.place().linear == 3
    assert parked(three) == [("copier", "s", 2, REASON)]


def test_asyncio_parks_too(three: ReadingService) -> None:
    """The same with `async with`."""

    async def main() -> None:
        async with (
            AsyncPositions(three.redis) as positions,
            AsyncReader(positions, "s", **three.arguments(rows=2)) as reader,
        ):
            async for batch in reader:
                for id, rows in batch.facts():
                    async with batch.parking(id, ValueError):
                        for row in rows:
                            await batch.connection.execute(*effect(row, batch))
                            fail_on(row)
                if id == 3:
                    break

    asyncio.run(main())
    assert three.ids() == [1]
    assert parked(three) == [("copier", "s", 2, REASON)]


@pytest.mark.parametrize(
    "error", [psycopg.errors.DeadlockDetected(), psycopg.OperationalError("lost"), KeyError("another")]
)
def test_what_mends_by_itself_is_not_parked(database: str, error: Exception) -> None:
    """A deadlock, a lost connection, and errors that were not named, leave the loop."""
    with psycopg.connect(database, autocommit=True) as connection:
        parking = Parking(CheckpointStore("r", "s", "linear"), connection, 1, (ValueError, psycopg.Error))
        with pytest.raises(type(error)), parking:
            raise error


@pytest.mark.parametrize("statement", ["commit", "rollback", "commit; begin"])
def test_batch_whose_transaction_was_ended_stops_the_reader(three: ReadingService, statement: str) -> None:
    """Its place is not written, so that no fact is passed whose effects may be gone."""
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments()) as reader:
        batch = next(reader)
        batch.connection.execute(statement)
        with pytest.raises(TransactionEnded, match="COMMIT or ROLLBACK"):
            next(reader)
    assert three.place() == Place()


@pytest.mark.parametrize("closes", [True, False])
def test_loop_that_is_begun_again_does_the_batch_again(three: ReadingService, closes: bool) -> None:
    """It was left in the middle of a batch, as by an error, and the same reader goes on: nothing of it is committed."""
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments()) as reader:
        for batch in reader:
            batch.connection.execute(*effect(batch.rows[0], batch))
            break
        if closes:
            reader.close()
        for batch in reader:
            assert three.ids() == []
            for row in batch.rows:
                batch.connection.execute(*effect(row, batch))
            reader._stopping.set()
    assert three.ids() == [1, 2, 3]


def test_asyncio_does_a_batch_again_too(three: ReadingService) -> None:
    """The same with `async for`."""

    async def main() -> list[int]:
        async with AsyncPositions(three.redis) as positions, AsyncReader(positions, "s", **three.arguments()) as reader:
            async for batch in reader:
                await batch.connection.execute(*effect(batch.rows[0], batch))
                break
            async for batch in reader:
                return [row["stream_id"] for row in batch.rows]
        return []

    assert asyncio.run(main()) == [1, 2, 3]
    assert three.ids() == []


def test_driver_refuses_to_end_the_transaction(three: ReadingService) -> None:
    """So does what is built on it: the transaction of a batch is nobody's to commit."""
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments()) as reader:
        batch = next(reader)
        for end in (batch.connection.commit, batch.connection.rollback):
            with pytest.raises(psycopg.ProgrammingError):
                end()
        batch.connection.execute(*effect(batch.rows[0], batch))


def test_error_that_was_swallowed_is_said(three: ReadingService) -> None:
    """After a failed statement nothing of the batch can be committed; the text says how to put it into a savepoint."""
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments()) as reader:
        batch = next(reader)
        with suppress(psycopg.Error):
            batch.connection.execute("select 1/0")
        with pytest.raises(Refused, match="savepoint"):
            next(reader)
    assert three.place() == Place()


@pytest.mark.parametrize("value", ["'infinity'::timestamptz", "(repeat('[', 5000) || repeat(']', 5000))::json"])
def test_row_that_python_cannot_take_is_named(three: ReadingService, value: str) -> None:
    """By its ID, with what to do; without its column it is read."""
    three.sql.execute(f"create table odd as select stream_id, {value} as odd from facts where stream_id = 2")
    three.sql.execute("create view both_of as select f.*, odd from facts f left join odd using (stream_id)")
    table = Table("both_of", then=("ordinal",))
    for form in ("threads", "asyncio"):
        three.form = form
        with pytest.raises(RowUnreadable, match="ID 2"):
            three.until(lambda: False, table=table)
    three.until(lambda: three.ids() == [1, 2, 3], table=Table("both_of", columns=("instance", "ordinal")))


def test_fork_goes_on_by_itself_and_leaves_its_parent_alone(three: ReadingService, pipeline: Pipeline) -> None:
    """A child that leaves the loop with a batch in hand does not end its parent's transaction; it may read, too."""
    with (
        Positions(three.redis, three.dsn) as positions,
        Reader(positions, "s", **three.arguments(rows=2)) as reader,
    ):
        batch = next(reader)
        batch.connection.execute(*effect(batch.rows[0], batch))
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                reader.close()
                positions.close()
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        batch.connection.execute(*effect(batch.rows[1], batch))
        batch = next(reader)  # commits
        assert three.ids() == [1, 2]
        child = os.fork()
        if child == 0:
            # The place is in the parent's hand, and then not: its transaction ends as the child waits.
            code = 1
            with suppress(BaseException):
                found = next(reader)
                code = 0 if [row["stream_id"] for row in found.rows] == [3] else 2
                reader.close()
            os._exit(code)
        reader.close()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_copy_that_waits_for_its_turn_can_be_told_to_stop(three: ReadingService) -> None:
    """However long another one takes with its batch."""
    stopping = threading.Event()
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments()) as busy:
        next(busy)
        with Reader(positions, "s", **three.arguments(stopping=stopping)) as waiting:
            thread = threading.Thread(target=next, args=(waiting, None))
            thread.start()
            eventually(lambda: "place" in waiting._sessions)
            stopping.set()
            thread.join(60)
            assert not thread.is_alive()


def test_cancelled_step_is_taken_again(three: ReadingService) -> None:
    """`anext` that was given up in the middle of a statement leaves no transaction; the next one gives the batch."""

    async def main() -> list[int]:
        async with AsyncPositions(three.redis) as positions, AsyncReader(positions, "s", **three.arguments()) as reader:
            with psycopg.connect(three.dsn) as holder:
                holder.execute("lock table facts in access exclusive mode")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(reader), 0.5)
                query = (
                    "select count(*) from pg_stat_activity"
                    " where application_name like 'tidemark reader copier%' and datname = current_database()"
                )
                eventually(lambda: three.sql.execute(query).fetchone() == (0,))
            batch = await asyncio.wait_for(anext(reader), 60)
            return [row["stream_id"] for row in batch.rows]

    assert asyncio.run(main()) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_current_is_a_range(service: ReadingService, pipeline: Pipeline, mode: str) -> None:
    """A reader may use what is complete, and promises what it has committed: less, until it has read all of it."""
    service.write(1, 3)
    service.write(2, 4, instance="v")
    pipeline.publish(stream("s", advance("w", 0, 3), advance("v", 0, 4), linear=4))
    arguments = service.arguments(mode=mode, rows=1)
    with Positions(service.redis) as positions, Reader(positions, "s", **arguments) as reader:
        next(reader)
        assert (reader.promised, reader.usable) == (Token(0), Token(4))
        next(reader)
        assert reader.promised.covers(Token(1) if mode == "linear" else Token(0))
        assert not reader.promised.covers(Token(2))
    with Positions(service.redis) as positions, Reader(positions, "s", **arguments) as reader:
        for _ in range(3):
            next(reader)
        assert not reader.promised.covers(Token(4))
        reader._stopping.set()
        next(reader, None)
        assert reader.promised == reader.usable == Token(4)


def test_reader_that_catches_up_logs_its_progress(
    service: ReadingService, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows, rate and what is left, while it takes long, and once at the end; a reader that is current logs nothing."""
    monkeypatch.setattr("tidemark.sinks.reader.read_loop.PROGRESS_EVERY", 0.0)
    service.write(*range(1, 101))
    pipeline.move("w", 0, 100)
    service.until(lambda: len(service.ids()) == 100, rows=40)
    first, second, end = (
        line for line in "".join(capfd.readouterr()).splitlines() if "aught up" in line or "Catching up" in line
    )
    assert "remaining_ids=60" in first
    assert "rows=40" in first
    assert "remaining_ids=20" in second
    assert "Caught up" in end
    assert "rows=100" in end
