"""An operator's act carried out: noted in Postgres, sent to the control topic, and watched until a batch read it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from tidemark.app.commands import CommandFailed
from tidemark.app.printed import as_object
from tidemark.app.produce import produce
from tidemark.app.verbs.acts import Trial, standing
from tidemark.app.verbs.letters import Replay
from tidemark.common.errors import BadRecord, TidemarkError
from tidemark.sinks.postgres.operators import Acts, NotedAct
from tidemark.sinks.postgres.store import Postgres
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Topic

Outcome = Literal["applied", "refused", "settled before", "not seen"]
LOOK_EVERY: Final = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class SentAct:
    """Where the record of an act stands in Kafka, and under which number it is noted."""

    noted: NotedAct
    topic: str
    partition: int
    offset: int

    def told(self) -> str:
        at = f"partition {self.partition} of {self.topic} at offset {self.offset}"
        return f"sent to {at}; noted as act {self.noted.number} of {self.noted.seen_as}"

    def plain(self) -> dict[str, Any]:
        """For programs."""
        sent = {"topic": self.topic, "partition": self.partition, "offset": self.offset}
        return {"sent": sent, "number": self.noted.number, "seen_as": self.noted.seen_as}


def send(acts: Acts, connection: KafkaConnection, topic: str, trial: Trial) -> SentAct:
    """Note the act that was tried, and send it for the epoch that was shown."""
    _require(connection, topic)
    noted = acts.note(trial.act.stream, trial.forced)
    return _sent(acts, noted, connection, topic, Topic.CONTROL, records.encode(trial.act))


def send_again(acts: Acts, connection: KafkaConnection, topic: str, trial: Replay, by: str, why: str) -> SentAct:
    """Note that a dead letter is replayed, and send its record as it was. Raises `BadRecord` where one did before."""
    assert trial.letter.value is not None
    _require(connection, topic)
    noted = acts.note_replay(trial.record.stream, trial.act(by, why), trial.letter.origin)
    return _sent(acts, noted, connection, topic, Topic.FACTS, trial.letter.value)


def _require(connection: KafkaConnection, topic: str) -> None:
    """Raise `CommandFailed` where Kafka is away or has no such topic: then nothing is noted either."""
    try:
        Topics(connection).describe([topic])
    except TidemarkError as problem:
        raise CommandFailed(f"{problem}; nothing was noted or sent") from problem


def _sent(acts: Acts, noted: NotedAct, connection: KafkaConnection, topic: str, role: Topic, value: bytes) -> SentAct:
    refused: list[str] = []
    try:
        produced = produce(connection, topic, role, [value], refused.append)
    except TidemarkError as problem:
        raise CommandFailed(
            f"{problem}; act {noted.number} is noted, and whether Kafka has it is not known: look with `tidemark tail`"
        ) from problem
    assert produced.last is not None, refused
    acts.sent(noted, topic, *produced.last)
    return SentAct(noted, topic, *produced.last)


def replayed(tried: Callable[[], Replay]) -> Outcome:
    """Applied, where the state that a record was tried on knows all of it by now."""
    try:
        return "applied" if tried().is_settled() else "refused"
    except BadRecord:
        return "refused"


def outcome(acts: Acts, sent: SentAct, seconds: float, became: Callable[[], Outcome]) -> Outcome:
    """What the pipeline made of it, once it has read it, as `became` says then; `not seen` where that takes longer than
    `seconds`."""
    deadline = time.monotonic() + seconds
    while not acts.is_read(sent.topic, sent.partition, sent.offset):
        if time.monotonic() >= deadline:
            return "not seen"
        time.sleep(LOOK_EVERY)
    found = became()
    acts.close(sent.noted, found)
    return found


def result(found: Outcome, postgres: Postgres, trial: Trial, seconds: float) -> str:
    """For people."""
    if found == "not seen":
        return (
            f"no batch has read it within {seconds:g} s: `tidemark status` shows how the pipeline is; it will be"
            " applied when the pipeline reads it, so do not send it again"
        )
    now = standing(postgres.states([trial.act.stream])[trial.act.stream], trial.act.writer)
    if found == "refused":
        return f"the pipeline refused it, since its state had moved on; {now}"
    if found == "settled before":
        return f"another act settled it meanwhile, and this one did nothing (`tidemark acts list` shows both); {now}"
    return f"applied: {now}"


def as_json(trial: Trial, sent: SentAct | None, found: Outcome | None, now: str | None) -> str:
    """All that the text says, in one object; `sent` and what follows are null where nothing was sent."""
    done = trial.done
    told: dict[str, Any] = {
        "act": msgspec.to_builtins(trial.act),
        "would": [*trial.moves()],
        "advances": [dict(zip(it.__struct_fields__, msgspec.to_builtins(it), strict=True)) for it in done.advances],
        "linear": {"from": done.linear_prev, "to": done.linear},
        "warnings": [*trial.warnings()],
        "objections": [*trial.objections()],
        **({"sent": None, "number": None, "seen_as": None} if sent is None else sent.plain()),
        "outcome": found,
        "result": now,
    }
    return as_object(told)
