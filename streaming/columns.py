"""Kafka's records as columns of numbers: whole Arrow batches decoded at once, each bad record set aside.

The shortcut: the values of a batch are joined by newlines and decoded as JSON lines. That is exact because every value
begins with `{` and ends with `}`. A newline inside a JSON string is refused by the decoder, so a boundary never lies
in a string; between `}` and `{` no JSON value goes on, so it never lies in a value either. Each message then holds one
record or more, and as many records as messages came out: one each.

What the shortcut cannot take for certain goes to `wire.read`, record by record, which alone gives reasons. Where a
batch fails as a whole it is divided, so that a bad record costs a few dozen neighbours a slower decoding and no more.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import starmap
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streaming import wire
from streaming.errors import BadRecord
from streaming.incarnations import Incarnations
from streaming.intervals import Ids
from streaming.packet import Kind
from streaming.reasons import Reason
from streaming.wire import Topic

# Codes in the column `kinds` beside those of `Kind`.
ROW: Final = 3
MARKER: Final = 4
REJECTED: Final = 5

# A batch that fails as a whole is tried again in so many parts, down to parts of this size.
PARTS: Final = 16
SMALLEST_PART: Final = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of an Arrow batch from one Kafka partition; `times` are in ms since 1970."""

    keys: pa.BinaryArray
    values: pa.BinaryArray
    offsets: Ids
    times: Ids


@dataclass(frozen=True, slots=True)
class Edges:
    """One row per edge or batch row, in the order of arrival; `prevs` and `ids` with their sign.

    `kinds` are codes of `Kind`, or `ROW`, whose `prevs` and `ids` mean nothing. `incarnations` are numbers.
    """

    incarnations: Ids
    kinds: npt.NDArray[np.uint8]
    prevs: Ids
    ids: Ids
    offsets: Ids
    times: Ids

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Edges":
        return Edges(*(getattr(self, name)[chosen] for name in self.__slots__))


# -- the records as the shortcut sees them: the types of `wire`, a bit stricter, and the same attributes in all

_NO_PREV: Final = -(2**63)  # no ID: those end one before it
_BATCH: Final = -(2**63)


class _BatchId(Enum):
    BATCH = "batch"

    def __index__(self) -> int:
        return _BATCH


class _Object(msgspec.Struct, gc=False):
    """A JSON object whose content is passed over: 100 ns quicker than `msgspec.Raw`."""


class _Line(msgspec.Struct, gc=False, tag_field="kind"):
    stream: str
    writer: str
    id: wire.Id
    epoch: wire.Epoch = 0
    prev: wire.Id = _NO_PREV


class _Fact(_Line, kw_only=True, gc=False, tag="RDATA"):
    id: wire.Id | _BatchId  # type: ignore[assignment]  # an int for numpy, either way
    row: _Object | str | int | float | bool | None


class _AnyFact(_Line, kw_only=True, gc=False, tag="RDATA"):
    id: wire.Id | _BatchId  # type: ignore[assignment]
    row: msgspec.Raw


class _Void(_Line, gc=False, tag="VOID"): ...


class _Position(_Line, gc=False, tag="POSITION"): ...


class _Join(_Line, gc=False, tag="JOIN"): ...


class _Retire(_Line, gc=False, tag="RETIRE"): ...


_CODES: Final[dict[type[_Line], int]] = {
    _Fact: Kind.RDATA.value,
    _AnyFact: Kind.RDATA.value,
    _Void: Kind.VOID.value,
    _Position: Kind.POSITION.value,
    _Join: MARKER,
    _Retire: MARKER,
}
_DECODERS: Final = (
    msgspec.json.Decoder(_Fact | _Void | _Position | _Join | _Retire),
    msgspec.json.Decoder(_AnyFact | _Void | _Position | _Join | _Retire),
)


def _lines(values: pa.BinaryArray) -> Sequence[_Line] | None:
    """The records of `values`, one each, or None where the shortcut cannot tell."""
    if values.null_count or not pc.all(pc.and_(pc.starts_with(values, b"{"), pc.ends_with(values, b"}"))).as_py():
        return None
    try:
        values.cast(pa.string())  # the decoder does not look for UTF-8 in what it passes over
        whole = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
        joined = pc.binary_join(whole, b"\n")[0].as_buffer()
    except pa.ArrowException:  # not UTF-8, or longer than 2 GiB
        return None
    for decoder in _DECODERS:
        try:
            lines = decoder.decode_lines(joined)
        except (ValueError, RecursionError):
            continue
        return lines if len(lines) == len(values) else None
    return None


