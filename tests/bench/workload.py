"""What writers would send: facts that complete out of order, made fast and without end. Pure; sends nothing.

Slim beside `tests.play`: no crashes, no retirements, no garbage, so that a million records a second can be
made and the final positions are known without an oracle.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from random import Random

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

RDATA, VOID = 0, 1
_ROWS = 997


@dataclass(frozen=True, slots=True)
class Shape:
    """`in_flight`: transactions that a writer has open on average; one in `slow_every` takes `slow_factor` times as
    long as the others, which is what leaves gaps. One in `void_every` rolls back.
    """

    streams: int = 4
    writers: int = 8
    in_flight: float = 2.0
    slow_every: int = 100
    slow_factor: int = 20
    void_every: int = 33
    seed: int = 1

    def stream(self, number: int) -> str:
        return f"events-{number}"

    def writer(self, number: int) -> str:
        return f"writer-{number}"


@dataclass(frozen=True, slots=True)
class Completions:
    """Completions in the order in which they go to Kafka. `owner` is `stream * writers + writer`."""

    owner: Array
    prev: Array
    id: Array
    kind: Array

    def __len__(self) -> int:
        return len(self.id)

    def then(self, later: "Completions") -> "Completions":
        pairs = zip(astuple(self), astuple(later), strict=True)
        return Completions(*(np.concatenate(pair) for pair in pairs))

    def pick(self, chosen: npt.NDArray[np.bool_] | Array) -> "Completions":
        return Completions(self.owner[chosen], self.prev[chosen], self.id[chosen], self.kind[chosen])


class WritersAtWork:
    """Writers at work: `step` lets them begin so many transactions and gives what completed meanwhile.

    The same shape gives the same records, however they are cut into steps of equal size. After `finish` nothing is
    open: each writer's position is its last ID, and each line stands at its stream's last.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._random = np.random.default_rng(shape.seed)
        self._last = np.zeros(shape.streams, np.int64)
        self._told = np.zeros(shape.streams * shape.writers, np.int64)
        self._begun = 0
        none = np.zeros(0, np.int64)
        self._open = Completions(none, none, none, none)
        self._due = np.zeros(0)

    def step(self, transactions: int) -> Completions:
        """Begin `transactions`; what completes before the next one would begin, in its order."""
        began = self._begin(transactions)
        arrivals = self._begun + np.arange(transactions)
        self._begun += transactions
        self._open = self._open.then(began)
        self._due = np.concatenate([self._due, arrivals + self._delays(transactions)])
        return self._complete(self._due < self._begun)

    def finish(self) -> Completions:
        """Everything that is still open, in its order."""
        return self._complete(np.ones(len(self._due), np.bool_))

    def positions(self, stream: int) -> dict[str, int]:
        """Where the writers stand once everything has completed."""
        first = stream * self.shape.writers
        return {self.shape.writer(n): int(self._told[first + n]) for n in range(self.shape.writers)}

    def linear(self, stream: int) -> int:
        """Where the line stands once everything has completed."""
        return int(self._last[stream])

    def _begin(self, count: int) -> Completions:
        owner = self._random.integers(0, len(self._told), count)
        stream = owner // self.shape.writers
        id_ = np.empty(count, np.int64)
        order = np.argsort(stream, kind="stable")
        counts = np.bincount(stream, minlength=len(self._last))
        firsts = np.cumsum(counts) - counts
        id_[order] = np.arange(1, count + 1) + (self._last - firsts)[stream[order]]
        self._last += counts

        prev = np.empty(count, np.int64)
        order = np.argsort(owner, kind="stable")
        by_owner, ids = owner[order], id_[order]
        first = np.diff(by_owner, prepend=-1) != 0
        prev[order] = np.where(first, self._told[by_owner], np.roll(ids, 1))
        last = np.roll(first, -1)
        self._told[by_owner[last]] = ids[last]
        kind = (self._random.integers(0, self.shape.void_every, count) == 0).astype(np.int64)
        return Completions(owner, prev, id_, kind)

    def _delays(self, count: int) -> npt.NDArray[np.float64]:
        """How many transactions begin, over all writers, before each of these has completed."""
        mean = self.shape.in_flight * len(self._told)
        slow = self._random.integers(0, self.shape.slow_every, count) == 0
        return self._random.exponential(mean, count) * np.where(slow, self.shape.slow_factor, 1)

    def _complete(self, done: npt.NDArray[np.bool_]) -> Completions:
        order = np.flatnonzero(done)[np.argsort(self._due[done], kind="stable")]
        completed = self._open.pick(order)
        self._open = self._open.pick(~done)
        self._due = self._due[~done]
        return completed


