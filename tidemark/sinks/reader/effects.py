"""Transactions in the reader's own database through a library of the service: SQLAlchemy, a psycopg pool, or Django.

A batch is handed over with a session of the service's library, which also commits it. The statements of the reader run
on the underlying psycopg connection, in the same transaction. No library is imported unless it is used.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from tidemark.common.errors import BadSetting

BEGIN = "select 1"  # these libraries begin a transaction only when its first statement runs


@dataclass(frozen=True, slots=True)
class EffectsTransaction:
    """An open transaction in the reader's own database.

    Attributes:
        session: the object that the service gets as `batch.connection`.
        driver: the underlying psycopg connection.
        savepoint: creates a context manager for a savepoint of the session.
    """

    session: Any
    driver: Any
    savepoint: Callable[[], Any]

    @property
    def has_ended(self) -> bool:
        """Whether the handler has committed or rolled back. False for a lost connection."""
        if self.driver.closed:
            return not self.driver.broken
        return bool(self.driver.info.transaction_status == TransactionStatus.IDLE)


class BatchRolledBack(Exception):
    """Ends the block of an `EffectsTransaction` without a commit."""


def transaction_factory(effects: Any) -> Callable[[], AbstractContextManager[EffectsTransaction]] | None:
    """A function that begins a transaction of `effects`; None if `effects` is an address. Raises `BadSetting`."""
    return None if isinstance(effects, str) else partial(_begin, _check_effects(effects))


def async_transaction_factory(effects: Any) -> Callable[[], AbstractAsyncContextManager[EffectsTransaction]] | None:
    """`transaction_factory` for asyncio."""
    return None if isinstance(effects, str) else partial(_async_begin, _check_effects(effects))


def psycopg_error(error: BaseException | None) -> psycopg.Error | None:
    """The psycopg error that caused an error of SQLAlchemy or Django."""
    while error is not None and not isinstance(error, psycopg.Error):
        error = getattr(error, "orig", None) or error.__cause__
    return error


def _check_effects(effects: Any) -> Any:
    if hasattr(effects, "getconn") or hasattr(effects, "ensure_connection") or _is_engine(effects) or callable(effects):
        return effects
    problem = (
        f"is a {type(effects).__name__}: give an address, a pool, an engine, a session maker or Django's connection"
    )
    raise BadSetting("effects", problem)


def _is_engine(effects: Any) -> bool:
    return hasattr(effects, "dialect") and hasattr(effects, "connect")


def _check_driver(driver: Any, driver_class: type[Any]) -> Any:
    if not isinstance(driver, driver_class):
        raise BadSetting("effects", f"its connections are of {type(driver).__module__}, and must be of psycopg 3")
    return driver


@contextmanager
def _begin(effects: Any) -> Iterator[EffectsTransaction]:
    if hasattr(effects, "getconn"):  # a pool of psycopg
        with effects.connection() as connection, connection.transaction():
            yield EffectsTransaction(connection, connection, connection.transaction)
    elif hasattr(effects, "ensure_connection"):  # Django's
        from django.db import transaction  # noqa: PLC0415 - only services that use Django have it

        savepoint = partial(transaction.atomic, using=effects.alias)
        with savepoint(durable=True), effects.cursor() as cursor:
            driver = _check_driver(cursor.connection, psycopg.Connection)
            driver.execute(BEGIN)
            yield EffectsTransaction(effects, driver, savepoint)
    else:
        from sqlalchemy.orm import Session  # noqa: PLC0415 - only services that use SQLAlchemy have it

        with Session(effects) if _is_engine(effects) else effects() as session, session.begin():
            driver = _check_driver(session.connection().connection.driver_connection, psycopg.Connection)
            driver.execute(BEGIN)
            yield EffectsTransaction(session, driver, session.begin_nested)


@asynccontextmanager
async def _async_begin(effects: Any) -> AsyncIterator[EffectsTransaction]:
    if hasattr(effects, "getconn"):
        async with effects.connection() as connection, connection.transaction():
            yield EffectsTransaction(connection, connection, connection.transaction)
    elif hasattr(effects, "ensure_connection"):
        raise BadSetting("effects", "Django has no transactions for asyncio: use tidemark.Reader")
    else:
        from sqlalchemy.ext.asyncio import AsyncSession  # noqa: PLC0415 - only services that use SQLAlchemy have it

        async with AsyncSession(effects) if _is_engine(effects) else effects() as session, session.begin():
            raw = await (await session.connection()).get_raw_connection()
            driver = _check_driver(raw.driver_connection, psycopg.AsyncConnection)
            await driver.execute(BEGIN)
            yield EffectsTransaction(session, driver, session.begin_nested)
