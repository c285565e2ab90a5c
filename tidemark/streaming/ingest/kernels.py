"""Compiled functions that sort edges by group, gather bytes, call librdkafka, and skip JSON values.

This module needs numba, which takes 0.4 s of CPU to load. `compact` and `native_consumer` load this module only for
large inputs (`jit_loader`); `field_scan` imports it.

The functions `skip_...` find the end of JSON values (RFC 8259) in an array of bytes, without decoding the values. Each
function starts at the index `at` and returns the index after the item. The result is -1 if the bytes before `end` are
not certain to be JSON in UTF-8. The result is also -1 for legal but rare items: very long numbers, and deeply nested
values.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tidemark.streaming.ingest.jit_cache import cached, compiled
from tidemark.streaming.ingest.record_batch import Bytes, Edges
from tidemark.streaming.values.intervals import Ids

MAX_STEPS: Final = 32
"""`sort_edges` gives up after this many steps per edge on average. If edges arrive in the order of completion, the sort
takes one or two steps per edge.
"""


@compiled(inline=True)
def _copy_edge(target: Edges, index: int, source: Edges, source_index: int) -> None:
    target.writer_epochs[index] = source.writer_epochs[source_index]
    target.prevs[index] = source.prevs[source_index]
    target.ids[index] = source.ids[source_index]
    target.kinds[index] = source.kinds[source_index]
    target.offsets[index] = source.offsets[source_index]
    target.times[index] = source.times[source_index]


@cached
@compiled()
def sort_edges(edges: Edges, sorted_edges: Edges, begins: Ids, spare: Edges) -> bool:
    """Sort edges by group, then by `prev`. The sort is stable.

    Args:
        edges: the edges. `writer_epochs` are group numbers.
        sorted_edges: receives the sorted edges.
        begins: zeros, two more items than there are groups; overwritten.
        spare: room for one edge; overwritten.

    Returns:
        False if the sort took too many steps (`MAX_STEPS`), so that numpy is faster. Then `sorted_edges` is not sorted.
    """
    count = len(edges.ids)
    for at in range(count):
        begins[edges.writer_epochs[at] + 2] += 1
    for group in range(2, len(begins)):
        begins[group] += begins[group - 1]
    for at in range(count):
        group = edges.writer_epochs[at] + 1
        _copy_edge(sorted_edges, begins[group], edges, at)
        begins[group] += 1
    steps = MAX_STEPS * count
    for at in range(1, count):
        group, prev, index = sorted_edges.writer_epochs[at], sorted_edges.prevs[at], at
        if sorted_edges.writer_epochs[at - 1] != group or sorted_edges.prevs[at - 1] <= prev:
            continue
        _copy_edge(spare, 0, sorted_edges, at)
        while index > 0 and sorted_edges.writer_epochs[index - 1] == group and sorted_edges.prevs[index - 1] > prev:
            _copy_edge(sorted_edges, index, sorted_edges, index - 1)
            index -= 1
        _copy_edge(sorted_edges, index, spare, 0)
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
    """Copy `lengths[i]` bytes from each memory address `addresses[i]` to the address `target`, end to end."""
    for at in range(len(addresses)):
        _copy(target, addresses[at], lengths[at])
        target += lengths[at]


@cached
@compiled()
def read_times(function: int, messages: Ids, result: Ids) -> None:
    """Write the Kafka time of each message to `result`.

    Args:
        function: the address of `rd_kafka_message_timestamp`.
        messages: the addresses of the messages.
        result: receives milliseconds since 1970.
    """
    for at in range(len(messages)):
        result[at] = _call_time(function, messages[at])


@cached
@compiled()
def release(function: int, messages: Ids) -> None:
    """Free messages. `function` is the address of `rd_kafka_message_destroy`, `messages` has the addresses."""
    for at in range(len(messages)):
        _call_release(function, messages[at])


def compile_all() -> None:
    """Compile all functions of this module, or load them from the cache."""
    empty = np.zeros(0, np.int64)
    sort_edges(Edges.allocate(0), Edges.allocate(0), np.zeros(2, np.int64), Edges.allocate(1))
    gather(empty, empty, 0)
    read_times(0, empty, empty)
    release(0, empty)


QUOTE, BACKSLASH, _SPACE = map(ord, '"\\ ')
# For each count of bytes from 0 to 8: a mask of that many low bytes of a word.
_BYTE_MASKS: Final = np.array([(1 << 8 * count) - 1 for count in range(8)] + [-1])

_BIT, _INT = ir.IntType(1), ir.IntType(64)
_SIXTEEN = ir.VectorType(ir.IntType(8), 16)


def _load(kind: Any, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.load(builder.bitcast(builder.gep(array.data, [arguments[1]]), kind.as_pointer()), align=1)


@_intrinsic  # type: ignore[untyped-decorator]
def peek(_typing: Any, data: Any, _at: Any) -> Any:
    """Read one byte, without checking the index. Faster than numba's indexing, which checks for a negative index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(_load(ir.IntType(8), context, builder, signature, arguments), _INT)

    return types.int64(data, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _load_eight(_typing: Any, data: Any, _at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(_INT, context, builder, signature, arguments)

    return types.int64(data, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def count_plain(_typing: Any, data: Any, _at: Any) -> Any:
    """Count the consecutive plain bytes that begin at `at`, at most 16. Stops at the first byte that is not plain.

    The data must have 16 bytes from `at` on.

    A byte is plain if it is an ASCII character that a JSON string has without an escape.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = _load(_SIXTEEN, context, builder, signature, arguments)
        special = builder.icmp_signed("<", loaded, ir.Constant(_SIXTEEN, [_SPACE] * 16))  # non-ASCII is negative
        for character in (QUOTE, BACKSLASH):
            special = builder.or_(special, builder.icmp_unsigned("==", loaded, ir.Constant(_SIXTEEN, [character] * 16)))
        bits = builder.zext(builder.bitcast(special, ir.IntType(16)), _INT)
        return builder.cttz(builder.or_(bits, ir.Constant(_INT, 1 << 16)), ir.Constant(_BIT, 1))

    return types.int64(data, types.int64), generate


@compiled(inline=True)
def load_word(data: Bytes, at: int, count: int) -> int:
    """The `count` bytes from `at` on, at most eight, as a little-endian number."""
    if at + 8 <= len(data):
        return _load_eight(data, at) & _BYTE_MASKS[count]  # type: ignore[no-any-return]
    number = 0
    for index in range(count):
        number |= peek(data, at + index) << (8 * index)
    return number


COLON, COMMA, MINUS, POINT = map(ord, ":,-.")
OPEN_LIST, CLOSE_LIST, OPEN_OBJECT, CLOSE_OBJECT = map(ord, "[]{}")
NINE, ZERO = ord("9"), ord("0")
_SPACE, _TAB, _LINE_FEED, _RETURN = map(ord, " \t\n\r")
_T, _F, _U, _E, _PLUS = map(ord, "tfue+")
_LOWER_CASE_BIT: Final = 0x20  # the bit by which lower-case letters differ from upper-case ones
# `_FALSE` lacks the first letter, because `_skip_literal` compares four bytes.
_TRUE, _FALSE, _NULL = (int.from_bytes(literal, "little") for literal in (b"true", b"alse", b"null"))
_ESCAPED: Final = np.zeros(256, np.bool_)
_ESCAPED[[*b'"\\/bfnrt']] = True
_HEX: Final = np.full(256, -1)
for _hex_digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX[[*_hex_digits]] = range(16)
_PLAIN: Final = np.arange(256) < 0x80  # same definition as in `count_plain`
_PLAIN[:_SPACE] = False
_PLAIN[[QUOTE, BACKSLASH]] = False

_MAX_DEPTH: Final = 60  # of nested lists and objects
_MAX_NUMBER_LENGTH: Final = 300  # bytes


@compiled(inline=True)
def are_same(left: Bytes, left_at: int, left_end: int, right: Bytes, right_at: int, right_end: int) -> bool:
    """Whether two ranges have the same bytes."""
    if left_end - left_at != right_end - right_at:
        return False
    while left_at < left_end:
        count = min(8, left_end - left_at)
        if load_word(left, left_at, count) != load_word(right, right_at, count):
            return False
        left_at += count
        right_at += count
    return True


@compiled(inline=True)
def skip_space(data: Bytes, at: int, end: int) -> int:
    """The index of the next byte that is not white space, or `end`. If `at` is negative or beyond `end`, `at`."""
    while 0 <= at < end and peek(data, at) in (_SPACE, _LINE_FEED, _RETURN, _TAB):
        at += 1
    return at


@compiled()
def skip_character(data: Bytes, at: int, end: int) -> int:
    """The index after a UTF-8 character of several bytes (RFC 3629), which begins at `at`."""
    first, low, high, following = peek(data, at), 0x80, 0xBF, 1
    if first >= 0xF0:
        following = 3
        low = 0x90 if first == 0xF0 else low
        high = 0x8F if first == 0xF4 else high
    elif first >= 0xE0:
        following = 2
        low = 0xA0 if first == 0xE0 else low
        high = 0x9F if first == 0xED else high
    if not 0xC2 <= first <= 0xF4 or at + following >= end or not low <= peek(data, at + 1) <= high:
        return -1
    for index in range(at + 2, at + following + 1):
        if not 0x80 <= peek(data, index) <= 0xBF:
            return -1
    return at + following + 1


@compiled(inline=True)
def _code_unit(data: Bytes, at: int, end: int) -> int:
    """The UTF-16 code unit of an escape: the four hexadecimal digits after the `u` at `at`. -1 if they are missing."""
    if at + 5 > end or peek(data, at) != _U:
        return -1
    unit = 0
    for index in range(at + 1, at + 5):
        if _HEX[peek(data, index)] < 0:
            return -1
        unit = unit << 4 | _HEX[peek(data, index)]
    return unit


@compiled()
def _skip_escape(data: Bytes, at: int, end: int) -> int:
    """The index after an escape. Its backslash is directly before `at`."""
    if at < end and _ESCAPED[peek(data, at)]:
        return at + 1
    unit = _code_unit(data, at, end)
    if unit >> 11 != 0xD800 >> 11:
        return at + 5 if unit >= 0 else -1
    # After the first half of a surrogate pair, the second half must follow.
    if unit >> 10 == 0xD800 >> 10 and at + 5 < end and peek(data, at + 5) == BACKSLASH:
        return at + 11 if _code_unit(data, at + 6, end) >> 10 == 0xDC00 >> 10 else -1
    return -1


@compiled(inline=True)
def skip_plain(data: Bytes, at: int, end: int) -> int:
    """The index of the next byte that is not plain (see `count_plain`). The index may be larger than `end`."""
    while at + 16 <= len(data):
        count = count_plain(data, at)
        at += count
        if count < 16 or at >= end:
            return at
    while at < end and _PLAIN[peek(data, at)]:
        at += 1
    return at


@compiled(inline=True)
def skip_string(data: Bytes, at: int, end: int) -> int:
    """The index after the closing quote of a string. `at`: the index after the opening quote."""
    while at >= 0:
        at = skip_plain(data, at, end)
        if at >= end or peek(data, at) < _SPACE:
            return -1
        if peek(data, at) == QUOTE:
            return at + 1
        at = _skip_escape(data, at + 1, end) if peek(data, at) == BACKSLASH else skip_character(data, at, end)
    return -1


@compiled(inline=True)
def _skip_digits(data: Bytes, at: int, end: int) -> int:
    """The index after any digits; `at` if there are none."""
    while at < end and ZERO <= peek(data, at) <= NINE:
        at += 1
    return at


@compiled(inline=True)
def skip_number(data: Bytes, at: int, end: int) -> int:
    """The index after a number. Does not check the byte at this index."""
    whole = at + 1 if at < end and peek(data, at) == MINUS else at
    after = _skip_digits(data, whole, end)
    if after == whole or (peek(data, whole) == ZERO and after > whole + 1):
        return -1
    if after < end and peek(data, after) == POINT:
        fraction = after + 1
        after = _skip_digits(data, fraction, end)
        if after == fraction:
            return -1
    if after < end and peek(data, after) | _LOWER_CASE_BIT == _E:
        has_sign = after + 1 < end and (peek(data, after + 1) == MINUS or peek(data, after + 1) == _PLUS)
        exponent = after + 2 if has_sign else after + 1
        after = _skip_digits(data, exponent, end)
        if after == exponent:
            return -1
    return after if after - at <= _MAX_NUMBER_LENGTH else -1


@compiled(inline=True)
def _skip_literal(data: Bytes, at: int, end: int, expected: int) -> int:
    """The index after the four bytes `expected`, which are given as a little-endian number."""
    return at + 4 if at + 4 <= end and load_word(data, at, 4) == expected else -1


@compiled(inline=True)
def _skip_key(data: Bytes, at: int, end: int) -> int:
    """The index after a key of an object and its colon. White space may come before the key."""
    at = skip_space(data, at, end)
    if at >= end or peek(data, at) != QUOTE:
        return -1
    at = skip_string(data, at + 1, end)
    if at < 0:
        return -1
    at = skip_space(data, at, end)
    return at + 1 if at < end and peek(data, at) == COLON else -1


@compiled()
def skip_value(data: Bytes, at: int, end: int) -> int:
    """The index after a JSON value of any type. White space may come before the value."""
    depth, objects = 0, 0  # `objects` has a bit for each open list or object: 1 for an object
    while True:
        at = skip_space(data, at, end)
        if at >= end:
            return -1
        first = peek(data, at)
        if first in (OPEN_OBJECT, OPEN_LIST):
            inside = skip_space(data, at + 1, end)
            if inside >= end or depth == _MAX_DEPTH:
                return -1
            if peek(data, inside) == first + 2:  # in ASCII, } is { + 2 and ] is [ + 2
                at = inside + 1
            else:
                depth += 1
                objects <<= 1
                at = inside
                if first == OPEN_OBJECT:
                    objects |= 1
                    at = _skip_key(data, at, end)
                    if at < 0:
                        return -1
                continue
        elif first == QUOTE:
            at = skip_string(data, at + 1, end)
        elif first == MINUS or ZERO <= first <= NINE:
            at = skip_number(data, at, end)
        elif first == _T:
            at = _skip_literal(data, at, end, _TRUE)
        elif first == _F:
            at = _skip_literal(data, at + 1, end, _FALSE)
        else:
            at = _skip_literal(data, at, end, _NULL)
        if at < 0:
            return -1
        while depth:
            at = skip_space(data, at, end)
            if at >= end:
                return -1
            if peek(data, at) == COMMA:
                at += 1
                if objects & 1:
                    at = _skip_key(data, at, end)
                    if at < 0:
                        return -1
                break
            if peek(data, at) != (CLOSE_OBJECT if objects & 1 else CLOSE_LIST):
                return -1
            at += 1
            depth -= 1
            objects >>= 1
        else:
            return at
