"""Translates Kafka's errors into `Unavailable`, for which a caller waits, and `Refused`, which a person must correct.

A request of librdkafka only fails with a time-out. The reason (a wrong password, a refused connection) goes to a
callback. `ErrorListener` is this callback: it remembers the reason, so that one message can contain both.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from tidemark.common.errors import Refused, TidemarkError, Unavailable

_LOGIN = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)
_RIGHTS = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
    }
)
_TLS = frozenset({KafkaError._SSL, KafkaError._INVALID_ARG})

_VAGUE = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
)

# TLS alerts (RFC 8446) about this client's certificate. librdkafka reports them as a lost connection.
_ALERT = re.compile(r"SSL alert number (42|43|44|45|46|48|49|116)\b")
_STATE_DETAIL = re.compile(r" \(after \d+ms in state .*\)$")


def kafka_error(error: KafkaError, where: str) -> TidemarkError:
    """Translate an error: `Refused` if a person must act, else `Unavailable`.

    Unknown codes are `Unavailable`, because a broker that is starting answers with many different codes.

    Args:
        where: address of the brokers, without secrets.
    """
    code, problem = error.code(), _STATE_DETAIL.sub("", error.str())
    if code in _LOGIN:
        return Refused(
            "Kafka", where, problem, "check the user name, the password (or client and secret) and the SASL mechanism"
        )
    if code in _RIGHTS:
        return Refused("Kafka", where, problem, "grant this right to Tidemark's user")
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        return Refused("Kafka", where, problem, "send a smaller row, or raise max.message.bytes of the topic")
    if code in _TLS or _ALERT.search(problem):
        return Refused("Kafka", where, problem, "check the security protocol, the CA file and the client certificate")
    return Unavailable("Kafka", where, problem)


def concerns_group(error: KafkaError) -> bool:
    """True if the consumer may not use its group. Harmless: librdkafka needs a group, and Tidemark does not."""
    return bool(error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED)


class ErrorListener:
    """An `error_cb` of librdkafka: remembers why the brokers are unreachable.

    Runs on the thread that polls the client.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._reason: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # follows every failure and has no reason
            self._reason = error

    @property
    def reason(self) -> str:
        """Text of the newest error; empty if there was none."""
        return "" if self._reason is None else _STATE_DETAIL.sub("", self._reason.str())

    def forget(self) -> None:
        """Forget the newest error. Call before a new request: the cause may be corrected."""
        self._reason = None

    def raise_refusal(self) -> None:
        """Raise `Refused` if the brokers refused the client, without waiting for the time limit of the request."""
        if self._reason is not None and isinstance(refused := kafka_error(self._reason, self.where), Refused):
            raise refused

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Translate a `KafkaException` that the block raises."""
        try:
            yield
        except KafkaException as error:
            raise self.explain(error.args[0]) from error

    def explain(self, error: KafkaError) -> TidemarkError:
        """Translate the error of a failed request. If it is only a time-out, use the reason from the callback."""
        is_vague = error.code() in _VAGUE
        return kafka_error(self._reason if is_vague and self._reason is not None else error, self.where)
