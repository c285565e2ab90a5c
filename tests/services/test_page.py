"""The pages show the programs that run here, and a reader has at most 40 lines."""

import re

import pytest

from tests.services import readers, shop
from tests.services.programs import HERE

WRITERS = {
    "Python (psycopg)": "python/orders_writer.py",
    "SQLAlchemy": "python/orders_sqlalchemy.py",
    "Django": "python/orders_django.py",
    "asyncpg": "python/orders_asyncpg.py",
    "Go (pgx)": "go/orders/main.go",
    "Java (JDBC)": "java/Orders.java",
    "Node (pg)": "node/orders.mjs",
}
READERS = {
    "Go (pgx)": "go/billing/main.go",
    "Go (pgx), with savepoints": "go/parking/main.go",
    "Java (JDBC)": "java/Billing.java",
    "Node (pg)": "node/billing.mjs",
    "Python (psycopg)": "python/billing_psycopg.py",
    "SQLAlchemy": "python/billing_sqlalchemy.py",
    "Django": "python/billing_django.py",
    "psql": "psql/billing.sql",
    "HTTP (Python)": "python/invoices_http.py",
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_page_shows_the_program(name: str) -> None:
    """Word for word, below its name."""
    assert _shown(shop.PAGE, name) == (HERE / WRITERS[name]).read_text()


@pytest.mark.parametrize("name", READERS)
def test_the_page_shows_the_reader(name: str) -> None:
    """Word for word, below its name, in at most 40 lines."""
    shown = _shown(readers.PAGE, name)
    assert shown == (HERE / READERS[name]).read_text()
    assert len(shown.splitlines()) <= 40


def _shown(page: str, name: str) -> str:
    shown = re.search(rf"<summary>{re.escape(name)}</summary>.*?```\w+\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    return shown[1]
