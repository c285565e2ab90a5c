"""What handlers do to the loop of a service: fail, end its transaction, fork, take long, are cancelled; both forms."""

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from structlog.testing import capture_logs

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService, effect
from tests.waiting import eventually
from tidemark.common.errors import BadToken, ReaderInUse, Refused, RowUnreadable, TransactionEnded
from tidemark.sinks.reader import AsyncPositions, AsyncReader, Place, Positions, Reader, ReadProgress, Table, Token
from tidemark.sinks.reader.batch import Parking
from tidemark.sinks.reader.checkpoint import CheckpointStore
from tidemark.sinks.reader.databases import EffectsTransaction


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
        parking = Parking(
            CheckpointStore("r", "s", "linear"),
            EffectsTransaction(connection, connection, connection.transaction),
            1,
            (ValueError, psycopg.Error),
        )
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
    """`anext` that was given up in the middle of a statement goes on, and the next one gives the batch. `aclose` leaves
    no session."""

    async def main() -> list[int]:
        async with AsyncPositions(three.redis) as positions, AsyncReader(positions, "s", **three.arguments()) as reader:
            with psycopg.connect(three.dsn) as holder:
                holder.execute("lock table facts in access exclusive mode")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(reader), 0.5)
                await reader.aclose()
                query = (
                    "select count(*) from pg_stat_activity"
                    " where application_name like 'tidemark reader copier%' and datname = current_database()"
                )
                eventually(lambda: three.sql.execute(query).fetchone() == (0,))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(reader), 0.5)
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
        assert (reader.promised, reader.complete_token) == (Token(0), Token(4))
        next(reader)
        assert reader.promised.covers(Token(1) if mode == "linear" else Token(0))
        assert not reader.promised.covers(Token(2))
    with Positions(service.redis) as positions, Reader(positions, "s", **arguments) as reader:
        for _ in range(3):
            next(reader)
        assert not reader.promised.covers(Token(4))
        reader._stopping.set()
        next(reader, None)
        assert reader.promised == reader.complete_token == Token(4)


