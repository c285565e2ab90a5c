"""Consumes Kafka messages without Python objects. Calls confluent-kafka's librdkafka with ctypes.

confluent-kafka creates objects for each message, key, value and time, which takes a third of the CPU time of a record.
This module uses the public C interface of the same library (rdkafka.h). The layout of `rd_kafka_message_t` is part of
this interface. The import of this module raises ImportError if the symbols of librdkafka cannot be found. Then
`consumer` uses confluent-kafka's own consumer.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np
from confluent_kafka import KafkaError, KafkaException, cimpl

from tidemark.streaming.ingest.jit_loader import get_module, load_kernels
from tidemark.streaming.ingest.record_batch import Bytes, RecordBatch, read_only
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.runs import Mask

_Pointer = ctypes.c_void_p
_ErrorCallback = ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_int, ctypes.c_char_p, _Pointer)

_CONSUMER: Final = 1  # RD_KAFKA_CONSUMER
_OK: Final = 0
_MESSAGE_WORDS: Final = 9  # words of 8 bytes in a rd_kafka_message_t
_MESSAGE_SECONDS: Final = 5e-6  # to copy a message without compiled code
_MIN_COMPILED_MESSAGES: Final = 100
"""Fewer messages are copied one by one, so that a process with little traffic does not load compiled code."""


class _TopicPartition(ctypes.Structure):
    """The first fields of a rd_kafka_topic_partition_t."""

    _fields_ = (("topic", ctypes.c_char_p), ("partition", ctypes.c_int32), ("offset", ctypes.c_int64))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = getattr(ctypes.CDLL(cimpl.__file__), name)
    except (AttributeError, OSError):
        raise ImportError(f"{cimpl.__file__} has no symbol {name}") from None
    function.restype, function.argtypes = result, arguments
    return function


_conf_new = _function("rd_kafka_conf_new", _Pointer)
_conf_set = _function(
    "rd_kafka_conf_set", ctypes.c_int, _Pointer, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t
)
_conf_destroy = _function("rd_kafka_conf_destroy", None, _Pointer)
_conf_set_error_cb = _function("rd_kafka_conf_set_error_cb", None, _Pointer, _ErrorCallback)
_new = _function("rd_kafka_new", _Pointer, ctypes.c_int, _Pointer, ctypes.c_char_p, ctypes.c_size_t)
_last_error = _function("rd_kafka_last_error", ctypes.c_int)
_poll_set_consumer = _function("rd_kafka_poll_set_consumer", ctypes.c_int, _Pointer)
_queue_get_consumer = _function("rd_kafka_queue_get_consumer", _Pointer, _Pointer)
_queue_destroy = _function("rd_kafka_queue_destroy", None, _Pointer)
_consumer_close = _function("rd_kafka_consumer_close", ctypes.c_int, _Pointer)
_destroy = _function("rd_kafka_destroy", None, _Pointer)
_list_new = _function("rd_kafka_topic_partition_list_new", _Pointer, ctypes.c_int)
_list_add = _function(
    "rd_kafka_topic_partition_list_add", ctypes.POINTER(_TopicPartition), _Pointer, ctypes.c_char_p, ctypes.c_int32
)
_list_destroy = _function("rd_kafka_topic_partition_list_destroy", None, _Pointer)
_assign = _function("rd_kafka_assign", ctypes.c_int, _Pointer, _Pointer)
_consume = _function(
    "rd_kafka_consume_batch_queue", ctypes.c_ssize_t, _Pointer, ctypes.c_int, _Pointer, ctypes.c_size_t
)
_topic_name = _function("rd_kafka_topic_name", ctypes.c_char_p, _Pointer)
_message_errstr = _function("rd_kafka_message_errstr", ctypes.c_char_p, _Pointer)
_message_timestamp = _function("rd_kafka_message_timestamp", ctypes.c_int64, _Pointer, _Pointer)
_message_destroy = _function("rd_kafka_message_destroy", None, _Pointer)


class NativeConsumer:
    """A consumer of librdkafka. `close` also runs if the object is deleted. Use a consumer in one thread only.

    All methods may raise `KafkaException`, and `RuntimeError` after `close`.

    Args:
        config: settings by librdkafka's names.
        on_error: called on the thread that consumes, with errors that are not errors of a message.
    """

    def __init__(self, config: Mapping[str, str], on_error: Callable[[KafkaError], None]) -> None:
        def error_cb(_handle: int, code: int, reason: bytes, _opaque: int) -> None:
            on_error(KafkaError(code, reason.decode(errors="replace")))

        callback = _ErrorCallback(error_cb)
        self._client = _create_client(config, callback)
        _check(_poll_set_consumer(self._client))
        self._queue = _queue_get_consumer(self._client)
        self._addresses = np.empty(0, np.int64)
        # librdkafka may call the callback until the client is destroyed. So the finalizer keeps the callback alive.
        self.close = weakref.finalize(self, _close, self._client, self._queue, callback)
        self.close.atexit = False

    def assign(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Read the partitions in `offsets` and no others.

        Args:
            offsets: topic, partition number and first offset of each partition.
        """
        self._check_open()
        partitions = _list_new(0)
        try:
            for topic, partition, offset in offsets:
                _list_add(partitions, topic.encode(), partition).contents.offset = offset
            _check(_assign(self._client, partitions))
        finally:
            _list_destroy(partitions)

    def unassign(self) -> None:
        """Stop reading all partitions."""
        self._check_open()
        _check(_assign(self._client, None))

    @contextmanager
    def consume(self, max_messages: int, timeout_seconds: float) -> Iterator["NativeMessages"]:
        """Wait for `max_messages` messages, up to the time-out. Yields the messages that have arrived.

        The messages are freed at the end of the `with` block. Do not use them later.
        """
        self._check_open()
        if len(self._addresses) < max_messages:
            self._addresses = np.empty(max_messages, np.int64)
        count = _consume(self._queue, int(timeout_seconds * 1000), self._addresses.ctypes.data, max_messages)
        if count < 0:
            _check(_last_error())
        try:
            yield NativeMessages(self._addresses[:count])
        finally:
            _release(self._addresses[:count])

    def _check_open(self) -> None:
        if not self.close.alive:
            raise RuntimeError("the consumer is closed")


