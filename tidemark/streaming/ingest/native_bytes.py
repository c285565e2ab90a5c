"""Bytes for compiled code, several at once: one by one they take three times as long.

None of it checks that the bytes are there: who asks makes sure that `at` lies in the array, and what it asks for, too.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tidemark.streaming.ingest.jit_cache import compiled
from tidemark.streaming.ingest.record_batch import Bytes

QUOTE, BACKSLASH, _SPACE = map(ord, '"\\ ')
_FIRST: Final = np.array([(1 << 8 * count) - 1 for count in range(8)] + [-1])

_intrinsic: Any = intrinsic
_BIT, _INT = ir.IntType(1), ir.IntType(64)
_SIXTEEN = ir.VectorType(ir.IntType(8), 16)


def _loaded(kind: Any, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.load(builder.bitcast(builder.gep(array.data, [arguments[1]]), kind.as_pointer()), align=1)


@_intrinsic  # type: ignore[untyped-decorator]
def peek(_typing: Any, data: Any, _at: Any) -> Any:
    """One byte; numba's own index asks each time whether it counts from the end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(_loaded(ir.IntType(8), context, builder, signature, arguments), _INT)

    return types.int64(data, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _eight(_typing: Any, data: Any, _at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _loaded(_INT, context, builder, signature, arguments)

    return types.int64(data, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def plain(_typing: Any, data: Any, _at: Any) -> Any:
    """How many of the next sixteen stand in a JSON string for themselves, up to the first that does not."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = _loaded(_SIXTEEN, context, builder, signature, arguments)
        others = builder.icmp_signed("<", found, ir.Constant(_SIXTEEN, [_SPACE] * 16))  # and all that are not ASCII
        for other in (QUOTE, BACKSLASH):
            others = builder.or_(others, builder.icmp_unsigned("==", found, ir.Constant(_SIXTEEN, [other] * 16)))
        bits = builder.zext(builder.bitcast(others, ir.IntType(16)), _INT)
        return builder.cttz(builder.or_(bits, ir.Constant(_INT, 1 << 16)), ir.Constant(_BIT, 1))

    return types.int64(data, types.int64), generate


@compiled(inline=True)
def word(data: Bytes, at: int, count: int) -> int:
    """The next `count`, eight at most, as one number, whose lowest byte is the first."""
    if at + 8 <= len(data):
        return _eight(data, at) & _FIRST[count]  # type: ignore[no-any-return]
    found = 0
    for place in range(count):
        found |= peek(data, at + place) << (8 * place)
    return found
