"""Bytes read several at once: what they say, and that none is read which is not there."""

import ctypes
import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streaming.test_field_scan import ODD, written
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.jit_cache import compiled
from tidemark.streaming.ingest.kernels import count_plain, load_word, peek
from tidemark.streaming.ingest.record_batch import Bytes, RecordBatch, read_only
from tidemark.streaming.wire.records import Topic

PAGE = mmap.PAGESIZE
_NOBODY = 0  # PROT_NONE


@compiled()
def _peek(data: Bytes, at: int) -> int:
    return peek(data, at)  # type: ignore[no-any-return]


@compiled()
def _plain(data: Bytes, at: int) -> int:
    return count_plain(data, at)  # type: ignore[no-any-return]


@compiled()
def _word(data: Bytes, at: int, count: int) -> int:
    return load_word(data, at, count)


def stands_for_itself(byte: int) -> bool:
    return 0x20 <= byte < 0x80 and byte not in b'"\\'


@given(st.binary(min_size=16, max_size=40) | st.text('ab "\\\x00\x1f\x7f', min_size=16, max_size=40).map(str.encode))
def test_what_they_say(text: bytes) -> None:
    data = read_only(np.frombuffer(text, np.uint8))
    for at in range(len(text) - 15):
        strange = [place for place in range(16) if not stands_for_itself(text[at + place])]
        assert _plain(data, at) == min(strange, default=16)
    for at in range(len(text)):
        assert _peek(data, at) == text[at]
        for count in range(min(8, len(text) - at) + 1):
            assert _word(data, at, count) == int.from_bytes(
                text[at : at + count].ljust(8, b"\0"), "little", signed=True
            )


@contextmanager
def guarded(text: bytes, *, to_the_end: bool) -> Iterator[Bytes]:
    """The text at the end or at the beginning of a page between two that nobody may read."""
    room = mmap.mmap(-1, 3 * PAGE)
    pages = np.frombuffer(room, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    begin = 2 * PAGE - len(text) if to_the_end else PAGE
    pages[begin : begin + len(text)] = np.frombuffer(text, np.uint8)
    edges = pages.ctypes.data, pages.ctypes.data + 2 * PAGE
    try:
        assert [protect(edge, PAGE, _NOBODY) for edge in edges] == [0, 0]
        yield read_only(pages[begin : begin + len(text)])
    finally:
        assert [protect(edge, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) for edge in edges] == [0, 0]


@pytest.mark.parametrize("to_the_end", [True, False])
def test_nothing_is_read_that_is_not_there(to_the_end: bool) -> None:
    """A page beside the records that is not ours ends the process: each is cut wherever it may be, and stands alone."""
    whole = [value for _, value in written(24) if value] + ODD
    whole += [
        json.dumps({"kind": "VOID", "stream": "x" * width, "writer": "w" * width}).encode() for width in range(20)
    ]
    zero = np.zeros(1, np.int64)
    cut = {text[:stop] for text in whole for stop in range(max(1, len(text) - 200), len(text) + 1)}
    for text in (text for text in cut if len(text) <= PAGE):
        bounds = np.array([0, len(text)])
        with guarded(text, to_the_end=to_the_end) as values:
            decoder = Decoder(Topic.FACTS)
            decoder._scan(RecordBatch(values, bounds, values, bounds, zero, zero))
