"""`tidemark replay`: recorded records through the rules again, without Spark, held against the history in Postgres."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from tidemark.sources.recorded import RecordedMessage
from tidemark.streaming.compact import pack
from tidemark.streaming.decode import Decoder
from tidemark.streaming.frames import HEADER, Frames
from tidemark.streaming.records import Topic
from tidemark.streaming.runs import Packet


def packed(messages: Iterable[RecordedMessage], roles: Mapping[str, Topic]) -> list[Packet]:
    """As the query packs them, of any partitions; `roles` has each topic's."""
    parted: dict[tuple[str, int], list[bytes]] = defaultdict(list)
    for it in messages:
        parted[it.topic, it.partition].append(_frame(it, roles[it.topic]))
    found: list[Packet] = []
    for (topic, partition), frames in parted.items():
        decoder = Decoder(roles[topic])
        decoder.add(Frames.of(pa.array(frames, pa.binary())))
        found += pack(topic, partition, decoder, 1).values()
    return found


def _frame(it: RecordedMessage, role: Topic) -> bytes:
    key = it.key or b""
    header = np.array((it.offset, it.time, role.origin(it.partition), len(key)), HEADER)
    return header.tobytes() + key + (it.value or b"")
