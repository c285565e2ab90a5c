"""Services in Python that write with `tidemark.Writer`, beside a relay: whoever ends their transactions, what is told
is what they committed."""

import sys
from contextlib import suppress

import psycopg
import pytest

from tests.services.programs import places_orders
from tests.services.shop import STREAM, Shop
from tidemark import Writer

SQLALCHEMY = """
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from tidemark import Writer

writer = Writer()

def place(session, total):
    session.execute(
        text("insert into orders (stream_id, total) values (:id, :total)"),
        {"id": writer.append(session, "orders", {"total": total}), "total": total},
    )

engine = create_engine("postgresql+psycopg://")
with Session(engine) as session, session.begin():
    place(session, 40)
with Session(engine) as session:
    place(session, 41)
    session.rollback()
with Session(engine) as session, session.begin():
    session.execute(text("select 1"))
    place(session, 42)
"""
DJANGO = """
import os
import django
from django.conf import settings
from django.db import connection, transaction
from tidemark import Writer

shop = {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}
settings.configure(DATABASES={"default": shop})
django.setup()
writer = Writer()

def place(total):
    id = writer.append(connection, "orders", {"total": total})
    with connection.cursor() as cursor:
        cursor.execute("insert into orders (stream_id, total) values (%s, %s)", [id, total])

with transaction.atomic():
    place(40)
with transaction.atomic():
    place(41)
    transaction.set_rollback(True)
with transaction.atomic():
    with connection.cursor() as cursor:
        cursor.execute("select 1")
    with transaction.atomic():
        place(42)
"""


@pytest.mark.parametrize("program", [SQLALCHEMY, DJANGO], ids=["sqlalchemy", "django"])
def test_it_joins_the_transaction_of_an_orm(shop: Shop, program: str) -> None:
    """Whether or not a statement came before; a rollback there makes its ID void."""
    places_orders(shop, [sys.executable, "-c", program])


def place(writer: Writer, connection: psycopg.Connection, total: int) -> None:
    id = writer.append(connection, STREAM, {"total": total})
    connection.execute("insert into orders (stream_id, total) values (%s, %s)", [id, total])


def test_a_commit_inside_a_block_is_a_commit(shop: Shop) -> None:
    """What it committed is told, what came after it is not, and no ID is both a fact and void."""
    with psycopg.connect(shop.dsn) as connection, suppress(ZeroDivisionError), connection.transaction():
        place(Writer(), connection, 1)
        connection.execute("commit")
        connection.execute("begin")
        place(Writer(), connection, 2)
        raise ZeroDivisionError
    found = shop.proved()
    assert {"total": 1} in found.values()
    assert {"total": 2} not in found.values()
