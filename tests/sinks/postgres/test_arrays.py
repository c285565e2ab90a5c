"""Columns as parameters of a statement."""

import psycopg
import pytest

from tidemark.sinks.postgres.database import execute
from tidemark.streaming.values.direction import Direction


def test_columns_arrive_as_they_were(database: str) -> None:
    """Whatever is in them: text that looks like an array or like nothing, bytes of every value, the largest numbers."""
    rows = [
        ("orders", b"state", 1, True),
        ('"', bytes(range(256)), -(2**63), False),
        ("\\", b"", 2**63 - 1, True),
        ('{a,"b"}\\"', b"\\", 0, False),
        ("", b'"', 7, True),
        ("null", b"null", 8, True),
        ("é\n\t'$1%s 𝄞", b"\x00", 9, True),
        (None, None, None, None),
    ]
    with psycopg.connect(database, autocommit=True) as connection:
        for given in (rows, rows[:1], rows[1:2], rows[:-1], [(None, None, None, None)]):
            statement = "select * from unnest(%s::text[], %s::bytea[], %s::bigint[], %s::boolean[])"
            found = execute(connection, statement, given)
            assert found is not None
            assert found.fetchall() == given
        assert execute(connection, "select %s::text[]", []) is None


def test_numbers_become_what_the_statement_asks_for(database: str) -> None:
    """Smaller kinds of them too, and one that is none there is refused by the server."""
    rows = [(Direction.BACKWARD, 7, 2**31 - 1), (Direction.FORWARD, -7, -(2**31))]
    with psycopg.connect(database, autocommit=True) as connection:
        found = execute(connection, "select * from unnest(%s::smallint[], %s::int[], %s::bigint[])", rows)
        assert found is not None
        assert found.fetchall() == [(-1, 7, 2**31 - 1), (1, -7, -(2**31))]
        for statement, number in (("select %s::bigint[]", 2**63), ("select %s::smallint[]", 2**15)):
            with pytest.raises(psycopg.errors.NumericValueOutOfRange):
                execute(connection, statement, [(number,)])
