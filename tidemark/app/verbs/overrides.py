"""`tidemark skip`, `retire`, `join` and `fence`: operator overrides, tried on the stored state before they are sent.

The trial uses the state machine itself. The pipeline may know more when it reads the record. So the record names the
epoch of the trial, and the pipeline refuses the override if the writer has started again since.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import click
import msgspec

from tidemark.app.commands import (
    MOST_ID,
    NOT_SEEN,
    CommandFailed,
    OurCommand,
    answering,
    confirmed,
    echo_result,
    loaded,
    no_stream,
    until_seen,
)
from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import NO_POLICIES, OpenRange, Verdict, last_seen, silent_after_seconds
from tidemark.app.output import as_object, count, duration, id_range, ids
from tidemark.app.verbs.gaps import SHOWN
from tidemark.app.verbs.kafka_records import produce_lines
from tidemark.common.errors import BadRecord, TidemarkError
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.operators import LoggedOverride, OverrideLog
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.effects import OperatorOverride, StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.limits import Bounds, Policies, Reason
from tidemark.streaming.wire import records, runs
from tidemark.streaming.wire.records import ANY_WRITER, Topic
from tidemark.streaming.wire.runs import PackedRuns

KINDS: Final[dict[str, type[records.Marker]]] = {
    "SKIP": records.Skip,
    "RETIRE": records.Retire,
    "JOIN": records.Join,
}
HINTS: Final = {
    Reason.BEYOND_ALLOCATED: "the ID is higher than any ID that Tidemark has seen: this is usually a typo."
    " --beyond allows it, but a position never moves back",
    Reason.UNKNOWN_WRITER: "the stream has no such writer in that epoch: `tidemark status` shows its writers",
    Reason.ZOMBIE: "that epoch has ended; without --epoch the current one counts",
    Reason.CONFLICT: "the writer has retired, or has completed IDs beyond that ID: `tidemark status` shows its"
    " position",
    Reason.MIXED_SIGN: "wrong sign: the other IDs of the stream have the opposite one",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """What the override `act` would do to its stored stream at `now` (s since 1970). A writer is silent after `silent`
    seconds without a record."""

    act: records.Marker
    before: StreamState
    after: StreamState
    done: StreamEffects
    waiting: list[OpenRange]
    now: float
    silent: float

    @property
    def forced(self) -> OperatorOverride:
        """The override as the audit will have it, with its epoch."""
        (forced,) = self.done.overrides
        return forced

    def objections(self) -> Iterator[str]:
        """Why the override needs --force: the writer's name is unknown, or a writer may still complete the IDs."""
        if self._is_unknown_writer():
            yield (
                f"{self.act.stream} has no writer {self.act.writer}: `tidemark status` shows its writers;"
                " --force allows it"
            )
        for name, verdict, seen in self._writers_settled():
            if verdict not in ("silent", "no heartbeat"):
                how = "has an open transaction" if verdict == "open transaction" else "is alive"
                yield (
                    f"{name} {how}, {_seen(seen, self.now)}, and may still complete its IDs: end its transaction"
                    " or stop it first; --force allows it"
                )

    def _writers_settled(self) -> Iterator[tuple[str, Verdict, datetime | None]]:
        """The writers whose IDs the override settles, each with its verdict; none if it only reopens IDs."""
        if self._reopens():
            return
        for blocker in self._blockers():
            unknown = blocker.verdict == "unknown"
            life = open_ranges.verdict(blocker.last_seen, [], self.now, self.silent) if unknown else blocker.verdict
            yield blocker.writer, life, blocker.last_seen
        known = self.before.writers.get(self.act.writer)
        if not self.waiting and known is not None and known.retired is None:
            how = open_ranges.writer_verdict(self.before, self.act.writer, known.seen, self.now, self.silent)
            yield self.act.writer, how, last_seen(known.seen)

    def dangers(self) -> Iterator[str]:
        """Why an epoch must not be ended by hand, even with --force."""
        name, known = self.act.writer, self.before.writers.get(self.act.writer)
        if not self.fences or known is None:
            return
        if self.done.timelines:
            yield f"{name} has completed IDs beyond that ID: a new timeline would begin for all writers of the stream"
        if known.start is not None:
            yield (f"a relay sends the records of {name} in epoch {known.epoch}: its further records would be rejected")
        if any(verdict in ("alive", "blocked") for _, verdict, _ in self._writers_settled()):
            yield (
                f"{name} is alive, and an ID that it completes now would begin a new timeline for all writers:"
                " stop it, or revoke its right to write to Kafka, and wait a minute"
            )

    @property
    def fences(self) -> bool:
        """Whether the override ends an epoch that has joined."""
        known = self.before.writers.get(self.act.writer)
        return isinstance(self.act, records.Join) and known is not None and known.epoch < self.act.epoch

    def _is_unknown_writer(self) -> bool:
        writer, before = self.act.writer, self.before
        return writer not in {ANY_WRITER, *before.writers, *(name for name, _ in before.unjoined)}

    def _reopens(self) -> bool:
        known = self.before.writers.get(self.act.writer)
        return isinstance(self.act, records.Join) and known is not None and known.epoch == self.forced.epoch

    def _blockers(self) -> list[OpenRange]:
        """The lowest open range of each writer and epoch."""
        return [*{(blocker.writer, blocker.epoch): blocker for blocker in reversed(self.waiting)}.values()][::-1]

    def settled(self) -> list[tuple[int, int]]:
        """Ranges that the override settles on the writer's chain, `(low, high]`, signed."""
        incarnation = self.act.writer, self.act.epoch
        was = self.before.writers.get(self.act.writer) or self.before.unjoined.get(incarnation)
        now = self.after.writers.get(self.act.writer)
        if was is None or now is None:
            return []
        signed = self.after.direction.signed
        ranges = now.chain.settled().difference(was.chain.settled())
        return [(signed(max(low, 0)), signed(high)) for low, high in ranges if high > 0]

    def warnings(self) -> Iterator[str]:
        """What is blocked, and what is lost if the override is wrong. Shown before the confirmation."""
        for blocker in self._blockers():
            waits = (
                f"; {count(blocker.waiting, 'committed ID')} waiting, {blocker.facts} with facts"
                if blocker.waiting
                else ""
            )
            yield f"{blocker.writer}: {blocker.verdict}, {_seen(blocker.last_seen, self.now)}{waits}"
        settled = self.settled()
        if settled:
            ranges = ", ".join(id_range(low, high) for low, high in settled[:SHOWN])
            more = f" and {count(len(settled) - SHOWN, 'more range')}" if len(settled) > SHOWN else ""
            yield f"Tidemark cannot verify that IDs {ranges}{more} of {self.act.writer} are empty."
        if settled and not self.fences:
            yield "If a row appears there later, readers have already passed it: you must repair them by hand."
        if self.fences:
            yield f"Records of {self.act.writer} in an epoch below {self.act.epoch} are rejected from now on."
            yield f"Its next start needs an epoch above {self.act.epoch}; the linear position waits for it."
        if isinstance(self.act, records.Retire):
            yield f"The linear position no longer waits for {self.act.writer}: it may also pass a higher open ID."

    def moves(self) -> Iterator[str]:
        """What would happen, a line for each effect."""
        before, after, done = self.before, self.after, self.done
        act, reopened = self.forced, False
        yield f"{act.kind} of {act.writer} (epoch {act.epoch}), by {act.by}: {act.why}"
        was, now = (state.writers.get(act.writer) for state in (before, after))
        if was is not None and now is not None and now.chain.reach < was.chain.reach:
            reopened = True
            low, position = after.direction.signed(now.chain.position), after.direction.signed(now.position)
            then = f"; completions up to {position} are late" if position != low else ""
            yield f"IDs of {act.writer} beyond {low} are open again{then}"
        effects = [*moved(done)]
        yield from effects
        if not (reopened or effects):
            yield f"nothing moves; the linear position of {done.stream} stays at {done.linear}"


