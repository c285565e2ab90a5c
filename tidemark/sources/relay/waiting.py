"""What a relay says in its log while it waits: for Kafka, and for another relay of the same database."""

import time

import structlog

from tidemark.common.lock_waits import sessions_of
from tidemark.common.postgres_session import Connection
from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay.queries import TURN_HOLDERS

log = structlog.get_logger(__name__)

WORTH_SAYING = 5.0
"""Seconds without an acknowledgement before the log says so."""


class KafkaWait:
    """Of one producer. One line when Kafka has acknowledged nothing for a while, and one when it does again."""

    def __init__(self) -> None:
        self._delivered = -1
        self._since = 0.0
        self._said = False

    def look(self, producer: RecordProducer, waiting: int) -> None:
        """`waiting`: records that are not acknowledged."""
        now = time.monotonic()
        if not waiting or producer.delivered != self._delivered:
            if self._said:
                log.info("Kafka acknowledges records again", seconds=round(now - self._since, 1))
            self._delivered, self._since, self._said = producer.delivered, now, False
        elif now - self._since >= WORTH_SAYING and not self._said:
            self._said = True
            log.warning("Waiting for Kafka", kafka=producer.where, records=waiting, problem=producer.problem)


class OtherRelayWait:
    """One line when this relay begins to wait for another one, with the session of that one, and one at its end."""

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._since: float | None = None

    def waits(self, connection: Connection) -> None:
        if self._since is not None:
            return
        self._since = time.monotonic()
        row = connection.execute(TURN_HOLDERS, [self._lock]).fetchone()
        holder = sessions_of(connection, row[0] if row and row[0] else []) or "a session that has ended since"
        log.info("Another relay works on this database; waiting for its end", holder=holder)

    def over(self) -> None:
        if self._since is not None:
            log.info("The other relay has ended; this one works", seconds=round(time.monotonic() - self._since, 1))
            self._since = None
