"""Services in Python, with our client, or with the library that each of them has already."""

import re
import sys

import pytest

from tests.services.programs import HERE, places_orders
from tests.services.shop import PAGE, Shop


@pytest.mark.parametrize("library", ["writer", "sqlalchemy", "django", "asyncpg"])
def test_what_a_program_commits_is_told(shop: Shop, library: str) -> None:
    """In the transaction of its own library: committed it is a fact with its ID, rolled back it is a void."""
    places_orders(shop, [sys.executable, HERE / "python" / f"orders_{library}.py"])


def test_a_service_needs_the_grants_of_the_page(shop: Shop) -> None:
    """Nothing else: it is not the owner of the schema, and no superuser."""
    (grants,) = re.findall(r"^```sql\n(CREATE ROLE checkout.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    with shop.sql() as connection:
        connection.execute(str(grants).encode())
        try:
            login = {"PGUSER": "checkout", "PGPASSWORD": "secret"}
            places_orders(shop, [sys.executable, HERE / "python" / "orders_writer.py"], login)
        finally:
            connection.execute("drop owned by checkout; drop role checkout")
