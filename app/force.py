"""`tidemark force`: an operator's act, tried on the state that Postgres holds before it is sent to the control topic.

The trial is the state machine's own answer. The pipeline may know more by the time that it reads the record; so the act
names the epoch that it was tried with, and one whose writer has started again since is refused there.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from tidemark.app.produce import Produced, produce
from tidemark.sources.kafka import KafkaConnection
from tidemark.streaming import records, runs, state
from tidemark.streaming.batch import advance
from tidemark.streaming.effects import StreamEffects
from tidemark.streaming.errors import BadRecord
from tidemark.streaming.model import Bounds, Reason
from tidemark.streaming.records import Topic

KINDS: Final[dict[str, type[records.Marker]]] = {
    "SKIP": records.Skip,
    "RETIRE": records.Retire,
    "JOIN": records.Join,
}
HINTS: Final = {
    Reason.BEYOND_ALLOCATED: "no record of the stream has named an ID as high; --beyond forces it all the same, but a"
    " position that has passed an ID never comes back",
    Reason.UNKNOWN_WRITER: "the stream has no such writer in that epoch: `tidemark status` shows those that it has",
    Reason.ZOMBIE: "that epoch is over; without --epoch it is the writer as it lives now",
    Reason.CONFLICT: "the writer has retired, or has completed what lies beyond that ID: `tidemark status` shows where"
    " it stands",
    Reason.MIXED_SIGN: "the IDs of the stream lie on the other side of 0",
}


def attempt(stored: bytes, act: records.Marker, now: int) -> StreamEffects:
    """What `act` would do to a stream whose encoded state is `stored`; `now` in ms. Raises `BadRecord`."""
    records.read(records.encode(act), act.stream.encode(), Topic.CONTROL)
    packet = runs.Packet("control", 0, Topic.CONTROL, 1, [], [], [runs.Marker.of(act, 0, now)], [])
    done = advance(0, {act.stream: stored}, [packet], now, Bounds())
    for bad in done.rejected:
        raise BadRecord(bad.reason, HINTS.get(Reason(bad.reason), "it does not fit what the stream holds"))
    return done.streams[0]


def told(stored: bytes, done: StreamEffects) -> Iterator[str]:
    """What would happen to that state, in lines for people."""
    before, after = (state.decode(it) for it in (stored, done.state))
    reopened = False
    for act in done.forced:
        yield f"{act.kind} of {act.writer} in epoch {act.epoch}, by {act.by}: {act.why}"
        was, now = (it.writers.get(act.writer) for it in (before, after))
        if was is not None and now is not None and now.chain.reach < was.chain.reach:
            reopened = True
            low, position = after.direction.signed(now.chain.position), after.direction.signed(now.position)
            then = f"; what it completes up to {position} is late" if position != low else ""
            yield f"{act.writer} is waited for again from {low} on{then}"
    for move in done.advances:
        counts = zip(("facts", "empty", "unseen", "skipped"), move.evidence.counts, strict=True)
        evidence = ", ".join(f"{name} {count}" for name, count in counts if count) or "nothing told again"
        yield f"{move.writer} moves from {move.prev} to {move.id}: {evidence}"
    for late in done.late:
        yield f"late: what {late.writer} completed after {late.prev} up to {late.id}, facts {late.facts}"
    for begun in done.timelines:
        yield f"a new timeline begins at {begun.id}, for all writers"
    if done.linear != done.linear_prev:
        yield f"the line of {done.stream} moves from {done.linear_prev} to {done.linear}"
    if not (reopened or done.advances or done.late or done.timelines or done.linear != done.linear_prev):
        yield f"nothing moves; the line of {done.stream} stays at {done.linear}"


def send(connection: KafkaConnection, topic: str, act: records.Marker, done: StreamEffects) -> Produced:
    """Send the act that was tried, for the epoch that was shown."""
    (forced,) = done.forced
    named = msgspec.structs.replace(act, epoch=forced.epoch)
    refused: list[str] = []
    return produce(connection, topic, Topic.CONTROL, [records.encode(named)], refused.append)
