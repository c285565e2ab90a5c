"""What a batch brought, by stream, and the segments of it. Pure."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Kind, Topic
from tidemark.streaming.wire.runs import UNBOUNDED, BatchRows, Marker, PackedRun, Packet, RunColumns, TurnedAway

Partition = tuple[str, int]
Fact = PackedRun | BatchRows | Marker


@dataclass(slots=True)
class Inbox:
    """What a batch brought for one stream: runs (their numbers among the `columns` of all), other facts, and what was
    refused and may be facts, by Kafka partition; operators' markers, and what was refused among them.
    """

    columns: RunColumns
    runs: dict[Partition, list[int]] = field(default_factory=dict)
    facts: dict[Partition, list[Fact]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[Partition, list[TurnedAway]] = field(default_factory=lambda: defaultdict(list))
    apart: list[TurnedAway] = field(default_factory=list)
    control: list[tuple[Partition, Marker]] = field(default_factory=list)

    def places(self) -> set[Partition]:
        """Where facts came from."""
        return self.runs.keys() | self.facts.keys()

    def items(self, place: Partition) -> list[Fact]:
        """All facts of a partition."""
        return [*map(self.columns.run, self.runs.get(place, ())), *self.facts.get(place, ())]

    def claims(self, place: Partition) -> Iterator[TurnedAway]:
        """What came in a partition, if all of it is turned away."""
        yield from self.refused.get(place, ())
        for item in self.items(place):
            if isinstance(item, PackedRun):
                reach = int(np.frombuffer(item.ids[-8:], np.int64)[0])
                yield TurnedAway(item.stream, item.writer, item.epoch, reach, item.first_offset)
            elif isinstance(item, BatchRows):
                yield TurnedAway(item.stream, item.writer, item.epoch, UNBOUNDED, item.first_offset)
            elif item.kind is Kind.JOIN:
                yield TurnedAway(item.stream, item.writer, item.epoch, 0, item.offset)


def inboxes_of(packets: list[Packet], columns: RunColumns, states: States, bounds: Bounds) -> dict[str, Inbox]:
    """By stream; of new ones that nothing but unread records name as many as there is room for, the first by name.
    `columns` are the runs of all `packets`, in their order.
    """
    inboxes: dict[str, Inbox] = defaultdict(lambda: Inbox(columns))
    number = 0
    for seen in packets:
        origin = seen.topic, seen.partition
        last, of_last = "", list[int]()  # runs of a stream stand together
        for stream in seen.runs.streams:
            if stream != last:
                last, of_last = stream, inboxes[stream].runs.setdefault(origin, [])
            of_last.append(number)
            number += 1
        if seen.role is Topic.CONTROL:
            for marker in seen.markers:
                inboxes[marker.stream].control.append((origin, marker))
            continue
        items: list[Fact] = [*seen.rows, *seen.markers]
        for item in items:
            inboxes[item.stream].facts[origin].append(item)
    refused = [(seen, it) for seen in packets for it in seen.refused]
    if not refused:
        return inboxes
    named = inboxes.keys() | {it.stream for _, it in refused if it.writer is not None or it.stream in states}
    nameless = {it.stream for _, it in refused if not it.only_known} - named
    if nameless:
        named |= {*sorted(nameless)[: max(bounds.unread - states.unread(), 0)]}
    for seen, it in refused:
        if it.stream in named:
            inbox = inboxes[it.stream]
            (inbox.apart if seen.role is Topic.CONTROL else inbox.refused[seen.topic, seen.partition]).append(it)
    return inboxes


def segments(
    items: list[Fact | TurnedAway],
) -> Iterator[tuple[list[PackedRun | BatchRows | TurnedAway], Marker | None]]:
    """What is no marker up to each marker, in the order of the offsets; compaction lets none span a marker."""
    ordered = sorted(items, key=lambda item: item.offset if isinstance(item, Marker) else item.first_offset)
    segment: list[PackedRun | BatchRows | TurnedAway] = []
    for item in ordered:
        if isinstance(item, Marker):
            yield segment, item
            segment = []
        else:
            segment.append(item)
    if segment:
        yield segment, None
