"""Compiled functions over whole arrays: sorting edges into their groups, gathering bytes, and calls of librdkafka.

They need numba, which takes 0.4 s of CPU to load. `edge_chains` and `native_consumer` load this module only for large
inputs (`jit_loader`).
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tidemark.streaming.ingest.jit_cache import cached, compiled
from tidemark.streaming.ingest.record_batch import Edges
from tidemark.streaming.values.intervals import Ids

MOST_STEPS: Final = 32
"""Average steps back of an edge in the insertion sort. Edges in the order of completion need one or two."""


@compiled(inline=True)
def _put(target: Edges, index: int, source: Edges, source_index: int) -> None:
    target.incarnations[index] = source.incarnations[source_index]
    target.prevs[index] = source.prevs[source_index]
    target.ids[index] = source.ids[source_index]
    target.kinds[index] = source.kinds[source_index]
    target.offsets[index] = source.offsets[source_index]
    target.times[index] = source.times[source_index]


@cached
@compiled()
def arrange(edges: Edges, arranged: Edges, begins: Ids, spare: Edges) -> bool:
    """Sort edges by group and `prev`, in the order of arrival if they are equal.

    Args:
        edges: the edges. `incarnations` are group numbers.
        arranged: receives the sorted edges.
        begins: zeros, two more than there are groups.
        spare: room for one edge.

    Returns:
        False if the edges are so far from sorted that numpy is faster; `arranged` is useless then.
    """
    count = len(edges.ids)
    for at in range(count):
        begins[edges.incarnations[at] + 2] += 1
    for group in range(2, len(begins)):
        begins[group] += begins[group - 1]
    for at in range(count):
        group = edges.incarnations[at] + 1
        _put(arranged, begins[group], edges, at)
        begins[group] += 1
    steps = MOST_STEPS * count
    for at in range(1, count):
        group, prev, index = arranged.incarnations[at], arranged.prevs[at], at
        if arranged.incarnations[at - 1] != group or arranged.prevs[at - 1] <= prev:
            continue
        _put(spare, 0, arranged, at)
        while index > 0 and arranged.incarnations[index - 1] == group and arranged.prevs[index - 1] > prev:
            _put(arranged, index, arranged, index - 1)
            index -= 1
        _put(arranged, index, spare, 0)
        steps -= at - index
        if steps < 0:
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


@cached
@compiled()
def gather(addresses: Ids, lengths: Ids, target: int) -> None:
    """Copy `lengths[i]` bytes from each address `addresses[i]` to `target`, end to end."""
    for at in range(len(addresses)):
        _copy(target, addresses[at], lengths[at])
        target += lengths[at]


@cached
@compiled()
def times(function: int, messages: Ids, result: Ids) -> None:
    """Put `rd_kafka_message_timestamp` of each message into `result`."""
    for at in range(len(messages)):
        result[at] = _call_time(function, messages[at])


@cached
@compiled()
def release(function: int, messages: Ids) -> None:
    """Call `rd_kafka_message_destroy` for each message."""
    for at in range(len(messages)):
        _call_release(function, messages[at])


def compile_all() -> None:
    """Compile all functions of this module, or load them from the cache."""
    none = np.zeros(0, np.int64)
    arrange(Edges.allocate(0), Edges.allocate(0), np.zeros(2, np.int64), Edges.allocate(1))
    gather(none, none, 0)
    times(0, none, none)
    release(0, none)
