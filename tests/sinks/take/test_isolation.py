"""`take` in transactions of the higher isolation levels: the second of two copies fails with 40001 and takes again."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest
from psycopg import IsolationLevel, errors

from tests.sinks.take.given import Positioned
from tests.waiting import eventually

LEVELS = [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def copies(request: pytest.FixtureRequest, readers: Positioned) -> Iterator[list[psycopg.Connection]]:
    """Two sessions of the same reader."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(psycopg.connect(readers.dsn)) for _ in range(2)]
        for session in sessions:
            session.isolation_level = request.param
        yield sessions


def take(readers: Positioned, copy: psycopg.Connection, **named: object) -> object:
    return readers.take("orders", "mailer", sql=copy, most=10, **named)


@pytest.mark.server
@pytest.mark.parametrize("is_new", [True, False], ids=["new reader", "old reader"])
def test_a_copy_that_waited_for_the_place_takes_again(
    readers: Positioned, copies: list[psycopg.Connection], is_new: bool
) -> None:
    """The place moved after its snapshot: Postgres refuses the transaction, and the next one gets the next range."""
    first, second = copies
    readers.publish(30)
    low = 0
    if not is_new:
        take(readers, first)
        first.commit()
        low = 10
    assert take(readers, first) == (low, low + 10, [])
    failed = list[Exception]()

    def take_second() -> None:
        with pytest.raises(errors.SerializationFailure) as raised:
            take(readers, second)
        failed.append(raised.value)

    thread = threading.Thread(target=take_second)
    thread.start()
    waits = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    eventually(lambda: readers.sql.execute(waits, [second.info.backend_pid]).fetchone() is not None)
    first.commit()
    thread.join()
    assert len(failed) == 1
    second.rollback()
    assert take(readers, second) == (low + 10, low + 20, [])


@pytest.mark.server
def test_a_copy_whose_snapshot_is_older_than_the_place_takes_again(
    readers: Positioned, copies: list[psycopg.Connection]
) -> None:
    """Also with `wait => false`. The range of the other copy is never taken twice."""
    first, second = copies
    readers.publish(30)
    take(readers, first)
    first.commit()
    second.execute("select 1")  # takes the snapshot
    take(readers, first)
    first.commit()
    with pytest.raises(errors.SerializationFailure):
        take(readers, second, wait=False)
    second.rollback()
    assert take(readers, second) == (20, 30, [])


@pytest.mark.server
def test_a_range_ends_at_the_position_of_the_snapshot(readers: Positioned, copies: list[psycopg.Connection]) -> None:
    """A position that was published later is not used: the snapshot would not show its facts."""
    readers.publish(3)
    copies[0].execute("select 1")
    readers.publish(9)
    assert take(readers, copies[0]) == (0, 3, [])
