"""Translates Kafka errors into `Unavailable`, after which a caller retries, and `Refused`, which a person must correct.

If librdkafka cannot reach the brokers, a request fails with a time-out. librdkafka passes the reason (a wrong password,
a refused connection) to a callback. `ErrorListener` is this callback, and stores the reason for the error message.

`PartitionReader` is a consumer that reads the records of a partition from any offset.
"""

import re
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from tidemark.common.errors import Refused, TidemarkError, Unavailable

_LOGIN_CODES = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)
_RIGHTS_CODES = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
    }
)
_TLS_CODES = frozenset({KafkaError._SSL, KafkaError._INVALID_ARG})

_CODES_WITHOUT_REASON = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
)

# TLS alerts (RFC 8446) about this client's certificate. librdkafka reports them as a lost connection.
_TLS_ALERT = re.compile(r"SSL alert number (42|43|44|45|46|48|49|116)\b")
_STATE_DETAIL = re.compile(r" \(after \d+ms in state .*\)$")


def explain_kafka_error(error: KafkaError, where: str) -> TidemarkError:
    """Translate an error of librdkafka: to `Refused` if a person must act, otherwise to `Unavailable`.

    Unknown codes become `Unavailable`, because a broker that is starting answers with many different codes.

    Args:
        error: the error.
        where: the address of the brokers for the message, without secrets.
    """
    code, problem = error.code(), _STATE_DETAIL.sub("", error.str())
    if code in _LOGIN_CODES:
        return Refused(
            "Kafka", where, problem, "check the user name, the password (or client and secret) and the SASL mechanism"
        )
    if code in _RIGHTS_CODES:
        return Refused("Kafka", where, problem, "grant this right to Tidemark's user")
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        return Refused("Kafka", where, problem, "send a smaller row, or raise max.message.bytes of the topic")
    if code in _TLS_CODES or _TLS_ALERT.search(problem):
        return Refused("Kafka", where, problem, "check the security protocol, the CA file and the client certificate")
    return Unavailable("Kafka", where, problem)


def is_group_refusal(error: KafkaError) -> bool:
    """Whether the broker refused the consumer group. Callers ignore this error: Tidemark needs no consumer group."""
    return bool(error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED)


def explain_missing_record(offset: int, first_offset: int, end_offset: int) -> str:
    """Why a partition has no record with this offset, for people.

    Args:
        offset: the offset.
        first_offset: the oldest offset of the partition.
        end_offset: the offset after the last one of the partition.
    """
    if offset < first_offset:
        return "removed by retention"
    if offset >= end_offset:
        return "not in Kafka: the partition ends before the offset"
    return "not in Kafka: the partition has no record with the offset"


class ErrorListener:
    """An `error_cb` of librdkafka, which stores the newest error that names a reason.

    librdkafka calls the object on the thread that polls the client. `where`: the address of the brokers, without
    secrets.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._reason: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # comes after each failure, without a reason
            self._reason = error

    @property
    def reason(self) -> str:
        """The text of the stored error; empty if there was none since the last `forget`."""
        return "" if self._reason is None else _STATE_DETAIL.sub("", self._reason.str())

    def forget(self) -> None:
        """Forget the stored error. Call this before a new request, because the cause may have been corrected."""
        self._reason = None

    def raise_refusal(self) -> None:
        """Raise `Refused` if the stored error is a refusal. A caller then need not wait until its request times out."""
        if self._reason is not None and isinstance(refused := explain_kafka_error(self._reason, self.where), Refused):
            raise refused

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Convert a `KafkaException` that the block raises to a `TidemarkError`."""
        try:
            yield
        except KafkaException as error:
            raise self.explain(error.args[0]) from error

    def explain(self, error: KafkaError) -> TidemarkError:
        """Convert the error of a failed request, as `explain_kafka_error` does.

        If the error names no reason (a time-out, or a lost connection), converts the stored error instead, if any.
        """
        has_no_reason = error.code() in _CODES_WITHOUT_REASON
        return explain_kafka_error(self._reason if has_no_reason and self._reason is not None else error, self.where)


class PartitionReader:
    """A consumer that reads the records of any partition from any offset. Not thread-safe.

    All methods may raise `KafkaException` or `Unavailable`. After an error, close the reader.

    Args:
        client: settings of librdkafka.
        errors: the `error_cb` of the consumer.
        timeout_seconds: the time limit of a request. `read` raises `Unavailable` after this time without a record.
        isolation: `read_committed` or `read_uncommitted`.
    """

    def __init__(
        self, client: Mapping[str, str], errors: ErrorListener, timeout_seconds: float, isolation: str
    ) -> None:
        self._where = client["bootstrap.servers"]
        self._timeout_seconds = timeout_seconds
        self._consumer = Consumer(
            {
                **client,
                "group.id": "tidemark-dead-letters",  # librdkafka needs a group; offsets are never committed
                "enable.auto.commit": "false",
                "enable.auto.offset.store": "false",
                "enable.partition.eof": "true",
                "auto.offset.reset": "error",
                "isolation.level": isolation,
                "error_cb": errors,
            }
        )

    def close(self) -> None:
        self._consumer.close()

    def offsets(self, topic: str, partition: int, known_offset: int = -1) -> tuple[int, int]:
        """Query the oldest offset and the end offset of a partition.

        With `read_committed`, the end is the last stable offset. A broker that has just started may not show its newest
        records. So this method waits until the end is beyond the offset `known_offset`. After the time limit, returns
        the offsets that Kafka shows then.

        Args:
            topic: the topic of the partition.
            partition: the number of the partition.
            known_offset: the offset of a record that exists; -1: do not wait.
        """
        target, deadline = TopicPartition(topic, partition), time.monotonic() + self._timeout_seconds
        while True:
            offsets: tuple[int, int] = self._consumer.get_watermark_offsets(
                target, timeout=self._timeout_seconds, cached=False
            )
            if offsets[1] > known_offset or time.monotonic() > deadline:
                return offsets
            time.sleep(0.1)

    def read(self, topic: str, partition: int, start: int) -> Generator[Message | None]:
        """Yield the records of a partition from the offset `start`, and then None at the end of the partition.

        If the broker no longer has the next offset, for example after retention, ends and does not yield None.
        """
        self._consumer.assign([TopicPartition(topic, partition, start)])
        try:
            yield from self._records(topic, partition, start)
        finally:
            self._consumer.unassign()

    def _records(self, topic: str, partition: int, start: int) -> Iterator[Message | None]:
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            records = self._consumer.consume(num_messages=500, timeout=0.2)
            if records:
                deadline = time.monotonic() + self._timeout_seconds
            elif time.monotonic() > deadline:
                raise Unavailable(
                    "Kafka", self._where, f"no answer for records of {topic}/{partition} from offset {start}"
                )
            for record in records:
                error = record.error()
                if error is None:
                    yield record
                elif error.code() == KafkaError._PARTITION_EOF:
                    yield None
                    return
                elif is_group_refusal(error):
                    continue
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    return
                else:
                    raise KafkaException(error)