class Columns:
    """The records of a task from one Kafka partition, decoded batch by batch. Not for use by several threads.

    `markers` come with their offsets and times, `rejected` gives the offsets for each reason.
    """

    def __init__(self, topic: Topic) -> None:
        self.incarnations = Incarnations()
        self.markers: list[tuple[wire.Marker, int, int]] = []
        self.rejected: dict[Reason, list[int]] = defaultdict(list)
        self.next_offset = 0
        self.topic = topic
        self._edges: list[Edges] = []

    def add(self, batch: Batch) -> None:
        count = len(batch.values)
        edges = Edges(
            np.zeros(count, np.int64),
            np.zeros(count, np.uint8),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            batch.offsets,
            batch.times,
        )
        self._fill(edges, batch, 0, count)
        if edges.kinds.max(initial=0) > ROW:
            edges = edges.where(edges.kinds <= ROW)
        self._edges.append(edges)
        self.next_offset = max(self.next_offset, int(batch.offsets.max(initial=-1)) + 1)

    def edges(self) -> Edges:
        """All edges and batch rows, in the order of their offsets."""
        edges = Edges(*(np.concatenate([getattr(part, name) for part in self._edges]) for name in Edges.__slots__))
        if np.any(edges.offsets[1:] < edges.offsets[:-1]):
            return Edges(*(getattr(edges, name)[np.argsort(edges.offsets)] for name in Edges.__slots__))
        return edges

    def _fill(self, edges: Edges, batch: Batch, first: int, stop: int) -> None:
        lines = _lines(batch.values[first:stop]) if self.topic is Topic.FACTS else None
        if lines is not None:
            for at in np.flatnonzero(~self._fill_from(lines, edges, batch.keys[first:stop], first, stop)).tolist():
                self._fill_one(edges, batch, first + at)
        elif stop - first <= SMALLEST_PART:
            for at in range(first, stop):
                self._fill_one(edges, batch, at)
        else:
            step = max(SMALLEST_PART, -(-(stop - first) // PARTS))
            for part in range(first, stop, step):
                self._fill(edges, batch, part, min(part + step, stop))

    def _fill_from(
        self, lines: Sequence[_Line], edges: Edges, keys: pa.BinaryArray, first: int, stop: int
    ) -> npt.NDArray[np.bool_]:
        """Fill `first .. stop - 1` from decoded lines; says for which of them that is certain and complete."""
        count = len(lines)
        numbers = np.fromiter(self._numbers(lines), np.int64, count)
        kinds = np.frombuffer(bytearray([_CODES[type(line)] for line in lines]), np.uint8)
        ids = np.fromiter([line.id for line in lines], np.int64, count)
        prevs = np.fromiter([line.prev for line in lines], np.int64, count)
        facts = kinds == Kind.RDATA.value
        prevs = np.where(facts & (prevs == _NO_PREV), ids - np.sign(ids), prevs)
        rows = facts & (ids == _BATCH)
        kinds[rows] = ROW
        beyond = ((prevs >= 0) & (prevs < ids)) | ((prevs <= 0) & (prevs > ids))  # never so without a prev
        right_key = pc.equal(keys, self.incarnations.keys().take(pa.array(numbers)))  # null where a key or name is
        edges.incarnations[first:stop] = numbers
        edges.kinds[first:stop] = kinds
        edges.ids[first:stop] = ids
        edges.prevs[first:stop] = prevs
        right_key = pc.fill_null(right_key, pa.scalar(value=False)).to_numpy(zero_copy_only=False)
        certain: npt.NDArray[np.bool_] = right_key & (rows | (beyond & (kinds != MARKER)))
        return certain

    def _numbers(self, lines: Sequence[_Line]) -> list[int]:
        number_of = self.incarnations.number_of
        try:
            return [number_of[line.writer][line.epoch][line.stream] for line in lines]
        except KeyError:
            return list(starmap(self.incarnations.number, ((line.stream, line.writer, line.epoch) for line in lines)))

    def _fill_one(self, edges: Edges, batch: Batch, at: int) -> None:
        try:
            record = wire.read(batch.values[at].as_py(), batch.keys[at].as_py(), self.topic)
        except BadRecord as bad:
            edges.kinds[at] = REJECTED
            self.rejected[Reason(bad.reason)].append(int(batch.offsets[at]))
            return
        if isinstance(record, wire.Marker):
            edges.kinds[at] = MARKER
            self.markers.append((record, int(batch.offsets[at]), int(batch.times[at])))
            return
        edges.incarnations[at] = self.incarnations.number(record.stream, record.writer, record.epoch)
        match record:
            case wire.Rdata(id="batch"):
                edges.kinds[at] = ROW
            case wire.Rdata():
                edges.kinds[at], edges.prevs[at], edges.ids[at] = Kind.RDATA, wire.start(record), record.id
            case wire.Void() | wire.Position():
                kind = Kind.VOID if isinstance(record, wire.Void) else Kind.POSITION
                edges.kinds[at], edges.prevs[at], edges.ids[at] = kind, record.prev, record.id
