"""A service that writes orders, but it sends itself a signal just before one step: for tests of crashes and stalls.

    python -m tests.sources.writer.service DSN BOOTSTRAP TOPIC SIGKILL pack 1

What the signal leaves alive goes on with the step.
"""

import itertools
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

import psycopg

from tidemark.sources.producer import RecordProducer
from tidemark.sources.writer import Facts, Writer, fence, outbox
from tidemark.sources.writer.core import WriterCore
from tidemark.sources.writer.pending import PendingTransaction
from tidemark.sources.writer.relay import Relay
from tidemark.streaming.errors import WriterFenced

STEPS: dict[str, tuple[Any, str]] = {
    "settle": (fence, "settle"),  # the epoch is raised, nothing told
    "deliver": (RecordProducer, "deliver"),  # leftovers or the JOIN were sent, nothing is acknowledged
    "add": (Facts, "add"),  # an ID is reserved
    "commit": (PendingTransaction, "require_whole"),  # all is written
    "ended": (WriterCore, "_ended"),  # the commit is done and nobody knows
    "decide": (Relay, "_decide"),
    "pack": (Relay, "_pack"),  # decided, not sent
    "hear": (Relay, "_poll_producer"),  # perhaps sent, perhaps acknowledged
    "delete": (outbox, "delete"),  # acknowledged, not deleted
}


def strike(number: signal.Signals, step: str, nth: int) -> None:
    """Raise the signal before the `nth` call of `step`."""
    where, name = STEPS[step]
    proper = getattr(where, name)
    calls = itertools.count(1)

    def struck(*arguments: Any, **named: Any) -> Any:
        if next(calls) == nth:
            # To this thread: one that is sent to the process may be taken by another, while this one goes on.
            signal.pthread_kill(threading.get_ident(), number)
        return proper(*arguments, **named)

    setattr(where, name, struck)


def work(writer: Writer, dsn: str) -> None:
    """Six transactions, two of which roll back, while another is open all the time."""
    with psycopg.connect(dsn) as held, psycopg.connect(dsn) as connection, writer.transaction(held) as open_facts:
        open_facts.append("orders", "held")
        for number in range(6):
            # It comes through where the connection was ended meanwhile; the next transaction says why.
            with suppress(psycopg.Rollback), writer.transaction(connection) as facts:
                id = facts.reserve("orders")
                connection.execute("insert into orders (id) values (%s)", [id])
                facts.add("orders", id, number)
                if number % 3 == 2:
                    raise psycopg.Rollback
        held.execute("select pg_sleep(0.3)")
        held.execute("select count(*) from orders")
        raise psycopg.Rollback


def main(dsn: str, bootstrap: str, topic: str, name: str, step: str, nth: str) -> None:
    strike(signal.Signals[name], step, int(nth))
    service = Writer(dsn, bootstrap, instance="shop-1", streams=["orders"], topic=topic, patience=10, clock=lambda: 0.0)
    try:
        with service as writer:
            work(writer, dsn)
    except WriterFenced:
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
