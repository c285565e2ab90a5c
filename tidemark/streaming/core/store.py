"""The states of a shard's streams as a batch finds them, and as they are kept. Pure; no Spark.

A shard may hold a hundred thousand streams of which a batch touches ten. So most of them lie packed, where one is found
without another being decoded: those that a line of batches began with outside of Spark's state, and in it those that
have changed since, once they are many. What changed lately lies over both.
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
"""A stream of which nothing could be read yet."""

_FEW = 1 << 20
"""Bytes that a batch decodes and encodes within some milliseconds."""


_SEARCH = 16
"""States are passed over in the time in which one is found."""


class _Columns(msgspec.Struct, array_like=True, frozen=True):
    """Names, ascending, and their states, each end to end; where they end as uint32. `unread` counts the UNREADABLE."""

    name_ends: memoryview
    state_ends: memoryview
    names: memoryview
    states: memoryview
    unread: int


_columns = msgspec.msgpack.Decoder(_Columns)


class PackedStates:
    """States by name, read in place: to find one takes some microseconds, whatever their number."""

    def __init__(self, data: bytes | memoryview) -> None:
        it = _columns.decode(data)
        self.data = data
        self.unread = it.unread
        self._name_ends, self._state_ends = it.name_ends.cast("I"), it.state_ends.cast("I")
        self._names, self._states = it.names, it.states
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

    def expect(self, count: int) -> None:
        """So many will be asked for: to go through all of them once may cost less."""
        if self._by_name is None and _SEARCH * count > len(self):
            self._by_name = dict(self.items())

    def get(self, name: str) -> bytes | None:
        if self._by_name is not None:
            return self._by_name.get(name)
        wanted = name.encode()
        at = bisect_left(range(len(self)), wanted, key=self._name)
        return self._state(at) if at < len(self) and self._name(at) == wanted else None

    def items(self) -> Iterator[tuple[str, bytes]]:
        """By name."""
        return zip(self.names(), _cut(self._states, self._state_ends), strict=True)

    def names(self) -> Iterator[str]:
        """Ascending."""
        return (name.decode() for name in _cut(self._names, self._name_ends))

    def _name(self, at: int) -> bytes:
        return self._names[self._name_ends[at - 1] if at else 0 : self._name_ends[at]].tobytes()

    def _state(self, at: int) -> bytes:
        return self._states[self._state_ends[at - 1] if at else 0 : self._state_ends[at]].tobytes()


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
    """The states of all streams, as `packed` by shard."""

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
        """Ascending."""
        return merge(*(packed.names() for packed in self._packed.values()))


class _Layers(msgspec.Struct, array_like=True, frozen=True):
    packed: memoryview
    recent: dict[str, bytes]


_layers = msgspec.msgpack.Decoder(_Layers)


class States:
    """Those of `recent`, which a batch changes in place, over those that are `packed`, over those of the `seed`."""

    def __init__(
        self, recent: dict[str, bytes] | None = None, packed: PackedStates = NONE, seed: PackedStates = NONE
    ) -> None:
        self._recent = {} if recent is None else recent
        self._packed = packed
        self._seed = seed

    @classmethod
    def kept(cls, data: bytes | None, seed: PackedStates) -> "States":
        """What `keep` gave; None before the first batch of a line."""
        if data is None:
            return cls({}, NONE, seed)
        it = _layers.decode(data)
        return cls(it.recent, PackedStates(it.packed), seed)

    def keep(self) -> bytes:
        """All but the seed. What is recent is packed with the rest where it has become too much to decode each time."""
        size = sum(map(len, self._recent.values()))
        if size > max(_FEW, len(self._packed.data) // 4):
            self._packed = PackedStates.of({**dict(self._packed.items()), **self._recent})
            self._recent = {}
        return msgspec.msgpack.encode(_Layers(memoryview(self._packed.data), self._recent))

    def expect(self, count: int) -> None:
        """So many will be asked for."""
        self._packed.expect(count)
        self._seed.expect(count)

    def get(self, name: str) -> bytes | None:
        if (found := self._recent.get(name)) is not None:
            return found
        return self._below(name)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __setitem__(self, name: str, data: bytes) -> None:
        self._recent[name] = data

    def unread(self) -> int:
        """How many are UNREADABLE."""
        count = self._packed.unread + self._seed.unread
        if self._seed.unread:
            count -= sum(self._seed.get(name) == UNREADABLE for name, _ in self._packed.items())
        if count:
            count -= sum(self._below(name) == UNREADABLE for name in self._recent)
        return count + sum(data == UNREADABLE for data in self._recent.values())

    def _below(self, name: str) -> bytes | None:
        found = self._packed.get(name) if len(self._packed) else None
        return self._seed.get(name) if found is None else found
