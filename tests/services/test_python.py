"""Services in Python, with our client, or with the library that each of them has already."""

import sys

import pytest

from tests.services.programs import HERE, places_orders
from tests.services.shop import Shop


@pytest.mark.parametrize("library", ["writer", "sqlalchemy", "django", "asyncpg"])
def test_what_a_program_commits_is_told(shop: Shop, library: str) -> None:
    """In the transaction of its own library: committed it is a fact with its ID, rolled back it is a void."""
    places_orders(shop, [sys.executable, HERE / "python" / f"orders_{library}.py"])
