"""Facts in real transactions, and what comes of them on a real topic."""

import psycopg

from tests.sources.writer.conftest import Make
from tests.sources.writer.judge import Judge


def order(connection: psycopg.Connection, id: int) -> None:
    connection.execute("insert into orders (id) values (%s)", [id])


def test_each_committed_fact_is_announced_and_each_rollback_is_void(
    make: Make, connection: psycopg.Connection, sql: psycopg.Connection, judge: Judge
) -> None:
    """Three transactions, the middle one of which rolls back."""
    with make() as writer:
        for fail in (False, True, False):
            try:
                with writer.transaction(connection) as facts:
                    order(connection, facts.append("orders", {"total": 40}))
                    if fail:
                        raise psycopg.Rollback
            except psycopg.Rollback:
                pass
    verdict = judge.agrees(sql)
    assert verdict.kinds() == [("JOIN", 1, 0), ("RDATA", 1, 1), ("VOID", 1, 2), ("RDATA", 1, 3)]
