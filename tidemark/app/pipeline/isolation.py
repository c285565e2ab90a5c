"""Which records make Postgres refuse a batch: found by halves, in transactions that are rolled back.

A batch is one transaction of all streams, so without this one record stops them all. First the streams are halved until
it is known of which the effects are refused. Then the records of such a stream are read again from Kafka and fed to the
state machine, over the states that Postgres has, until it is known behind which of them the refusal begins. Nothing is
written here: the query starts again and rejects those records as it reads them (`ingest.compact`), so that order,
fencing and counts are those of any rejected record.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from tidemark.common.errors import ContentRefused, QueryFailed, RecordsRefused, TidemarkError
from tidemark.common.log import get_logger
from tidemark.sinks.port import Batch, Fence
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.ingest.compact import MOST_FACTS, compact
from tidemark.streaming.ingest.ranges import RangeReader, TopicOffsets
from tidemark.streaming.ingest.record_batch import PlannedRange, RecordBatch
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Join, Rdata, Record, Skip, Topic, encode, row
from tidemark.streaming.wire.runs import Packet

log = get_logger(__name__)

MOST_REFUSED = 100
"""Records of a stream that are found at once; the next attempt finds the rest."""

_PROBE: Final = "tidemark.probe"
_packets = msgspec.msgpack.Decoder(Packet)


class _Taken(NamedTuple):
    """A record of Kafka; `time` in ms."""

    topic: Topic
    partition: int
    offset: int
    time: int
    key: bytes
    value: bytes

    @property
    def place(self) -> tuple[Topic, int, int]:
        return self.topic, self.partition, self.offset


_Place = tuple[Topic, int, int]


@dataclass(frozen=True, slots=True)
class Isolation:
    """For one query: `line` names its batches, `offsets` are those that it began with, `names` those of its topics.

    `client` are librdkafka's settings and may hold a password.
    """

    postgres: Postgres
    lease: Fence
    line: str
    client: Mapping[str, str]
    names: Mapping[Topic, str]
    offsets: TopicOffsets
    bounds: Bounds

    def find(self, number: int, effects: Sequence[ShardEffects], refused: ContentRefused) -> TidemarkError:
        """What to raise for batch `number`, which Postgres has `refused`: the batch before it is applied.

        `RecordsRefused` names the records; `ContentRefused` asks for a smaller batch, if none of them is refused by
        itself; `QueryFailed` says that Postgres refuses everything, and holds. Raises `Unavailable`, `LeaseLost`.
        """
        if (problem := self._refusal(number, self._probe(effects[0].now))) is not None:
            return QueryFailed(f"Postgres refuses every batch, not only this one: {problem}")
        found: dict[_Place, str] = {}
        for stream in self._streams(number, effects):
            found |= self._records(number, effects, stream)
        if not found:
            return refused
        places: dict[str, dict[int, list[int]]] = {}
        for topic, partition, offset in sorted(found, key=lambda it: (it[0].value, *it[1:])):
            places.setdefault(self.names[topic], {}).setdefault(partition, []).append(offset)
        return RecordsRefused(len(found), next(iter(found.values())), places)

    def _refusal(self, number: int, effects: Sequence[ShardEffects]) -> str | None:
        return self.postgres.refusal(Batch(self.line, number, self.lease.token, effects))

    def _streams(self, number: int, effects: Sequence[ShardEffects]) -> list[str]:
        """The streams whose effects are refused by themselves."""

        def refused(names: list[str]) -> list[str]:
            chosen = [
                msgspec.structs.replace(shard, streams=[it for it in shard.streams if it.stream in names], rejected=[])
                for shard in effects
            ]
            if not names or self._refusal(number, chosen) is None:
                return []
            half = len(names) // 2
            return names if not half else [*refused(names[:half]), *refused(names[half:])]

        return refused([stream.stream for shard in effects for stream in shard.streams])

    def _records(self, number: int, effects: Sequence[ShardEffects], stream: str) -> dict[_Place, str]:
        """The records of `stream` from which the refusal follows, each with what Postgres says."""
        state = self.postgres.states([stream])
        records = [*self._read(effects, stream)]
        found: dict[_Place, str] = {}

        def refusal(count: int) -> str | None:
            """Of the first so many records."""
            return self._refusal(number, [self._advance(state, records[:count], found, effects[0].now)])

        while len(found) < MOST_REFUSED and (problem := refusal(len(records))) is not None:
            taken, stopped = 0, len(records)
            while stopped - taken > 1:
                half = (taken + stopped) // 2
                if (said := refusal(half)) is None:
                    taken = half
                else:
                    stopped, problem = half, said
            it = records[stopped - 1]
            if it.place in found or refusal(taken) is not None:
                log.error("Postgres refuses a stream, whatever its records say", stream=stream, problem=problem)
                return {}
            found[it.place] = problem
            log.error(
                "Postgres refuses what follows from a record: it goes to the dead letters",
                stream=stream,
                topic=self.names[it.topic],
                partition=it.partition,
                offset=it.offset,
                problem=problem,
            )
        return found

    def _read(self, effects: Sequence[ShardEffects], stream: str) -> Iterator[_Taken]:
        """The batch's records with that key, in the order in which they are applied."""
        ends, begins = Batch(self.line, 0, 0, effects).offsets(), self.postgres.offsets()
        key = stream.encode()
        with closing(RangeReader(self.client, self.names)) as reader:
            for topic in (Topic.FACTS, Topic.CONTROL):
                name = self.names[topic]
                known = {**self.offsets.get(name, {}), **begins.get(name, {})}
                for partition, end in sorted(ends.get(name, {}).items()):
                    for _, part in reader.read([PlannedRange(topic, partition, known.get(partition, 0), end)]):
                        for at in range(part.size):
                            if part.key(at) == key:
                                offset, time = int(part.offsets[at]), int(part.times[at])
                                yield _Taken(topic, partition, offset, time, key, part.value(at))

    def _advance(
        self, state: dict[str, bytes], records: Sequence[_Taken], refused: Mapping[_Place, str], now: int
    ) -> ShardEffects:
        """What these records do to their stream, but for the refused ones."""
        parts: dict[tuple[Topic, int], list[_Taken]] = {}
        for it in records:
            parts.setdefault((it.topic, it.partition), []).append(it)
        read = []
        for (topic, partition), of in parts.items():
            wanted = PlannedRange(topic, partition, of[0].offset, of[-1].offset + 1)
            offsets, times = np.array([it.offset for it in of]), np.array([it.time for it in of])
            read.append(
                ([wanted], [(wanted, RecordBatch.of([it.key for it in of], [it.value for it in of], offsets, times))])
            )
        places: dict[str, dict[int, list[int]]] = {}
        for topic, partition, offset in refused:
            places.setdefault(self.names[topic], {}).setdefault(partition, []).append(offset)
        made = compact(read, keys=[0], names=dict(self.names), max_facts=MOST_FACTS, refused=places)
        packets = [_packets.decode(packet) for batch in made for packet in batch.column("packet").to_pylist()]
        return advance(0, States(dict(state)), packets, now, self.bounds)

    def _probe(self, now: int) -> list[ShardEffects]:
        """What a fact and an operator's SKIP do to a stream that nobody has: a database in order takes that."""
        facts: list[Record] = [
            Join(stream=_PROBE, writer="probe", epoch=1, id=0),
            Rdata(stream=_PROBE, writer="probe", epoch=1, prev=0, id=1, row=row({})),
            Rdata(stream=_PROBE, writer="probe", epoch=1, prev=2, id=3, row=row({})),
        ]
        skip = Skip(stream=_PROBE, writer="probe", epoch=1, prev=1, id=2, by="tidemark", why="a probe")
        records = [
            _Taken(topic, 0, offset, now, _PROBE.encode(), encode(record))
            for topic, offset, record in [
                *((Topic.FACTS, offset, record) for offset, record in enumerate(facts)),
                (Topic.CONTROL, 0, skip),
            ]
        ]
        return [msgspec.structs.replace(self._advance({}, records, {}, now), progress=[])]