def moved(done: StreamEffects) -> Iterator[str]:
    """What a batch of one record did to a stream, a line for each effect; none if nothing moved."""
    for move in done.advances:
        counts = zip(("facts", "empty", "unseen", "skipped"), move.evidence.counts, strict=True)
        evidence = ", ".join(f"{name} {number}" for name, number in counts if number) or "no new evidence"
        yield f"{move.writer} moves from {move.prev} to {move.id}: {evidence}"
    for late in done.late:
        yield f"late: {ids(late.prev, late.id)} of {late.writer}, facts {late.facts}"
    for begun in done.timelines:
        yield f"a new timeline begins at {begun.id} for all writers"
    if done.linear != done.linear_prev:
        yield f"the linear position of {done.stream} moves from {done.linear_prev} to {done.linear}"


def attempt(stored: bytes, act: records.Marker, now: float, policies: Policies = NO_POLICIES) -> Trial:
    """What `act` would do to a stream whose encoded state is `stored`; `now` in s. Raises `BadRecord`."""
    records.read(records.encode(act), act.stream.encode(), Topic.CONTROL)
    milliseconds = int(now * 1000)
    packet = runs.Packet("control", 0, Topic.CONTROL, 1, PackedRuns(), [], [runs.Marker.of(act, 0, milliseconds)], [])
    states = {act.stream: stored}
    effects = advance(0, States(states), [packet], milliseconds, Bounds())
    for bad in effects.rejected:
        reason, before = Reason(bad.reason), codec.decode(stored)
        how = (
            _retire_conflict(act, before, now, silent_after_seconds(policies, act.stream))
            if reason is Reason.CONFLICT
            else None
        )
        raise BadRecord(bad.reason, how or HINTS.get(reason, "it does not fit the state of the stream"))
    (done,) = effects.streams
    (forced,) = done.overrides
    act = msgspec.structs.replace(act, epoch=forced.epoch)
    waiting = [
        blocker
        for blocker in open_ranges.find_open_ranges({act.stream: stored}, now, policies)
        if (
            blocker.verdict == "unknown"
            if act.writer == ANY_WRITER
            else (blocker.writer == act.writer and blocker.epoch <= act.epoch)
        )
    ]
    trial = Trial(
        act,
        codec.decode(stored),
        codec.decode(states[act.stream]),
        done,
        waiting,
        now,
        silent_after_seconds(policies, act.stream),
    )
    if isinstance(act, records.Skip) and not trial.settled():
        raise BadRecord("not_a_gap", "no ID of the writer is open there: `tidemark gaps` shows the open ones")
    return trial


