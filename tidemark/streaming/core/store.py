"""The encoded states of a shard's streams, in three layers. Pure; no Spark.

A shard may have a hundred thousand streams, of which a batch touches ten. A lookup must not decode the others. States
that Postgres gave to a new query (the `seed`) are outside of Spark's state store. Spark's state store has the states
that changed since: `packed` ones, and in front of them the `recent` ones.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import accumulate, chain

import msgspec

from tidemark.streaming.core import codec as state
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.limits import shard_of
from tidemark.streaming.wire.runs import UNBOUNDED

UNREADABLE = state.encode(StreamState(refused=UNBOUNDED))
"""The state of a stream of which no record could be read yet."""

_RECENT_MAX = 1 << 20
"""Bytes of recent states that are not packed yet: a batch decodes and encodes them within some milliseconds."""


_LOOKUP_COST = 16
"""A lookup takes as long as an iteration over this many states."""


class _Columns(msgspec.Struct, array_like=True, frozen=True):
    """The encoded form of `PackedStates`.

    Attributes:
        name_ends: for each stream the end of its name in `names`, as uint32.
        state_ends: for each stream the end of its state in `states`, as uint32.
        names: the names of the streams, ascending, end to end.
        states: their states, end to end.
        unread: number of states that are UNREADABLE.
    """

    name_ends: memoryview
    state_ends: memoryview
    names: memoryview
    states: memoryview
    unread: int


_columns = msgspec.msgpack.Decoder(_Columns)


class PackedStates:
    """Immutable states by name, read in place. A lookup takes some microseconds, however many states there are."""

    def __init__(self, data: bytes | memoryview) -> None:
        columns = _columns.decode(data)
        self.data = data
        self.unread = columns.unread
        self._name_ends, self._state_ends = columns.name_ends.cast("I"), columns.state_ends.cast("I")
        self._names, self._states = columns.names, columns.states
        self._by_name: dict[str, bytes] | None = None

    @classmethod
    def of(cls, states: Mapping[str, bytes]) -> "PackedStates":
        ordered = sorted((name.encode(), data) for name, data in states.items())
        names, values = [name for name, _ in ordered], [data for _, data in ordered]
        unread = values.count(UNREADABLE)
        columns = _Columns(_ends(names), _ends(values), _joined(names), _joined(values), unread)
        return cls(msgspec.msgpack.encode(columns))

    def __len__(self) -> int:
        return len(self._name_ends)

    def prepare_lookups(self, count: int) -> None:
        """Call before `count` lookups: if they are many, one iteration over all states costs less."""
        if self._by_name is None and _LOOKUP_COST * count > len(self):
            self._by_name = dict(self.items())

    def get(self, name: str) -> bytes | None:
        if self._by_name is not None:
            return self._by_name.get(name)
        wanted = name.encode()
        index = bisect_left(range(len(self)), wanted, key=self._name)
        return self._state(index) if index < len(self) and self._name(index) == wanted else None

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Names and states, by name."""
        return zip(self.names(), _cut(self._states, self._state_ends), strict=True)

    def names(self) -> Iterator[str]:
        """The names, ascending."""
        return (name.decode() for name in _cut(self._names, self._name_ends))

    def _name(self, index: int) -> bytes:
        return self._names[self._name_ends[index - 1] if index else 0 : self._name_ends[index]].tobytes()

    def _state(self, index: int) -> bytes:
        return self._states[self._state_ends[index - 1] if index else 0 : self._state_ends[index]].tobytes()


def _cut(joined: memoryview, ends: memoryview) -> Iterator[bytes]:
    begin, data = 0, bytes(joined)
    for end in ends:
        yield data[begin:end]
        begin = end


def _ends(parts: list[bytes]) -> memoryview:
    return memoryview(array("I", accumulate(map(len, parts))).tobytes())


def _joined(parts: list[bytes]) -> memoryview:
    return memoryview(b"".join(parts))


NONE = PackedStates.of({})


class ShardedStates:
    """The states of all streams, from the packed states of each shard."""

    def __init__(self, shards: int, packed: Mapping[int, bytes]) -> None:
        self._shards = shards
        self._packed = {shard: PackedStates(data) for shard, data in packed.items()}

    def __len__(self) -> int:
        return sum(map(len, self._packed.values()))

    def get(self, name: str) -> bytes | None:
        packed = self._packed.get(shard_of(name, self._shards))
        return None if packed is None else packed.get(name)

    def items(self) -> Iterator[tuple[str, bytes]]:
        return chain.from_iterable(packed.items() for packed in self._packed.values())

    def names(self) -> Iterator[str]:
        """The names, ascending."""
        return merge(*(packed.names() for packed in self._packed.values()))


class _Layers(msgspec.Struct, array_like=True, frozen=True):
    packed: memoryview
    recent: dict[str, bytes]


_layers = msgspec.msgpack.Decoder(_Layers)


class States:
    """Encoded states in three layers: `recent` (mutable) shadows `packed`, which shadows the read-only `seed`."""

    def __init__(
        self, recent: dict[str, bytes] | None = None, packed: PackedStates = NONE, seed: PackedStates = NONE
    ) -> None:
        self._recent = {} if recent is None else recent
        self._packed = packed
        self._seed = seed

    @classmethod
    def unpack(cls, data: bytes | None, seed: PackedStates) -> "States":
        """Decode what `pack` returned; None before the first batch of a query."""
        if data is None:
            return cls({}, NONE, seed)
        layers = _layers.decode(data)
        return cls(layers.recent, PackedStates(layers.packed), seed)

    def pack(self) -> bytes:
        """Encode all layers but the seed. Recent states move to the packed layer once they are too large."""
        size = sum(map(len, self._recent.values()))
        if size > max(_RECENT_MAX, len(self._packed.data) // 4):
            self._packed = PackedStates.of({**dict(self._packed.items()), **self._recent})
            self._recent = {}
        return msgspec.msgpack.encode(_Layers(memoryview(self._packed.data), self._recent))

    def prepare_lookups(self, count: int) -> None:
        """Call before `count` lookups."""
        self._packed.prepare_lookups(count)
        self._seed.prepare_lookups(count)

    def get(self, name: str) -> bytes | None:
        if (recent := self._recent.get(name)) is not None:
            return recent
        return self._below(name)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __setitem__(self, name: str, data: bytes) -> None:
        self._recent[name] = data

    def unreadable_count(self) -> int:
        """Number of streams whose state is UNREADABLE."""
        count = self._packed.unread + self._seed.unread
        if self._seed.unread:
            count -= sum(self._seed.get(name) == UNREADABLE for name, _ in self._packed.items())
        if count:
            count -= sum(self._below(name) == UNREADABLE for name in self._recent)
        return count + sum(data == UNREADABLE for data in self._recent.values())

    def _below(self, name: str) -> bytes | None:
        packed = self._packed.get(name) if len(self._packed) else None
        return self._seed.get(name) if packed is None else packed
