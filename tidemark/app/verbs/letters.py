"""`tidemark dead-letters`: rejected records for people, and one of them tried on the state before it is sent again.

What may be replayed is a writer's own word that holds wherever it stands: a fact, a void, an announcement. A JOIN or
RETIRE is true at its place among the records alone (docs/decisions/0001-segments.md), so it never comes again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from tidemark.app.printed import as_lines
from tidemark.app.verbs.acts import moved
from tidemark.app.verbs.status import aged
from tidemark.common.errors import BadRecord
from tidemark.sinks.dead_letters import DeadLetter
from tidemark.streaming.core import codec as state
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.effects import Forced, StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Kind, Topic
from tidemark.streaming.wire.runs import PackedRun, PackedRuns, Packet

HEADINGS: Final = ("OFFSET", "AGE", "REASON", "STREAM", "RECORD", "REPLAYED", "DETAIL")
_SETTLED: Final = {"duplicate", "put_off"}  # what a record counts as that comes once more


@dataclass(frozen=True, slots=True)
class Replay:
    """What a record of `stream` would do if it came now; `counts` has how it would be counted."""

    letter: DeadLetter
    record: records.Rdata | records.Void | records.Position | FactRun
    done: StreamEffects

    def told(self) -> Iterator[str]:
        it = self.record
        yield f"{records.kind_of(it).name} of {it.writer} in epoch {it.epoch}, refused as {self.letter.reason}"
        told = [*moved(self.done)]
        yield from told
        if not told:
            counted = ", ".join(f"{name} {count}" for name, count in self.done.counts.items()) or "nothing"
            yield f"nothing moves; the line of {it.stream} stays at {self.done.linear}; counted as: {counted}"

    def is_settled(self) -> bool:
        """Whether the state knows all that the record says."""
        return {*self.done.counts} <= _SETTLED

    def act(self, by: str, why: str) -> Forced:
        """For the table of acts."""
        prev, ids, _ = _edges(self.record)
        return Forced(self.record.writer, self.record.epoch, "REPLAY", prev, ids[-1], by, why)


def replay(letter: DeadLetter, facts_topic: str, stored: bytes | None, now: float) -> Replay:
    """Try the record on its stream's encoded state (None: there is none); `now` in s. Raises `BadRecord` with why it
    cannot come again, or would be refused once more."""
    if letter.value is None:
        raise BadRecord("gone", letter.gone or "the letter holds no record")
    if letter.origin[0] != facts_topic:
        raise BadRecord("wrong_topic", f"it stood on {letter.origin[0]}: say an act again by its verb")
    record = records.read(letter.value, letter.key, Topic.FACTS)
    if isinstance(record, records.Join | records.Retire | records.Skip | records.Open):
        raise BadRecord("not_replayed", "it is true at its place alone: the writer's next start sends a new one")
    if isinstance(record, records.Rdata) and record.id == "batch":
        raise BadRecord("not_replayed", "a row without a number moves nothing")
    states = {} if stored is None else {record.stream: stored}
    home = 0 if stored is None else (state.decode(stored).home or 0)
    packet = Packet(facts_topic, home, Topic.FACTS, 1, PackedRuns.of([_packed(record, int(now * 1000))]), [], [], [])
    effects = advance(0, States(states), [packet], int(now * 1000), Bounds())
    for bad in effects.rejected:
        raise BadRecord(bad.reason, "it would be refused again, for what the stream holds now")
    return Replay(letter, record, effects.streams[0])


def _edges(
    record: records.Rdata | records.Void | records.Position | FactRun,
) -> tuple[int, list[int], list[Kind]]:
    """The first `prev`, and of each edge the ID and kind."""
    if isinstance(record, FactRun):
        return record.prev, record.ids, [Kind.RDATA if rows else Kind.VOID for rows in record.rows]
    assert isinstance(record.id, int)
    if isinstance(record, records.Rdata) and not isinstance(record.prev, int):
        return record.id - 1 if record.id > 0 else record.id + 1, [record.id], [Kind.RDATA]
    assert isinstance(record.prev, int)
    return record.prev, [record.id], [records.kind_of(record)]


def _packed(record: records.Rdata | records.Void | records.Position | FactRun, now: int) -> PackedRun:
    prev, ids, kinds = _edges(record)
    return PackedRun(
        record.stream,
        record.writer,
        record.epoch,
        Direction.of(ids[-1]),
        abs(prev),
        np.abs(np.array(ids, np.int64)).tobytes(),
        np.array(kinds, np.uint8).tobytes(),
        np.zeros(len(ids), np.uint32).tobytes(),
        0,
        0,
        now,
        now,
    )


def as_table(letters: Sequence[DeadLetter], replayed: Mapping[tuple[str, int, int], int], now: float) -> str:
    return "\n".join(as_lines(HEADINGS, [_row(it, replayed, now) for it in letters]))


def _row(it: DeadLetter, replayed: Mapping[tuple[str, int, int], int], now: float) -> tuple[str, ...]:
    topic, partition, offset = it.origin
    act = replayed.get(it.origin)
    done = "" if act is None else f"act {act}"
    return (
        it.place, f"{aged(now - it.time / 1000)}", it.reason, it.stream, f"{topic}[{partition}] {offset}", done,
        it.gone or it.detail,
    )  # fmt: skip


def plain(it: DeadLetter, replayed: Mapping[tuple[str, int, int], int]) -> dict[str, Any]:
    """For programs. `value` is text, or null where it is none; `value_base64` has its bytes then."""
    told: dict[str, Any] = {
        "partition": it.partition,
        "offset": it.offset,
        "time": it.time / 1000,
        "reason": it.reason,
        "detail": it.detail or None,
        "gone": it.gone or None,
        "stream": it.stream,
        "record": dict(zip(("topic", "partition", "offset"), it.origin, strict=True)),
        "replayed_by_act": replayed.get(it.origin),
    }
    for name, data in (("key", it.key), ("value", it.value)):
        try:
            told[name] = None if data is None else data.decode()
        except UnicodeDecodeError:
            told |= {name: None, f"{name}_base64": data}
    return told | {"headers": [[name, value.decode(errors="replace")] for name, value in it.headers]}


def as_text(it: DeadLetter, replayed: Mapping[tuple[str, int, int], int], now: float) -> str:
    """All of a letter; what is the record's own in JSON, so that no terminal obeys it."""
    told = plain(it, replayed)
    shown = ("reason", "detail", "gone", "stream", "replayed_by_act")
    lines = [f"{name}: {told[name]}" for name in shown if told[name] is not None]
    lines.append("record: {}[{}] {}".format(*it.origin) + f", {aged(now - it.time / 1000)} ago")
    for name, value in ((it, told.get(f"{it}_base64", told[it])) for it in ("key", "value")):
        lines += [f"{name}: {msgspec.json.encode(value).decode()}"]
    lines += [f"header {msgspec.json.encode(header).decode()}" for header in told["headers"]]
    return "\n".join(lines)
