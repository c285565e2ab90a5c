"""One shop for the programs of a module."""

from collections.abc import Iterator
from itertools import count

import psycopg
import pytest
from psycopg import sql

from tests.services.shop import Shop, opened
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer

_numbers = count(1)


@pytest.fixture(scope="module")
def shop(postgres: PostgresServer, kafka: KafkaServer) -> Iterator[Shop]:
    name = f"shop_{next(_numbers)}"
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with opened(postgres.dsn(name), kafka, f"{name}.facts") as shop:
        yield shop
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