def test_reader_that_catches_up_logs_its_progress(
    service: ReadingService, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows, rate and what is left, while it takes long, and once at the end; a reader that is current logs nothing."""
    monkeypatch.setattr("tidemark.sinks.reader.read_loop.PROGRESS_LOG_SECONDS", 0.0)
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


def test_short_timeouts_around_a_step_do_not_starve_the_reader(three: ReadingService) -> None:
    """Each time-out is shorter than a step takes: the step goes on, so a later `anext` has the batch."""

    async def main() -> tuple[list[int], int]:
        async with AsyncPositions(three.redis) as positions, AsyncReader(positions, "s", **three.arguments()) as reader:
            for attempt in range(100_000):
                try:
                    batch = await asyncio.wait_for(anext(reader), 0.002)
                except TimeoutError:
                    continue
                return [row["stream_id"] for row in batch.rows], attempt
        return [], 0

    ids, attempts = asyncio.run(asyncio.wait_for(main(), 60))
    assert ids == [1, 2, 3]
    assert attempts > 0


@pytest.mark.parametrize("form", ["threads", "asyncio"])
def test_handler_that_is_slower_than_the_server_allows_is_named(three: ReadingService, form: str) -> None:
    """The log counts the repetitions of the batch, and names the setting. The server is not said to be down."""
    slow = conninfo.make_conninfo(three.dsn, options="-c idle_in_transaction_session_timeout=1500")
    seconds = [3, 3, 0]

    def in_threads() -> None:
        with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments(effects=slow)) as reader:
            for batch, pause in zip(reader, seconds, strict=False):
                for row in batch.rows:
                    batch.connection.execute(*effect(row, batch))
                time.sleep(pause)
                if not pause:
                    reader._stopping.set()
            next(reader, None)

    async def in_tasks() -> None:
        async with (
            AsyncPositions(three.redis) as positions,
            AsyncReader(positions, "s", **three.arguments(effects=slow)) as reader,
        ):
            for pause in seconds:
                batch = await anext(reader)
                for row in batch.rows:
                    await batch.connection.execute(*effect(row, batch))
                await asyncio.sleep(pause)
            reader._stopping.set()
            assert await anext(reader, None) is None

    with capture_logs() as logs:
        in_threads() if form == "threads" else asyncio.run(in_tasks())
    lines = [line for line in logs if line["event"].startswith("The server ended the transaction of a batch")]
    assert [line["times"] for line in lines] == [1, 2]
    assert all("idle_in_transaction_session_timeout" in line["do"] for line in lines)
    assert not [line for line in logs if "Waiting for Postgres" in line["event"]]
    assert three.ids() == [1, 2, 3]


@pytest.mark.parametrize("since", ["m2", 2, Token(2)])
def test_start_is_a_token_its_text_or_an_id(three: ReadingService, since: Any) -> None:
    """Of a new reader. One that has a place goes on there, and says so."""
    with Positions(three.redis) as positions:
        with Reader(positions, "s", **three.arguments(since=since)) as reader:
            assert [row["stream_id"] for row in next(reader).rows] == [3]
            reader._stopping.set()
            assert next(reader, None) is None
        with capture_logs() as logs, Reader(positions, "s", **three.arguments(since="m1")) as reader:
            reader._stopping.set()
            reader._driver.step()
            stopping = threading.Timer(0.5, reader._stopping.set)
            reader._stopping.clear()
            stopping.start()
            assert next(reader, None) is None
        (line,) = [line for line in logs if line["event"].startswith("Continuing from the stored place")]
        assert (line["place"], line["since"]) == ("m3", "m1")
        with pytest.raises(BadToken, match="the type float is not supported"):
            Reader(positions, "s", **three.arguments(since=3.0))


@pytest.mark.parametrize("form", ["threads", "asyncio"])
def test_progress_is_reported_for_metrics(three: ReadingService, form: str) -> None:
    """After each commit, and when everything is read. A function that fails does not stop the reader."""
    three.form = form
    reports: list[ReadProgress] = []

    def observe(progress: ReadProgress) -> None:
        reports.append(progress)
        raise ValueError("no such metric")

    three.until(lambda: bool(reports) and reports[-1].position == Token(3), rows=2, observe=observe)
    committed = [report for report in reports if report.rows]
    assert [(report.position, report.lag_ids, report.rows) for report in committed] == [
        (Token(2), 1, 2),
        (Token(3), 0, 1),
    ]
    assert all(report.seconds >= 0 and not report.is_late and not report.time_outs for report in reports)
    assert three.ids() == [1, 2, 3]


def test_reader_that_is_reset_reads_from_the_start(three: ReadingService, pipeline: Pipeline) -> None:
    """The statements of the documentation, in one transaction with the effects. A running copy notices at its next
    fact."""
    page = Path("docs/how-to/read-facts.md").read_text()
    (reset,) = re.findall(r"```sql\n(begin;.*?)```", page, re.DOTALL)
    reset = reset.replace("'books'", "'copier'").replace("'orders'", "'s'").replace("booked", "effects")
    with three.running():
        eventually(lambda: three.ids() == [1, 2, 3])
        three.sql.execute(reset)
        three.write(4)
        pipeline.move("w", 3, 4)
        eventually(lambda: three.place().linear == 4)
    assert three.ids() == [1, 2, 3, 4]


def test_rows_are_filtered_by_the_database(three: ReadingService) -> None:
    """Facts without a wanted row give no batch; the place passes them."""
    three.until(lambda: three.place().linear == 3, table=Table("facts", where="stream_id % 2 = 1"))
    assert three.ids() == [1, 3]


def test_second_thread_on_one_reader_is_refused(three: ReadingService) -> None:
    """In the middle of a step, and as its loop begins while the first thread has a batch in hand."""
    raised: list[BaseException] = []

    def second(act: Callable[[], object]) -> None:
        try:
            act()
        except ReaderInUse as error:
            raised.append(error)

    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments()) as reader:
        with psycopg.connect(three.dsn) as holder:
            holder.execute("lock table facts in access exclusive mode")
            first = threading.Thread(target=next, args=(reader,))
            first.start()
            eventually(lambda: "source" in reader._sessions)
            second(lambda: next(reader))
        first.join(60)
        assert len(raised) == 1
        reader.close()
        batch = next(reader)
        thread = threading.Thread(target=second, args=(lambda: iter(reader),))
        thread.start()
        thread.join(60)
        assert "give each thread a reader of its own" in str(raised[1])
        for row in batch.rows:
            batch.connection.execute(*effect(row, batch))
        reader._stopping.set()
        assert next(reader, None) is None
    assert three.ids() == [1, 2, 3]


def test_second_task_on_one_reader_is_refused(three: ReadingService) -> None:
    """The first one gets its batch."""

    async def main() -> list[int]:
        async with AsyncPositions(three.redis) as positions, AsyncReader(positions, "s", **three.arguments()) as reader:
            results: list[Any] = [*await asyncio.gather(anext(reader), anext(reader), return_exceptions=True)]
            first, second = results
            assert isinstance(second, ReaderInUse)
            assert not isinstance(first, BaseException)
            return [row["stream_id"] for row in first.rows]

    assert asyncio.run(main()) == [1, 2, 3]


def test_mistyped_stream_is_logged_again_and_again(three: ReadingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """With why: no record of such a stream was published."""
    monkeypatch.setattr("tidemark.sinks.reader.follow.WARNING_SECONDS", 0.3)
    with capture_logs() as logs, three.running("tiped"):
        eventually(lambda: len([line for line in logs if "not known yet" in line["event"]]) >= 2)
    assert logs[-1]["why"] == "no record of the stream was published: check the name"
