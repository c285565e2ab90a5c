"""Kafka's errors in our words: what to wait for, and what a person must mend.

librdkafka tells a request only that it timed out; why (a wrong password, a refused connection) it tells a callback.
`ErrorListener` is that callback and keeps the reason, so that both can be joined into one line.
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

# What brokers say of a certificate of ours, as of RFC 8446; librdkafka takes it for a lost connection.
_ALERT = re.compile(r"SSL alert number (42|43|44|45|46|48|49|116)\b")
_DIGRESSION = re.compile(r" \(after \d+ms in state .*\)$")


def kafka_error(error: KafkaError, where: str) -> TidemarkError:
    """`Refused` where a person must act, else `Unavailable`: a broker that is starting answers with many codes."""
    code, problem = error.code(), _DIGRESSION.sub("", error.str())
    if code in _LOGIN:
        return Refused(
            "Kafka", where, problem, "check the user name, the password (or client and secret) and the SASL mechanism"
        )
    if code in _RIGHTS:
        return Refused("Kafka", where, problem, "grant our user that right")
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        return Refused("Kafka", where, problem, "send a smaller row, or raise max.message.bytes of the topic")
    if code in _TLS or _ALERT.search(problem):
        return Refused("Kafka", where, problem, "check the security protocol, the CA file and our certificate")
    return Unavailable("Kafka", where, problem)


def concerns_group(error: KafkaError) -> bool:
    """Whether a consumer may not use its group, which librdkafka asks for and nobody needs."""
    return bool(error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED)


class ErrorListener:
    """An `error_cb`: remembers why the brokers cannot be reached. Called on the thread that polls the client."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._reason: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # follows every failure and says nothing of the reason
            self._reason = error

    @property
    def reason(self) -> str:
        """What was remembered last, for a message; empty if nothing was."""
        return "" if self._reason is None else _DIGRESSION.sub("", self._reason.str())

    def forget(self) -> None:
        """A new request begins; what hindered an earlier one may be mended."""
        self._reason = None

    def raise_refusal(self) -> None:
        """Raise `Refused` as soon as the brokers have said no: waiting for the request's time limit gains nothing."""
        if self._reason is not None and isinstance(refused := kafka_error(self._reason, self.where), Refused):
            raise refused

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """What a client raises inside comes out in our words."""
        try:
            yield
        except KafkaException as error:
            raise self.explain(error.args[0]) from error

    def explain(self, error: KafkaError) -> TidemarkError:
        """The error of a failed request, with the reason behind a mere time-out."""
        vague = error.code() in _VAGUE
        return kafka_error(self._reason if vague and self._reason is not None else error, self.where)
