"""A service that reads streams with `sinks.reader`: what comes of each row is one row of effects, once.

The row goes into `demo.effects` in the transaction that also moves the reader's place.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tidemark.sinks.reader import Mode, Positions, Reader, Table
from tidemark.sinks.redis.client import RedisAddress


@dataclass(frozen=True, slots=True)
class ReaderRole:
    """What one process is: the reader called after its mode, of these streams."""

    mode: Mode
    streams: Sequence[str]


@dataclass(frozen=True, slots=True)
class ReaderServers:
    """DSNs: `facts` of the services' database, `effects` of the readers', `tidemark` of Tidemark's own."""

    facts: str
    effects: str
    redis: RedisAddress
    tidemark: str


def read(role: ReaderRole, servers: ReaderServers, stopping: threading.Event) -> None:
    """Read until `stopping` is set, each stream on a thread. Raises what the library or psycopg does."""
    with (
        Positions(servers.redis, servers.tidemark) as positions,
        ThreadPoolExecutor(len(role.streams)) as pool,
    ):
        work = [pool.submit(_read, role.mode, stream, positions, servers, stopping) for stream in role.streams]
        wait(work, return_when=FIRST_EXCEPTION)
        stopping.set()
    for each in work:
        each.result()


def _read(mode: Mode, stream: str, positions: Positions, servers: ReaderServers, stopping: threading.Event) -> None:
    table = Table(f"demo.{stream}", id="stream_id", writer="writer", then=["part"])
    with Reader(
        positions,
        stream,
        table,
        name=mode,
        source=servers.facts,
        effects=servers.effects,
        mode=mode,
        rows=200,
        stopping=stopping,
    ) as reader:
        for batch in reader:
            with batch.connection.cursor() as cursor:
                late = batch.late.number if batch.late else None
                cursor.executemany(
                    "insert into demo.effects (reader, stream, stream_id, writer, mark, late)"
                    " values (%s, %s, %s, %s, %s, %s)",
                    [(mode, stream, row["stream_id"], row["writer"], row["mark"], late) for row in batch.rows],
                )
