"""Memory and functions of C libraries, for compiled code. Addresses are trusted: a wrong one ends the process."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tidemark.streaming.ingest.jit_cache import compiled, kept
from tidemark.streaming.values.intervals import Ids

_intrinsic: Any = intrinsic
_memcpy: Any = cgutils.raw_memcpy
_INT, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()


@_intrinsic  # type: ignore[untyped-decorator]
def _copy(_typing: Any, _target: Any, _source: Any, _length: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source, length = arguments
        _memcpy(builder, builder.inttoptr(target, _BYTES), builder.inttoptr(source, _BYTES), length, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _call_time(_typing: Any, _function: Any, _message: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(_INT, [_BYTES, _BYTES]).as_pointer())
        return builder.call(function, [builder.inttoptr(arguments[1], _BYTES), ir.Constant(_BYTES, None)])

    return types.int64(types.int64, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _call_release(_typing: Any, _function: Any, _message: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [_BYTES]).as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], _BYTES)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@kept
@compiled()
def gather(addresses: Ids, lengths: Ids, target: int) -> None:
    """Copy what lies at the addresses to the target, one after the other."""
    for at in range(len(addresses)):
        _copy(target, addresses[at], lengths[at])
        target += lengths[at]


@kept
@compiled()
def times(function: int, messages: Ids, found: Ids) -> None:
    """Put `rd_kafka_message_timestamp` of each message into `found`."""
    for at in range(len(messages)):
        found[at] = _call_time(function, messages[at])


@kept
@compiled()
def release(function: int, messages: Ids) -> None:
    """`rd_kafka_message_destroy` of each message."""
    for at in range(len(messages)):
        _call_release(function, messages[at])