class NativeMessages:
    """Messages of several partitions: records and errors.

    Attributes:
        codes: the error code of each message; 0 for a record.
        offsets: the Kafka offset of each message; negative if it has none.
    """

    def __init__(self, addresses: Ids) -> None:
        self._addresses = addresses
        words = (
            _join_bytes(addresses, np.full(len(addresses), 8 * _MESSAGE_WORDS))
            .view(np.int64)
            .reshape(-1, _MESSAGE_WORDS)
            .T
        )
        # The fields of a rd_kafka_message_t: err, rkt, partition, payload, len, key, key_len, offset, _private.
        self.codes = words[0].astype(np.int32)
        self._topic_handles = words[1]
        self._partitions = words[2].astype(np.int32)
        self._values = words[3:5]
        self._keys = words[5:7]
        self.offsets = words[7]

    def masks_by_partition(self) -> dict[tuple[str, int], Mask]:
        """(topic, partition number) -> mask of the messages of the partition. Some errors belong to no partition."""
        handles, partitions = self._topic_handles, self._partitions
        first = handles[:1], partitions[:1]
        if (handles == first[0]).all() and (
            partitions == first[1]
        ).all():  # the usual case; a set costs 60 ns per message
            handles, partitions = first
        masks: dict[tuple[str, int], Mask] = {}
        for handle, partition in set(zip(handles.tolist(), partitions.tolist(), strict=True)):
            if handle:
                name = _topic_name(handle).decode(), partition
                mask = (self._topic_handles == handle) & (self._partitions == partition)
                masks[name] = masks[name] | mask if name in masks else mask
        return masks

    def error(self, index: int) -> KafkaError:
        """The error at `index`, which must not be a record. Its text names the partition, if there is one."""
        text = (_message_errstr(int(self._addresses[index])) or b"").decode(errors="replace")
        if handle := int(self._topic_handles[index]):
            text = f"{_topic_name(handle).decode()}[{self._partitions[index]}]: {text}"
        return KafkaError(int(self.codes[index]), text)

    def record_batch(self, chosen: Mask) -> RecordBatch:
        """The messages in the mask `chosen` as columns. All of them must be records of one partition."""
        selection = slice(None) if chosen.all() else chosen
        values, keys = self._values[:, selection], self._keys[:, selection]
        return RecordBatch(
            _join_bytes(*values),
            _bounds(values[1]),
            _join_bytes(*keys),
            _bounds(keys[1]),
            np.ascontiguousarray(self.offsets[selection]),
            _times(self._addresses[selection]),
        )


def _join_bytes(addresses: Ids, lengths: Ids) -> Bytes:
    """Copy `lengths[i]` bytes from each memory address `addresses[i]`, end to end, into one array."""
    if (kernels := _kernels(len(addresses))) is None:
        return np.frombuffer(b"".join(map(ctypes.string_at, addresses.tolist(), lengths.tolist())), np.uint8)
    joined = np.empty(int(lengths.sum()), np.uint8)
    kernels.gather(np.ascontiguousarray(addresses), np.ascontiguousarray(lengths), joined.ctypes.data)
    return read_only(joined)


def _bounds(lengths: Ids) -> Ids:
    return np.concatenate(([0], np.cumsum(lengths)))


def _times(messages: Ids) -> Ids:
    if (kernels := _kernels(len(messages))) is None:
        return np.array([_message_timestamp(message, None) for message in messages.tolist()], np.int64)
    times = np.empty_like(messages)
    kernels.read_times(_address_of(_message_timestamp), messages, times)
    return times


def _release(messages: Ids) -> None:
    if (kernels := _kernels(len(messages))) is None:
        for message in messages.tolist():
            _message_destroy(message)
    else:
        kernels.release(_address_of(_message_destroy), messages)


def _kernels(count: int) -> ModuleType | None:
    """The module `kernels`; None if `count` messages are too few for compiled code, or if the module is not loaded."""
    return None if count < _MIN_COMPILED_MESSAGES else get_module(load_kernels, count * _MESSAGE_SECONDS)


def _address_of(function: Any) -> int:
    return ctypes.cast(function, _Pointer).value or 0


def _create_client(config: Mapping[str, str], callback: Any) -> int:
    error_text = ctypes.create_string_buffer(512)
    conf = _conf_new()
    for name, value in config.items():
        if _conf_set(conf, name.encode(), value.encode(), error_text, len(error_text)) != _OK:
            _conf_destroy(conf)
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, error_text.value.decode(errors="replace")))
    _conf_set_error_cb(conf, callback)
    client: int | None = _new(_CONSUMER, conf, error_text, len(error_text))  # on success, the client owns `conf`
    if client is None:
        code = _last_error()
        _conf_destroy(conf)
        raise KafkaException(KafkaError(code, error_text.value.decode(errors="replace")))
    return client


def _close(client: int, queue: int, _callback: Any) -> None:
    _consumer_close(client)
    _queue_destroy(queue)
    _destroy(client)


def _check(code: int) -> None:
    if code != _OK:
        raise KafkaException(KafkaError(code))