def _retire_conflict(act: records.Marker, before: StreamState, now: float, silent: float) -> str | None:
    """Why this writer cannot retire there, and what to do; None if the override is no RETIRE of a known writer."""
    known = before.writers.get(act.writer)
    if not isinstance(act, records.Retire):
        return None
    if (unjoined := before.unjoined.get((act.writer, act.epoch))) is not None:
        reach = before.direction.signed(max(unjoined.chain.reach, 0))
        done = f"{act.writer} never joined in epoch {act.epoch} and has completed IDs up to {reach}"
        return f"{done}: --id={reach} settles them"
    if known is None:
        return None
    signed, seen = before.direction.signed, last_seen(known.seen)
    if known.retired is not None:
        return f"{act.writer} has retired, at {signed(known.position)}"
    settles = f"--id={signed(known.chain.reach)} settles its open IDs"
    if open_ranges.writer_verdict(before, act.writer, known.seen, now, silent) == "silent":
        return settles
    return f"{act.writer} is alive, {_seen(seen, now)}: stop it first; then {settles}"


def of_a_bridge(act: records.Marker, bridged: Collection[str]) -> Iterator[str]:
    """Why a worker of Synapse cannot be retired this way; `bridged`: streams that `tidemark synapse` sends."""
    if isinstance(act, records.Retire) and act.stream in bridged:
        yield (
            f"a bridge sends {act.stream} and would still wait for {act.writer}: use `tidemark synapse retire`, which"
            f" first sends what Synapse's tables have of it; --force allows it"
        )


