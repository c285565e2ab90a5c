"""A new reader that begins at the token of a fact just written, in the database that writes the stream."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import errors

from tests.sinks.take.given import Positioned
from tests.sources.relay.position_world import SteppedKeeper
from tests.sources.relay.world import prepared_schema
from tidemark.sinks.reader_database import reader_session


@pytest.fixture
def keeper(database: str) -> Iterator[SteppedKeeper]:
    with prepared_schema(database), psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select tidemark.create_stream('orders')")
        append(connection)
        keeper = SteppedKeeper(database)
        publish(keeper)
        yield keeper
        keeper.die()


@pytest.fixture
def shop(database: str, keeper: SteppedKeeper) -> Iterator[Positioned]:
    """Stream `orders` is at 1."""
    with reader_session(database, "test") as session, psycopg.connect(database, autocommit=True) as connection:
        yield Positioned(database, session, connection)


def append(connection: psycopg.Connection) -> None:
    connection.execute("select tidemark.append('orders', '{}')")


def publish(keeper: SteppedKeeper) -> None:
    for _ in range(4):
        keeper.round()


@pytest.mark.parametrize("function", ["take", "take_vector"])
def test_it_gets_nothing_before_the_stream_has_reached_the_token(
    shop: Positioned, keeper: SteppedKeeper, function: str
) -> None:
    """No error, although the relay has not published the position yet; then the facts behind the token."""
    append(shop.sql)
    assert shop.rows(function, "orders", "mailer", since="m2") == []
    assert shop.rows(function, "orders", "mailer", since="m2") == []
    publish(keeper)
    assert shop.rows(function, "orders", "mailer", since="m2") == []
    append(shop.sql)
    publish(keeper)
    taken = shop.rows(function, "orders", "mailer", since="m2")
    assert [row[-3:] for row in taken] == [(2, 3, [])]


@pytest.mark.parametrize("function", ["take", "take_vector"])
def test_a_token_that_the_database_has_not_given_out_is_an_error(shop: Positioned, function: str) -> None:
    """The stream did not go back, and nothing is to be undone."""
    with pytest.raises(errors.InvalidParameterValue, match=r"can never reach 'm9': .* no ID beyond 1"):
        shop.rows(function, "orders", "mailer", since="m9")


def test_a_reader_moves_to_a_token_only_when_the_stream_has_reached_it(shop: Positioned, keeper: SteppedKeeper) -> None:
    """Until then it keeps its place."""
    assert shop.take("orders", "mailer") == (0, 1, [])
    append(shop.sql)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is at 'm1' and has not reached 'm2' yet"):
        shop.sql.execute("select tidemark_reader.seek('orders', 'mailer', 'm2')")
    publish(keeper)
    assert shop.take("orders", "mailer") == (1, 2, [])
    shop.sql.execute("select tidemark_reader.seek('orders', 'mailer', 'm2')")
    assert shop.take("orders", "mailer") is None
