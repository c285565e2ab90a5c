"""Kafka's records as columns of numbers: decoded some thousand at a time, each bad record set aside.

The shortcut: the values are decoded as JSON lines, a newline between any two. That is exact because every value begins
with `{` and ends with `}`. A newline inside a JSON string is refused by the decoder, so a boundary never lies
in a string; between `}` and `{` no JSON value goes on, so it never lies in a value either. Each message then holds one
record or more, and as many records as messages came out: one each.

Where that does not come out, the batch is decoded value by value, at twice the cost. What is not a plain edge, row or
run of facts then goes to `records.read`, which alone gives reasons: a bad record costs itself, and its neighbours some
time at most.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, compress, starmap
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemark.streaming import records
from tidemark.streaming.claims import claims
from tidemark.streaming.errors import BadRecord
from tidemark.streaming.fetched import Fetched
from tidemark.streaming.incarnations import Incarnations
from tidemark.streaming.intervals import Ids
from tidemark.streaming.model import Reason
from tidemark.streaming.records import Kind, Topic
from tidemark.streaming.runs import Mask, TurnedAway

# Codes in the column `kinds` beside those of `Kind`.
ROW: Final = 3
REJECTED: Final = 7


@dataclass(frozen=True, slots=True)
class Edges:
    """One row per edge or batch row, in the order of arrival; `prevs` and `ids` with their sign; those of a RUN share
    their offset.

    `kinds` are codes of `Kind`, or `ROW`, whose `prevs` and `ids` mean nothing. `incarnations` are numbers.
    """

    incarnations: Ids
    kinds: npt.NDArray[np.uint8]
    prevs: Ids
    ids: Ids
    offsets: Ids
    times: Ids

    def where(self, chosen: Mask) -> "Edges":
        if chosen.all():
            return self  # the usual case
        return self.at(chosen)

    def at(self, places: Mask | npt.NDArray[np.intp]) -> "Edges":
        return Edges(*(getattr(self, name)[places] for name in self.__slots__))


# -- the records as the shortcut sees them: the types of `records`, a bit stricter, and the same attributes in all

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
    id: records.Id
    epoch: records.Epoch = 0
    prev: records.Id = _NO_PREV


class _Fact(_Line, kw_only=True, gc=False, tag=Kind.RDATA.name):
    id: records.Id | _BatchId  # type: ignore[assignment]  # an int for numpy, either way
    row: _Object | str | int | float | bool | None


class _AnyFact(_Line, kw_only=True, gc=False, tag=Kind.RDATA.name):
    id: records.Id | _BatchId  # type: ignore[assignment]
    row: msgspec.Raw


class _FactRun(_Line, kw_only=True, tag=Kind.RUN.name):
    id: records.Id = 0
    ids: list[records.Id]
    rows: list[list[_Object | str | int | float | bool | None]]


class _AnyFactRun(_Line, kw_only=True, tag=Kind.RUN.name):
    id: records.Id = 0
    ids: list[records.Id]
    rows: list[list[msgspec.Raw]]


class _Void(_Line, gc=False, tag=Kind.VOID.name): ...


class _Position(_Line, gc=False, tag=Kind.POSITION.name): ...


class _Join(_Line, gc=False, tag=Kind.JOIN.name): ...


class _Retire(_Line, gc=False, tag=Kind.RETIRE.name): ...


class _Open(_Line, kw_only=True, gc=False, tag=Kind.OPEN.name):
    id: records.Id = 0


_LINES: Final = (_Fact, _AnyFact, _FactRun, _AnyFactRun, _Void, _Position, _Join, _Retire, _Open)
_CODES: Final[dict[type[_Line], int]] = {line: Kind[str(line.__struct_config__.tag)].value for line in _LINES}
_decoder: Final[msgspec.json.Decoder[_Line]] = msgspec.json.Decoder(
    _Fact | _FactRun | _Void | _Position | _Join | _Retire | _Open
)
_decoder_of_any_row: Final[msgspec.json.Decoder[_Line]] = msgspec.json.Decoder(
    _AnyFact | _AnyFactRun | _Void | _Position | _Join | _Retire | _Open
)
_UNDECIDED: Final = _Retire(stream="", writer="", id=0)  # in the place of a record that only `records.read` can judge


def _lines(fetched: Fetched) -> Sequence[_Line]:
    """For each record what is in it, or `_UNDECIDED`."""
    text = fetched.lines()
    if text is not None and _is_utf8(text):
        for decoder in (_decoder, _decoder_of_any_row):
            with suppress(ValueError, RecursionError):
                lines = decoder.decode_lines(text)
                if len(lines) == len(fetched):
                    return lines
    return [_line(fetched.value(at)) for at in range(len(fetched))]


def _beyond(prevs: Ids, ids: Ids) -> Mask:
    """Which IDs are farther from 0 than their `prev`, on the same side; none of those without a `prev`."""
    beyond: Mask = ((prevs >= 0) & (prevs < ids)) | ((prevs <= 0) & (prevs > ids))
    return beyond


def _is_utf8(text: bytes) -> bool:
    """The decoders do not look for it in what they pass over."""
    bounds = np.array([0, len(text)], np.int32)
    with suppress(pa.ArrowInvalid):
        if not text.isascii():  # at a fifth of the cost
            pa.BinaryArray.from_buffers(pa.binary(), 1, [None, *map(pa.py_buffer, (bounds, text))]).cast(pa.string())
        return True
    return False


def _line(value: bytes) -> _Line:
    try:
        value.decode()
        return _decoder_of_any_row.decode(value)
    except (ValueError, RecursionError):
        return _UNDECIDED


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, in the whole process: it would go through the lists in RUN records again and
    again, at the price of all else here, and finds no cycle. Nor in the objects of many streams.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Decoder:
    """The records of a task from one Kafka partition, decoded batch by batch. Not for use by several threads.

    `markers` come with their offsets and times, `rejected` gives the offsets for each reason, `refused` those whose
    facts they may be; `parts` are what `edges` puts together.
    """

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.incarnations = Incarnations()
        self.markers: list[tuple[records.Marker | records.Open, int, int]] = []
        self.rejected: dict[Reason, list[int]] = defaultdict(list)
        self.refused: list[TurnedAway] = []
        self.next_offset = 0
        self.parts: list[Edges] = []

    def add(self, fetched: Fetched) -> None:
        """Decode what came of one partition in one batch."""
        with no_collection():
            self._add(fetched)

    def _add(self, fetched: Fetched) -> None:
        lines = _lines(fetched) if self.topic is Topic.FACTS else [_UNDECIDED] * len(fetched)
        edges, certain = self._from_lines(lines, fetched)
        runs = certain & (edges.kinds == Kind.RUN.value)
        if runs.any():
            certain[runs] = self._unfold([*compress(lines, runs)], edges.where(runs))
        for at in np.flatnonzero(~certain).tolist():
            self._read(edges, fetched, at)
        self.parts.append(edges.where(edges.kinds <= ROW))
        self.next_offset = max(self.next_offset, int(fetched.offsets.max()) + 1)

    def edges(self) -> Edges:
        """All edges and batch rows, in the order of their offsets."""
        edges = Edges(*(np.concatenate([getattr(part, name) for part in self.parts]) for name in Edges.__slots__))
        if np.any(edges.offsets[1:] < edges.offsets[:-1]):
            return edges.at(np.argsort(edges.offsets, kind="stable"))
        return edges

    def _unfold(self, runs: Sequence[Any], whose: Edges) -> Mask:
        """Keep what is in RUN records, of which `whose` has one row each; gives which of them are without fault."""
        even = np.fromiter((0 < len(run.ids) == len(run.rows) for run in runs), np.bool_, len(runs))
        runs, whose = [*compress(runs, even)], whose.where(even)
        if not runs:
            return even
        counts = np.fromiter((len(run.ids) for run in runs), np.int64, len(runs))
        total = int(counts.sum())
        ids = np.fromiter(chain.from_iterable(run.ids for run in runs), np.int64, total)
        rows = np.fromiter(map(len, chain.from_iterable(run.rows for run in runs)), np.int64, total)
        firsts = np.cumsum(counts) - counts
        prevs = np.roll(ids, 1)
        prevs[firsts] = [run.prev for run in runs]
        chained: Mask = np.logical_and.reduceat(_beyond(prevs, ids), firsts)
        kinds = np.where(rows > 0, Kind.RDATA, Kind.VOID).astype(np.uint8)
        of = np.repeat(np.arange(len(runs)), counts)
        edges = Edges(whose.incarnations[of], kinds, prevs, ids, whose.offsets[of], whose.times[of])
        kept = chained[of]
        self.parts.append(edges.where(kept))
        more = np.repeat(np.arange(total), np.where(kept, np.maximum(rows, 1) - 1, 0))
        if len(more):
            self.parts.append(replace(edges, kinds=np.full(total, ROW, np.uint8)).at(more))
        even[even] = chained
        return even

    def _from_lines(self, lines: Sequence[_Line], fetched: Fetched) -> tuple[Edges, Mask]:
        """A row for each line, and which of them are certain to be what `records.read` would make of it."""
        count = len(lines)
        numbers = np.fromiter(self._numbers(lines), np.int64, count)
        kinds = np.frombuffer(bytearray([_CODES[type(line)] for line in lines]), np.uint8)
        ids = np.fromiter([line.id for line in lines], np.int64, count)
        prevs = np.fromiter([line.prev for line in lines], np.int64, count)
        facts = kinds == Kind.RDATA.value
        prevs = np.where(facts & (prevs == _NO_PREV), ids - np.sign(ids), prevs)
        rows = facts & (ids == _BATCH)
        kinds[rows] = ROW
        right_key = fetched.have_keys(self.incarnations.keys(numbers))
        certain = right_key & (rows | (_beyond(prevs, ids) & (kinds < ROW)) | (kinds == Kind.RUN.value))
        return Edges(numbers, kinds, prevs, ids, fetched.offsets, fetched.times), certain

    def _numbers(self, lines: Sequence[_Line]) -> list[int]:
        number_of = self.incarnations.number_of
        try:
            return [number_of[line.writer][line.epoch][line.stream] for line in lines]
        except KeyError:
            return list(starmap(self.incarnations.number, ((line.stream, line.writer, line.epoch) for line in lines)))

    def _read(self, edges: Edges, fetched: Fetched, at: int) -> None:
        """Replace row `at` by what `records.read` says."""
        offset = int(fetched.offsets[at])
        try:
            record = records.read(fetched.value(at), fetched.key(at), self.topic)
        except BadRecord as bad:
            edges.kinds[at] = REJECTED
            self.rejected[Reason(bad.reason)].append(offset)
            self.refused.extend(claims(fetched.value(at), fetched.key(at), self.topic, offset))
            return
        if isinstance(record, records.Marker | records.Open):
            edges.kinds[at] = records.kind_of(record)
            self.markers.append((record, offset, int(fetched.times[at])))
            return
        edges.incarnations[at] = self.incarnations.number(record.stream, record.writer, record.epoch)
        match record:
            case records.Rdata(id="batch"):
                edges.kinds[at] = ROW
            case records.Rdata():
                edges.kinds[at], edges.prevs[at], edges.ids[at] = Kind.RDATA, records.start(record), record.id
            case records.FactRun():
                edges.kinds[at] = Kind.RUN
                self._unfold([record], edges.at(np.array([at])))
            case records.Void() | records.Position():
                edges.kinds[at], edges.prevs[at], edges.ids[at] = records.kind_of(record), record.prev, record.id
