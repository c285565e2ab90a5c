"""Compiled functions over whole arrays: sorting edges into their groups, gathering bytes, and calls of librdkafka.

They need numba, which takes a core 0.4 s to load. So `edges` and `consumer` import this module only for large inputs;
for small ones they use numpy.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tidemark.streaming.ingest.jit_cache import compiled, kept
from tidemark.streaming.ingest.record_batch import Edges
from tidemark.streaming.values.intervals import Ids

MOST_STEPS: Final = 32
"""Back that an edge is taken on average. Edges that come in the order in which they complete need one or two."""


@compiled(inline=True)
def _put(to: Edges, place: int, it: Edges, at: int) -> None:
    to.incarnations[place] = it.incarnations[at]
    to.prevs[place] = it.prevs[at]
    to.ids[place] = it.ids[at]
    to.kinds[place] = it.kinds[at]
    to.offsets[place] = it.offsets[at]
    to.times[place] = it.times[at]


@kept
@compiled()
def arrange(edges: Edges, found: Edges, begins: Ids, hand: Edges) -> bool:
    """Put into `found` the edges by group and `prev`, those of one `prev` as they came; False where they come in such
    disorder that others do it faster. `begins` are zeros, two more than there are groups; `hand` has room for one edge.
    """
    count = len(edges.ids)
    for at in range(count):
        begins[edges.incarnations[at] + 2] += 1
    for group in range(2, len(begins)):
        begins[group] += begins[group - 1]
    for at in range(count):
        group = edges.incarnations[at] + 1
        _put(found, begins[group], edges, at)
        begins[group] += 1
    left = MOST_STEPS * count
    for at in range(1, count):
        group, prev, place = found.incarnations[at], found.prevs[at], at
        if found.incarnations[at - 1] != group or found.prevs[at - 1] <= prev:
            continue
        _put(hand, 0, found, at)
        while place > 0 and found.incarnations[place - 1] == group and found.prevs[place - 1] > prev:
            _put(found, place, found, place - 1)
            place -= 1
        _put(found, place, hand, 0)
        left -= at - place
        if left < 0:
            return False
    return True


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


def compile_all() -> None:
    """Compile all functions of this module, or load them from the cache."""
    none = np.zeros(0, np.int64)
    arrange(Edges.room(0), Edges.room(0), np.zeros(2, np.int64), Edges.room(1))
    gather(none, none, 0)
    times(0, none, none)
    release(0, none)