def moments(count: int, seconds: float, seed: int) -> list[float]:
    """So many random moments of a stretch of time, as seconds from its beginning, in their order."""
    random = Random(seed)
    return sorted(random.uniform(0, seconds) for _ in range(count))


class Rendering:
    """Completions as the JSON of docs/design.md 3; about 141 bytes each while IDs have six digits."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.keys = [shape.stream(stream).encode() for stream in range(shape.streams)]
        self._templates = [
            self._template(owner, kind) for owner in range(shape.streams * shape.writers) for kind in (RDATA, VOID)
        ]
        random = np.random.default_rng(shape.seed)
        self._rows = [random.bytes(14).hex().encode() for _ in range(_ROWS)]

    def joins(self) -> Iterator[tuple[int, bytes]]:
        """Stream and value of one JOIN per writer: what stands first in the topic."""
        shape = self._shape
        for stream in range(shape.streams):
            for writer in range(shape.writers):
                head = f'{{"kind":"JOIN","stream":"{shape.stream(stream)}","writer":"{shape.writer(writer)}"'
                yield stream, f'{head},"epoch":1,"id":0}}'.encode()

    def values(self, edges: Completions) -> list[bytes]:
        templates, rows = self._templates, self._rows
        numbers = (2 * edges.owner + edges.kind).tolist()
        ids = edges.id.tolist()
        return [
            templates[number] % (prev, id_, rows[id_ % _ROWS])
            for number, prev, id_ in zip(numbers, edges.prev.tolist(), ids, strict=True)
        ]

    def runs(self, edges: Completions, most: int) -> list[tuple[int, bytes]]:
        """Stream and value of RUN records, which hold the same edges: what follows one another, at `most` so many."""
        edges = edges.pick(np.lexsort((edges.id, edges.owner)))
        chained = (np.diff(edges.owner, prepend=-1) == 0) & (edges.prev == np.roll(edges.id, 1))
        begins = np.flatnonzero(~chained)
        places = np.arange(len(edges)) - np.repeat(begins, np.diff(begins, append=len(edges)))
        firsts = np.flatnonzero(places % most == 0)
        ids, voids, rows = edges.id.tolist(), (edges.kind == VOID).tolist(), self._rows
        found = []
        for first, stop, owner, prev in zip(
            firsts.tolist(),
            [*firsts[1:].tolist(), len(ids)],
            edges.owner[firsts].tolist(),
            edges.prev[firsts].tolist(),
            strict=True,
        ):
            facts = (
                b"[]" if void else b'[{"event_id":"$%s"}]' % rows[id_ % _ROWS]
                for id_, void in zip(ids[first:stop], voids[first:stop], strict=True)
            )
            numbers = ",".join(map(str, ids[first:stop])).encode()
            head = b'{"kind":"RUN",%s,"prev":%d,"ids":[%s],"rows":[' % (self._names(owner), prev, numbers)
            found.append((owner // self._shape.writers, head + b",".join(facts) + b"]}"))
        return found

    def streams(self, edges: Completions) -> list[int]:
        streams: list[int] = (edges.owner // self._shape.writers).tolist()
        return streams

    def _template(self, owner: int, kind: int) -> bytes:
        names = self._names(owner)
        if kind == VOID:
            # %.0s takes the row and prints nothing: all templates are filled alike.
            return b'{"kind":"VOID",' + names + b',"prev":%d,"id":%d%.0s}'
        return b'{"kind":"RDATA",' + names + b',"prev":%d,"id":%d,"row":{"event_id":"$%s"}}'

    def _names(self, owner: int) -> bytes:
        stream, writer = divmod(owner, self._shape.writers)
        return f'"stream":"{self._shape.stream(stream)}","writer":"{self._shape.writer(writer)}","epoch":1'.encode()
