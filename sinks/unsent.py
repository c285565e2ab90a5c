"""Rejected records of a batch, kept until they are known to be in the dead letters (DESIGN 2, rule 5).

Where they stand in Kafka and why, not the records themselves.
"""

from dataclasses import dataclass

import msgspec

from tidemark.sinks.batch import Batch
from tidemark.sinks.database import Connection
from tidemark.streaming.packet import Rejected

_decoder = msgspec.msgpack.Decoder(list[Rejected])


@dataclass(frozen=True, slots=True)
class UnsentLetters:
    query: str
    batch: int
    rejected: list[Rejected]


def keep(connection: Connection, batch: Batch) -> None:
    """In the transaction of the batch."""
    if rejected := batch.rejected():
        connection.execute(
            "insert into tidemark.unsent_letters (query, batch, rejected) values (%s, %s, %s)",
            (batch.query, batch.number, msgspec.msgpack.encode(rejected)),
        )


def kept(connection: Connection) -> list[UnsentLetters]:
    """Oldest batch of each query first."""
    rows = connection.execute("select query, batch, rejected from tidemark.unsent_letters order by query, batch")
    return [UnsentLetters(query, batch, _decoder.decode(data)) for query, batch, data in rows]


def forget(connection: Connection, query: str, batch: int) -> None:
    """They are sent."""
    connection.execute("delete from tidemark.unsent_letters where (query, batch) = (%s, %s)", (query, batch))