def fence_fields(stored: bytes, writer: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the JOIN that ends the writer's epoch: by default the next epoch, and the last completed ID.

    Raises `BadRecord` if the writer has no open epoch.
    """
    now = codec.decode(stored)
    known = now.writers.get(writer)
    if known is None or known.retired is not None:
        raise BadRecord(Reason.UNKNOWN_WRITER, "the writer has no open epoch: see `tidemark status`")
    epoch = known.epoch + 1 if fields["epoch"] is None else fields["epoch"]
    if epoch <= known.epoch:
        raise BadRecord(Reason.ZOMBIE, f"epoch {known.epoch} is open: give a higher one")
    reach = now.direction.signed(max(known.reach, known.chain.position))
    return {**fields, "epoch": epoch, "id": reach if fields["id"] is None else fields["id"]}


def override_record(kind: str, stored: bytes, fields: Mapping[str, Any]) -> records.Marker:
    """The record of an override; an option that was not given is None."""
    if kind == "FENCE":
        kind, fields = "JOIN", fence_fields(stored, fields["writer"], fields)
    return KINDS[kind](**{name: value for name, value in fields.items() if value is not None})


def positions_line(stored: bytes, writer: str) -> str:
    """The position of the writer and the linear position, in one line."""
    stream = codec.decode(stored)
    signed, known = stream.direction.signed, stream.writers.get(writer)
    where = f"linear position {signed(stream.linear.position)}"
    return where if known is None else f"{writer} is at {signed(known.position)}, {where}"


def _seen(seen: datetime | None, now: float) -> str:
    return "no record was ever read" if seen is None else f"last record {duration(now - seen.timestamp())} ago"


Outcome = Literal["applied", "refused", "settled before", "not seen"]
POLL_EVERY: Final = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class SentOverride:
    """The place of an override's record in Kafka, and its entry in the log of overrides."""

    noted: LoggedOverride
    topic: str
    partition: int
    offset: int

    def line(self) -> str:
        at = f"{self.topic}/{self.partition} at offset {self.offset}"
        return f"sent to {at}; noted as override {self.noted.number} of {self.noted.seen_as}"

    def plain(self) -> dict[str, Any]:
        """The fields of the JSON output."""
        sent = {"topic": self.topic, "partition": self.partition, "offset": self.offset}
        return {"sent": sent, "number": self.noted.number, "seen_as": self.noted.seen_as}


def send(acts: OverrideLog, connection: KafkaConnection, topic: str, trial: Trial) -> SentOverride:
    """Note the override that was tried, and send it with the epoch of the trial."""
    require_topic(connection, topic)
    noted = acts.note(trial.act.stream, trial.forced)
    return send_noted(acts, noted, connection, topic, Topic.CONTROL, records.encode(trial.act))


def require_topic(connection: KafkaConnection, topic: str) -> None:
    """Raise `CommandFailed` if Kafka does not answer or has no such topic, before anything is noted."""
    try:
        Topics(connection).describe([topic])
    except TidemarkError as problem:
        raise CommandFailed(f"{problem}; nothing was noted or sent") from problem


def send_noted(
    acts: OverrideLog, noted: LoggedOverride, connection: KafkaConnection, topic: str, role: Topic, value: bytes
) -> SentOverride:
    refused: list[str] = []
    try:
        produced = produce_lines(connection, topic, role, [value], refused.append)
    except TidemarkError as problem:
        raise CommandFailed(
            f"{problem}; override {noted.number} is noted, but Kafka may not have it: check with `tidemark tail`"
        ) from problem
    assert produced.last is not None, refused
    acts.sent(noted, topic, *produced.last)
    return SentOverride(noted, topic, *produced.last)


def outcome(acts: OverrideLog, sent: SentOverride, seconds: float, became: Callable[[], Outcome]) -> Outcome:
    """Wait until the pipeline has read the record, and return the outcome that `became` finds then; `not seen` after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while not acts.is_read(sent.topic, sent.partition, sent.offset):
        if time.monotonic() >= deadline:
            return "not seen"
        time.sleep(POLL_EVERY)
    final = became()
    acts.close(sent.noted, final)
    return final


def result(final: Outcome, postgres: Postgres, trial: Trial, seconds: float) -> str:
    """The outcome in a sentence."""
    if final == "not seen":
        return (
            f"no batch has read it after {seconds:g} s. It will be applied when the pipeline reads it: do not send it"
            " again. `tidemark status` shows the pipeline"
        )
    now = positions_line(postgres.states([trial.act.stream])[trial.act.stream], trial.act.writer)
    if final == "refused":
        return f"the pipeline refused it, because the state had changed; {now}"
    if final == "settled before":
        return f"another override had settled it, and this one did nothing (see `tidemark overrides list`); {now}"
    return f"applied: {now}"


def to_json(trial: Trial, sent: SentOverride | None, final: Outcome | None, now: str | None) -> str:
    """The same as JSON; `sent` and the fields after it are null if nothing was sent."""
    done = trial.done
    fields: dict[str, Any] = {
        "act": msgspec.to_builtins(trial.act),
        "would": [*trial.moves()],
        "advances": [
            dict(zip(advance.__struct_fields__, msgspec.to_builtins(advance), strict=True)) for advance in done.advances
        ],
        "linear": {"from": done.linear_prev, "to": done.linear},
        "warnings": [*trial.warnings()],
        "objections": [*trial.objections()],
        **({"sent": None, "number": None, "seen_as": None} if sent is None else sent.plain()),
        "outcome": final,
        "result": now,
    }
    return as_object(fields)


_FORCING: Final[list[Callable[[Any], Any]]] = [
    click.option(
        "--epoch", type=click.IntRange(0), help="Epoch of the writer. Default: the current one; for fence, the next."
    ),
    click.option("--beyond", is_flag=True, help="Allow IDs that no record has named. A position never moves back."),
    click.option("--force", "overrule", is_flag=True, help="Also if the writer is alive or unknown."),
]


def _act(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_FORCING):
        command = option(command)
    return answering(until_seen(command))


class IdRange(click.ParamType[tuple[int, int]]):
    """`A..B`, both included, as `tidemark gaps` shows them. Converted to `(prev, id]`."""

    name = "A..B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(-?\d+)(?:\.\.(-?\d+))?", str(value))
        first, last = (int(number or match[1]) for number in match.groups()) if match else (0, 0)
        if not first or first * last < 0 or abs(first) > abs(last) or abs(last) > MOST_ID:
            self.fail(f"{value!r} is not a range of IDs such as 8..11, or -8..-11", param, ctx)
        return (first - 1 if first > 0 else first + 1), last


@click.command("skip", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@click.argument("ids", type=IdRange(), metavar="A..B")
@_act
def skip(ids: tuple[int, int], **options: Any) -> None:
    """Settle the open IDs A to B of WRITER, both included. If one of them completes later, it is late.

    Use it last: first end the open transaction, or restart the writer.
    """
    _carry_out("SKIP", prev=ids[0], id=ids[1], **options)


@click.command("retire", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, default=0, help="Settle open IDs up to this one. Default: no ID may be open.")
def retire(**options: Any) -> None:
    """Stop waiting for WRITER on STREAM. `*` means all writers that never joined."""
    _carry_out("RETIRE", **options)


@click.command("join", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, required=True, help="All IDs of the writer up to this one are complete.")
def join(**options: Any) -> None:
    """Join in the name of WRITER, which never joined STREAM; or reopen the IDs that were skipped beyond --id."""
    _carry_out("JOIN", **options)


@click.command("fence", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@_act
@click.option(
    "--id", type=int, help="All IDs of the writer up to this one are complete. Default: its last completed ID."
)
def fence(**options: Any) -> None:
    """End the epoch of WRITER, for a process that cannot be stopped.

    Its open IDs are settled, and its further records are rejected.
    """
    _carry_out("FENCE", **options)


def _carry_out(
    kind: str, *, overrule: bool, dry_run: bool, yes: bool, as_json: bool, wait: float, **fields: Any
) -> None:
    settings = loaded()
    with (
        Postgres(PostgresConfig(settings.postgres)) as postgres,
        session_of(settings.postgres, "tidemark act") as session,
    ):
        postgres.check_readable()
        stored = postgres.states([fields["stream"]]).get(fields["stream"])
        if stored is None:
            raise CommandFailed(no_stream(fields["stream"]))
        act = override_record(kind, stored, fields)
        trial = attempt(stored, act, time.time(), Policies(postgres.policies.given(), settings.policy_defaults))
        for line in [*trial.moves(), *trial.warnings()]:
            click.echo(line, err=as_json)
        objections = [*of_a_bridge(act, postgres.conditions.bridges()), *trial.objections()]
        for line in [*trial.dangers(), *(() if overrule else objections)]:
            raise CommandFailed(line)
        if dry_run:
            if as_json:
                click.echo(to_json(trial, None, None, None))
            return
        confirmed(act.writer, "the writer's name", yes=yes)
        noted = OverrideLog(session)
        sent = send(noted, settings.kafka, settings.kafka_control_topic, trial)
        try:
            echo_result(sent.line(), err=as_json)
            final = outcome(noted, sent, wait, lambda: noted.became(sent.noted))
        except KeyboardInterrupt:
            echo_result(
                f"the override is sent and cannot be taken back: see `tidemark overrides show {sent.noted.number}`",
                err=True,
            )
            raise
        now = result(final, postgres, trial, wait)
    echo_result(to_json(trial, sent, final, now) if as_json else now)
    if final != "applied":
        raise SystemExit(NOT_SEEN if final == "not seen" else 1)
