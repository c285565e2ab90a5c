"""The writer for threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import psycopg

from tidemark.sources.writer.core import Core
from tidemark.sources.writer.transaction import Facts
from tidemark.streaming.errors import WriterFenced


class Writer(Core):
    """Writes facts to streams of a service's own Postgres. Any number of threads and connections may share it."""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @contextmanager
    def transaction(self, connection: psycopg.Connection[Any]) -> Iterator[Facts]:
        """A transaction of `connection`, in which facts are given; commits at the end of the block, or rolls back.

        Inside a transaction of the caller it is a savepoint, as psycopg's own `transaction()`: its IDs then hold back
        their streams until the caller's has ended, which is found out by asking the server.

        May be repeated as a whole after any error of psycopg's. Raises `WriterFenced` (nothing was written, and nothing
        can be any more: end this process), `Stopping` after the writer was told to stop, `FactWithoutRow` for an ID
        that got neither rows nor a `void`, `SequenceSetBack`.
        """
        draft = self._draft()
        try:
            with connection.transaction():
                yield Facts(connection, draft)
                draft.require_whole()
        except psycopg.OperationalError as error:
            if connection.broken and self._replaced():
                raise WriterFenced(self.instance, self.epoch) from error
            raise
        finally:
            self._ended(draft, connection.pgconn.transaction_status)
