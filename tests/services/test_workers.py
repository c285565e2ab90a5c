"""Processes of a service that come and go, beside a relay."""

import os

import psycopg

from tests.services.shop import STREAM, Shop
from tests.waiting import eventually
from tidemark import Writer

EACH = 25
WRITER = Writer("web")


def test_workers_that_are_forked_share_a_name(shop: Shop) -> None:
    """Four of them write at once, after their parent has; one is killed in the middle of a transaction."""
    with psycopg.connect(shop.dsn) as connection:
        place(connection)
    children = []
    for number in range(4):
        if child := os.fork():
            children.append(child)
        else:
            work(shop.dsn, killed=number == 0)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [-9, 0, 0, 0]
    truth = {*shop.truth()}
    assert len(truth) == 1 + 4 * EACH
    eventually(lambda: shop.judge.verdict().positions(STREAM).get("web", 0) >= max(truth), 60.0)
    verdict = shop.judge.verdict()
    assert verdict.announced[STREAM] == truth
    assert (verdict.rejected, verdict.effects[STREAM].late) == ({}, [])


def place(connection: psycopg.Connection) -> None:
    id = WRITER.append(connection, STREAM, {"total": 1})
    connection.execute("insert into orders (stream_id, total) values (%s, 1)", [id])


def work(dsn: str, *, killed: bool) -> None:
    """Never returns: nothing of the tests' own process is ended here."""
    code = 1
    try:
        with psycopg.connect(dsn) as connection:
            for _ in range(EACH):
                place(connection)
                connection.commit()
            place(connection)
            if killed:
                os.kill(os.getpid(), 9)
            connection.rollback()
        code = 0
    finally:
        os._exit(code)
