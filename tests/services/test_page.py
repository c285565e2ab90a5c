"""docs/how-to/write-facts.md shows the programs that run here."""

import re

import pytest

from tests.services.programs import HERE
from tests.services.shop import PAGE

PROGRAMS = {
    "Python (psycopg)": "python/orders_writer.py",
    "SQLAlchemy": "python/orders_sqlalchemy.py",
    "Django": "python/orders_django.py",
    "asyncpg": "python/orders_asyncpg.py",
    "Go (pgx)": "go/main.go",
    "Java (JDBC)": "java/Orders.java",
    "Node (pg)": "node/orders.mjs",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_page_shows_the_program(name: str) -> None:
    """Word for word, below its name."""
    shown = re.search(rf"<summary>{re.escape(name)}</summary>.*?```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1] == (HERE / PROGRAMS[name]).read_text()
