"""`tidemark skip`, `retire`, `join` and `fence`: operator overrides, tried on the stored state before they are sent.

The trial uses the pipeline's state machine. The state may change before the pipeline reads the record. So the record
has the epoch of the trial, and the pipeline refuses the override if the writer has started again since.
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
    EFFECT_NOT_CONFIRMED,
    MAX_ID,
    CommandFailed,
    Utf8Command,
    add_change_options,
    echo_result,
    effect_wait_option,
    load_settings,
    require_confirmation,
    unknown_stream_text,
)
from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import NO_POLICIES, OpenRange, Verdict, last_seen, silent_after_seconds
from tidemark.app.output import count, duration, id_range, ids, json_text
from tidemark.app.verbs.gaps import MAX_SHOWN
from tidemark.app.verbs.kafka_records import produce_lines
from tidemark.common.errors import BadRecord, TidemarkError
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.operators import LoggedOverride, OverrideLog
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.effects import OperatorOverride, StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.limits import Policies, Reason
from tidemark.streaming.wire import records, runs
from tidemark.streaming.wire.records import ANY_WRITER, Topic
from tidemark.streaming.wire.runs import PackedRuns

RECORD_TYPES: Final[dict[str, type[records.OverridableRecord]]] = {
    "SKIP": records.Skip,
    "RETIRE": records.Retire,
    "JOIN": records.Join,
}
HINTS: Final = {
    Reason.BEYOND_ALLOCATED: "the ID is beyond all IDs that records of the stream have named: this is usually a typo."
    " --beyond allows the ID, but a position never moves back",
    Reason.UNKNOWN_WRITER: "the stream has no such writer in that epoch: `tidemark status` shows the writers",
    Reason.ZOMBIE: "that epoch has ended; without --epoch, the current epoch is used",
    Reason.CONFLICT: "the writer has retired, or the JOIN names its current epoch and an ID beyond its position:"
    " `tidemark status` shows the writer and its position",
    Reason.MIXED_SIGN: "wrong sign: the other IDs of the stream have the opposite sign",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """The effects that an override would have on the stored state of its stream.

    Attributes:
        record: the override, with its epoch.
        state_before: the state of the stream without the override.
        state_after: the state of the stream with the override.
        effects: the effects of a batch that has only this record.
        open_ranges: the writer's open ranges up to the override's epoch; for `*`, of all writers that never joined.
        now: the time of the trial, in seconds since 1970.
        silent_seconds: a writer is silent after this many seconds without a record.
    """

    record: records.OverridableRecord
    state_before: StreamState
    state_after: StreamState
    effects: StreamEffects
    open_ranges: list[OpenRange]
    now: float
    silent_seconds: float

    @property
    def override(self) -> OperatorOverride:
        """The override as `send` notes it in the audit table."""
        (override,) = self.effects.overrides
        return override

    def objections(self) -> Iterator[str]:
        """The reasons why the override needs --force: no such writer, or a writer may still complete the IDs."""
        if self._is_unknown_writer():
            yield (
                f"{self.record.stream} has no writer {self.record.writer}: `tidemark status` shows its writers;"
                " --force sends the override anyway"
            )
        for name, verdict, seen in self._affected_writers():
            if verdict not in ("silent", "no heartbeat"):
                state = "has an open transaction" if verdict == "open transaction" else "is alive"
                yield (
                    f"{name} {state}, {_last_record_text(seen, self.now)}, and may still complete its IDs: first end"
                    " its transaction or stop the writer; --force sends the override anyway"
                )

    def _affected_writers(self) -> Iterator[tuple[str, Verdict, datetime | None]]:
        """The writers whose IDs the override settles, with verdict and newest record. Empty if it only reopens IDs."""
        if self._reopens():
            return
        for blocker in self._blockers():
            verdict = blocker.verdict
            if verdict == "unknown":
                verdict = open_ranges.verdict_from_records(blocker.last_seen, [], self.now, self.silent_seconds)
            yield blocker.writer, verdict, blocker.last_seen
        known = self.state_before.writers.get(self.record.writer)
        if not self.open_ranges and known is not None and known.retired_at is None:
            name, seen = self.record.writer, known.last_seen
            verdict = open_ranges.writer_verdict(self.state_before, name, seen, self.now, self.silent_seconds)
            yield name, verdict, last_seen(seen)

    def dangers(self) -> Iterator[str]:
        """The reasons why an override that ends an epoch is not sent, even with --force. Empty for other overrides."""
        name, known = self.record.writer, self.state_before.writers.get(self.record.writer)
        if not self.ends_epoch or known is None:
            return
        if self.effects.timelines:
            yield f"{name} has completed IDs beyond ID {self.record.id}: a new timeline would begin; give a higher --id"
        if known.start_token is not None:
            yield f"a relay sends the records of {name} in epoch {known.epoch}, and would continue in this epoch"
        if any(verdict in ("alive", "blocked") for _, verdict, _ in self._affected_writers()):
            yield (
                f"{name} is alive, and an ID that it completes now would begin a new timeline for all writers:"
                " stop the writer, or revoke its right to write to Kafka, and wait until it has been silent for"
                f" {self.silent_seconds:g} s"
            )

    @property
    def ends_epoch(self) -> bool:
        """Whether the override ends the current epoch of a writer that has joined."""
        known = self.state_before.writers.get(self.record.writer)
        return isinstance(self.record, records.Join) and known is not None and known.epoch < self.record.epoch

    def _is_unknown_writer(self) -> bool:
        writer, before = self.record.writer, self.state_before
        return writer not in {ANY_WRITER, *before.writers, *(name for name, _ in before.unjoined)}

    def _reopens(self) -> bool:
        """Whether the override only reopens IDs that were skipped."""
        known = self.state_before.writers.get(self.record.writer)
        return isinstance(self.record, records.Join) and known is not None and known.epoch == self.override.epoch

    def _blockers(self) -> list[OpenRange]:
        """The first of `open_ranges` of each writer and epoch, in the same order."""
        return [*{(blocker.writer, blocker.epoch): blocker for blocker in reversed(self.open_ranges)}.values()][::-1]

    def settled_ranges(self) -> list[tuple[int, int]]:
        """The ranges `(low, high]` of the writer's IDs that the override settles, signed. Empty for `*`, and for a
        writer of which no record was read."""
        incarnation = self.record.writer, self.record.epoch
        was = self.state_before.writers.get(self.record.writer) or self.state_before.unjoined.get(incarnation)
        now = self.state_after.writers.get(self.record.writer)
        if was is None or now is None:
            return []
        signed = self.state_after.direction.signed
        ranges = now.chain.settled_intervals().difference(was.chain.settled_intervals())
        return [(signed(max(low, 0)), signed(high)) for low, high in ranges if high > 0]

    def warnings(self) -> Iterator[str]:
        """The lines to show before the confirmation: the blockers, and the damage if the override is a mistake."""
        writer, epoch = self.record.writer, self.record.epoch
        for blocker in self._blockers():
            text = f"{blocker.writer}: {blocker.verdict}, {_last_record_text(blocker.last_seen, self.now)}"
            pending = f"; {count(blocker.waiting, 'complete ID')} pending, {blocker.facts} with facts"
            yield text + (pending if blocker.waiting else "")
        settled = self.settled_ranges()
        if settled:
            ranges = ", ".join(id_range(low, high) for low, high in settled[:MAX_SHOWN])
            more = f" and {count(len(settled) - MAX_SHOWN, 'more range')}" if len(settled) > MAX_SHOWN else ""
            yield f"Tidemark cannot verify that IDs {ranges}{more} of {writer} are empty."
        if settled and not self.ends_epoch:
            yield "A row of such an ID that is committed later is late (`tidemark late list`): readers have passed it."
        if self.ends_epoch:
            yield f"Records of {writer} in an epoch below {epoch} are rejected from now on."
            yield f"The writer's next start needs an epoch above {epoch}; the linear position waits for that start."
        if isinstance(self.record, records.Retire):
            yield f"The linear position no longer waits for {writer}, and may also pass its higher open IDs."

    def lines(self) -> Iterator[str]:
        """The override and its effects as text: one line for the override, then one line for each effect."""
        before, after, effects = self.state_before, self.state_after, self.effects
        override, reopened = self.override, False
        yield f"{override.kind} of {override.writer} (epoch {override.epoch}), by {override.by}: {override.why}"
        was, now = (state.writers.get(override.writer) for state in (before, after))
        if was is not None and now is not None and now.chain.highest_settled < was.chain.highest_settled:
            reopened = True
            low, position = after.direction.signed(now.chain.position), after.direction.signed(now.position)
            then = f"; completions up to {position} are late" if position != low else ""
            yield f"IDs of {override.writer} beyond {low} are open again{then}"
        yield from (lines := [*effect_lines(effects)])
        if not (reopened or lines):
            yield f"no position moves; the linear position of {effects.stream} stays at {effects.linear}"


def effect_lines(effects: StreamEffects) -> Iterator[str]:
    """The moves of positions, the late completions and the new timelines of a batch on a stream, one line of text for
    each. Empty if there are none."""
    for move in effects.advances:
        counts = zip(("facts", "empty", "unseen", "skipped"), move.evidence.counts, strict=True)
        evidence = ", ".join(f"{name} {number}" for name, number in counts if number) or "no new evidence"
        yield f"{move.writer} moves from {move.prev} to {move.id}: {evidence}"
    for late in effects.late:
        yield f"late: {ids(late.prev, late.id)} of {late.writer}, facts {late.facts}"
    for timeline in effects.timelines:
        yield f"a new timeline begins at {timeline.id} for all writers"
    if effects.linear != effects.linear_prev:
        yield f"the linear position of {effects.stream} moves from {effects.linear_prev} to {effects.linear}"


def try_override(
    encoded_state: bytes, record: records.OverridableRecord, now: float, policies: Policies = NO_POLICIES
) -> Trial:
    """Apply an override to a copy of its stream's state.

    Args:
        encoded_state: the stream's encoded state.
        record: the override.
        now: the current time, in seconds since 1970.
        policies: the policies of the streams: bounds, and the time after which a writer is silent.

    Raises:
        BadRecord: the record is invalid, the pipeline would refuse the override, or a SKIP would settle no ID.
    """
    records.read(records.encode(record), record.stream.encode(), Topic.CONTROL)
    milliseconds = int(now * 1000)
    packet = runs.Packet(
        "control", 0, Topic.CONTROL, 1, PackedRuns(), [], [runs.Marker.of(record, 0, milliseconds)], []
    )
    states = {record.stream: encoded_state}
    effects = apply_batch(0, States(states), [packet], milliseconds, policies.bounds())
    for bad in effects.rejected:
        reason, before = Reason(bad.reason), codec.decode(encoded_state)
        hint = None
        if reason is Reason.CONFLICT:
            hint = _retire_conflict(record, before, now, silent_after_seconds(policies, record.stream))
        raise BadRecord(bad.reason, hint or HINTS.get(reason, "the override does not fit the state of the stream"))
    (stream_effects,) = effects.streams
    (override,) = stream_effects.overrides
    record = msgspec.structs.replace(record, epoch=override.epoch)
    ranges = [
        blocker
        for blocker in open_ranges.find_open_ranges({record.stream: encoded_state}, now, policies)
        if (
            blocker.verdict == "unknown"
            if record.writer == ANY_WRITER
            else (blocker.writer == record.writer and blocker.epoch <= record.epoch)
        )
    ]
    before, after = codec.decode(encoded_state), codec.decode(states[record.stream])
    trial = Trial(record, before, after, stream_effects, ranges, now, silent_after_seconds(policies, record.stream))
    if isinstance(record, records.Skip) and not trial.settled_ranges():
        raise BadRecord("not_a_gap", "no ID of the writer is open in that range: `tidemark gaps` shows the open IDs")
    return trial


def _retire_conflict(
    record: records.OverridableRecord, before: StreamState, now: float, silent_seconds: float
) -> str | None:
    """Explain why the pipeline refuses a RETIRE, and what to do instead.

    Returns:
        The explanation; None if `record` is not a RETIRE, or if the stream has no such writer.
    """
    known = before.writers.get(record.writer)
    if not isinstance(record, records.Retire):
        return None
    if (unjoined := before.unjoined.get((record.writer, record.epoch))) is not None:
        highest = before.direction.signed(max(unjoined.chain.highest_settled, 0))
        problem = f"{record.writer} never joined in epoch {record.epoch} and has completed IDs up to {highest}"
        return f"{problem}: --id={highest} settles all its IDs up to there"
    if known is None:
        return None
    signed, seen = before.direction.signed, last_seen(known.last_seen)
    if known.retired_at is not None:
        return f"{record.writer} has already retired, at position {signed(known.position)}"
    highest = signed(known.chain.highest_settled)
    settles = f"--id={highest} settles its open IDs"
    if open_ranges.writer_verdict(before, record.writer, known.last_seen, now, silent_seconds) == "silent":
        return f"{record.writer} has open IDs below ID {highest}: {settles}"
    return f"{record.writer} is alive, {_last_record_text(seen, now)}: stop the writer first; then {settles}"


def bridge_objections(record: records.OverridableRecord, bridged: Collection[str]) -> Iterator[str]:
    """The objection to a RETIRE in a stream that a bridge sends, because another command retires a worker of Synapse.
    Empty for other overrides and streams.

    Args:
        record: the override.
        bridged: the streams that a bridge sends.
    """
    if isinstance(record, records.Retire) and record.stream in bridged:
        yield (
            f"a bridge sends {record.stream} and would still wait for {record.writer}: use `tidemark synapse retire`,"
            " which first sends the writer's facts in Synapse's tables; --force sends the override anyway"
        )


def fence_fields(encoded_state: bytes, writer: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with the epoch and the ID of the JOIN that ends the writer's current epoch.

    The default epoch is the current epoch plus 1. The default ID is the highest ID that the writer has completed, or
    its position if that is higher.

    Args:
        encoded_state: the stream's encoded state.
        writer: the name of the writer.
        fields: the options of the command; None for an option that was not given.

    Raises:
        BadRecord: the writer never joined or has retired, or the given epoch is not higher than the current one.
    """
    now = codec.decode(encoded_state)
    known = now.writers.get(writer)
    if known is None or known.retired_at is not None:
        why = f"writer {writer} never joined or has retired: `tidemark status {fields['stream']}` lists the writers"
        raise BadRecord(Reason.UNKNOWN_WRITER, why)
    epoch = known.epoch + 1 if fields["epoch"] is None else fields["epoch"]
    if epoch <= known.epoch:
        raise BadRecord(Reason.ZOMBIE, f"{writer} is in epoch {known.epoch}: give a higher --epoch")
    highest = now.direction.signed(max(known.highest_settled_by_writer, known.chain.position))
    return {**fields, "epoch": epoch, "id": highest if fields["id"] is None else fields["id"]}


def make_override_record(kind: str, encoded_state: bytes, fields: Mapping[str, Any]) -> records.OverridableRecord:
    """Make the record of an override. Raises `BadRecord` if a FENCE does not fit the stored state.

    Args:
        kind: `SKIP`, `RETIRE`, `JOIN` or `FENCE`.
        encoded_state: the stream's encoded state.
        fields: the options of the command; None for an option that was not given.
    """
    if kind == "FENCE":
        kind, fields = "JOIN", fence_fields(encoded_state, fields["writer"], fields)
    return RECORD_TYPES[kind](**{name: value for name, value in fields.items() if value is not None})


def positions_line(encoded_state: bytes, writer: str) -> str:
    """The position of the writer, if the stream has the writer, and the linear position, in one line."""
    stream = codec.decode(encoded_state)
    signed, known = stream.direction.signed, stream.writers.get(writer)
    where = f"linear position {signed(stream.linear.position)}"
    return where if known is None else f"{writer} is at {signed(known.position)}, {where}"


def _last_record_text(seen_at: datetime | None, now: float) -> str:
    return "no record was ever read" if seen_at is None else f"last record {duration(now - seen_at.timestamp())} ago"


Outcome = Literal["applied", "refused", "settled before", "not seen"]
POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class SentOverride:
    """An override that was sent: its entry in the audit table (`entry`), and where its record is in Kafka."""

    entry: LoggedOverride
    topic: str
    partition: int
    offset: int

    def line(self) -> str:
        at = f"{self.topic}/{self.partition} at offset {self.offset}"
        return f"sent to {at}; logged as override {self.entry.number} by database user {self.entry.seen_as}"

    def json_fields(self) -> dict[str, Any]:
        """The fields of the JSON output."""
        sent = {"topic": self.topic, "partition": self.partition, "offset": self.offset}
        return {"sent": sent, "number": self.entry.number, "seen_as": self.entry.seen_as}


def send(override_log: OverrideLog, connection: KafkaConnection, topic: str, trial: Trial) -> SentOverride:
    """Log the override of a trial in the audit table, and send its record to `topic`. Raises the errors of
    `require_topic`, `OverrideLog.log` and `send_logged_override`."""
    require_topic(connection, topic)
    entry = override_log.log(trial.record.stream, trial.override)
    return send_logged_override(override_log, entry, connection, topic, Topic.CONTROL, records.encode(trial.record))


def require_topic(connection: KafkaConnection, topic: str) -> None:
    """Raise `CommandFailed` if the topic is missing, or Kafka does not describe it. For use before logging."""
    try:
        Topics(connection).describe([topic])
    except TidemarkError as problem:
        raise CommandFailed(f"{problem}; nothing was logged or sent") from problem


def send_logged_override(
    override_log: OverrideLog, entry: LoggedOverride, connection: KafkaConnection, topic: str, role: Topic, value: bytes
) -> SentOverride:
    """Send the record of an override that the audit table already has, and note the record's offset in the table.

    `value` is the encoded record. Raises `CommandFailed` if Kafka may not have the record.
    """
    refusals: list[str] = []
    try:
        produced = produce_lines(connection, topic, role, [value], refusals.append)
    except TidemarkError as problem:
        raise CommandFailed(
            f"{problem}; override {entry.number} is logged, but Kafka may not have its record: check with"
            " `tidemark tail`"
        ) from problem
    assert produced.last_record is not None, refusals
    override_log.note_sent(entry, topic, *produced.last_record)
    return SentOverride(entry, topic, *produced.last_record)


def wait_for_outcome(
    override_log: OverrideLog, sent: SentOverride, seconds: float, find_outcome: Callable[[], Outcome]
) -> Outcome:
    """Wait until a batch has read the record of the override, and store the outcome in the audit table.

    Args:
        seconds: the longest wait.
        find_outcome: returns the outcome. Called once, after a batch has read the record.

    Returns:
        The outcome; `not seen` if no batch has read the record after `seconds`: then nothing is stored.
    """
    deadline = time.monotonic() + seconds
    while not override_log.is_read(sent.topic, sent.partition, sent.offset):
        if time.monotonic() >= deadline:
            return "not seen"
        time.sleep(POLL_SECONDS)
    outcome = find_outcome()
    override_log.note_outcome(sent.entry, outcome)
    return outcome


def outcome_text(outcome: Outcome, postgres: Postgres, trial: Trial, seconds: float) -> str:
    """The outcome of an override as a sentence, with the current positions. Reads the positions from `postgres`."""
    if outcome == "not seen":
        return (
            f"no batch has read the override after {seconds:g} s: do not send the override again. Its record is in"
            " Kafka, and the pipeline reads the record when it runs. `tidemark status` shows the pipeline"
        )
    now = positions_line(postgres.states([trial.record.stream])[trial.record.stream], trial.record.writer)
    if outcome == "refused":
        return (
            f"the pipeline refused the override, because the state had changed; {now}. Check the open IDs with"
            f" `tidemark gaps {trial.record.stream}`, and run the command again if it is still necessary"
        )
    if outcome == "settled before":
        return f"another override had settled the IDs, so this one did nothing (see `tidemark overrides list`); {now}"
    return f"applied: {now}"


def to_json(trial: Trial, sent: SentOverride | None, outcome: Outcome | None, result: str | None) -> str:
    """The JSON of a trial and its outcome. `sent`, `outcome` and `result` are None if the override was not sent."""
    effects = trial.effects
    fields: dict[str, Any] = {
        "act": msgspec.to_builtins(trial.record),
        "would": [*trial.lines()],
        "advances": [
            dict(zip(advance.__struct_fields__, msgspec.to_builtins(advance), strict=True))
            for advance in effects.advances
        ],
        "linear": {"from": effects.linear_prev, "to": effects.linear},
        "warnings": [*trial.warnings()],
        "objections": [*trial.objections()],
        **({"sent": None, "number": None, "seen_as": None} if sent is None else sent.json_fields()),
        "outcome": outcome,
        "result": result,
    }
    return json_text(fields)


_OPTIONS: Final[list[Callable[[Any], Any]]] = [
    click.option(
        "--epoch", type=click.IntRange(0), help="Epoch of the writer. Default: the current; for fence, the next."
    ),
    click.option(
        "--beyond", is_flag=True, help="Allow an ID beyond the highest ID of all records. Positions never move back."
    ),
    click.option(
        "--force", is_flag=True, help="Send even if the writer is alive or unknown, or if a bridge sends STREAM."
    ),
]


def _override_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the common options of all commands that send an override."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return add_change_options(effect_wait_option(command))


class IdRange(click.ParamType[tuple[int, int]]):
    """One ID, or a range of IDs `A..B`, both included, as `tidemark gaps` shows it. Converted to `(prev, id]`."""

    name = "A..B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(-?\d+)(?:\.\.(-?\d+))?", str(value))
        first, last = (int(number or match[1]) for number in match.groups()) if match else (0, 0)
        if not first or first * last < 0 or abs(first) > abs(last) or abs(last) > MAX_ID:
            self.fail(f"{value!r} is not a range of IDs such as 8..11, or -8..-11", param, ctx)
        return (first - 1 if first > 0 else first + 1), last


@click.command("skip", cls=Utf8Command)
@click.argument("stream")
@click.argument("writer")
@click.argument("ids", type=IdRange(), metavar="A..B")
@_override_options
def skip(ids: tuple[int, int], **options: Any) -> None:
    """Settle the open IDs A to B of WRITER, both included. An ID that completes afterwards is late.

    This is the last resort: first end the open transaction, or restart the writer.
    """
    _run("SKIP", prev=ids[0], id=ids[1], **options)


@click.command("retire", cls=Utf8Command)
@click.argument("stream")
@click.argument("writer")
@_override_options
@click.option("--id", type=int, default=0, help="Settle open IDs up to this ID. Default: no ID may be open.")
def retire(**options: Any) -> None:
    """Retire WRITER: the linear position of STREAM no longer waits for it. `*` means all writers that never joined."""
    _run("RETIRE", **options)


@click.command("join", cls=Utf8Command)
@click.argument("stream")
@click.argument("writer")
@_override_options
@click.option("--id", type=int, required=True, help="All IDs of the writer up to this one are complete.")
def join(**options: Any) -> None:
    """Send the JOIN of a WRITER that never joined STREAM, or reopen the skipped IDs beyond --id."""
    _run("JOIN", **options)


@click.command("fence", cls=Utf8Command)
@click.argument("stream")
@click.argument("writer")
@_override_options
@click.option(
    "--id",
    type=int,
    help="Settle IDs up to this ID. Default: the writer's highest completed ID or position.",
)
def fence(**options: Any) -> None:
    """End the epoch of WRITER on STREAM. Use this command if the process of WRITER cannot be stopped.

    The open IDs of WRITER up to --id are settled, and its further records in the ended epoch are rejected.
    """
    _run("FENCE", **options)


def _run(kind: str, *, force: bool, dry_run: bool, yes: bool, as_json: bool, wait: float, **fields: Any) -> None:
    """Try the override, show its effects, ask for confirmation, send the override, and wait for its outcome."""
    settings = load_settings()
    with (
        Postgres(PostgresConfig(settings.postgres)) as postgres,
        session_of(settings.postgres, "tidemark override") as session,
    ):
        postgres.check_readable()
        stored = postgres.states([fields["stream"]]).get(fields["stream"])
        if stored is None:
            raise CommandFailed(unknown_stream_text(fields["stream"], postgres.streams()))
        record = make_override_record(kind, stored, fields)
        trial = try_override(stored, record, time.time(), Policies(postgres.policies.read(), settings.policy_defaults))
        for line in [*trial.lines(), *trial.warnings()]:
            click.echo(line, err=as_json)
        objections = [*bridge_objections(record, postgres.conditions.bridges()), *trial.objections()]
        for line in [*trial.dangers(), *(() if force else objections)]:
            raise CommandFailed(line)
        if dry_run:
            if as_json:
                click.echo(to_json(trial, None, None, None))
            return
        require_confirmation(record.writer, "the writer's name", yes=yes)
        override_log = OverrideLog(session)
        sent = send(override_log, settings.kafka, settings.kafka_control_topic, trial)
        try:
            echo_result(sent.line(), err=as_json)
            outcome = wait_for_outcome(override_log, sent, wait, lambda: override_log.find_outcome(sent.entry))
        except KeyboardInterrupt:
            text = (
                f"the override was sent, Ctrl-C does not recall it: see `tidemark overrides show {sent.entry.number}`"
            )
            echo_result(text, err=True)
            raise
        result = outcome_text(outcome, postgres, trial, wait)
    echo_result(to_json(trial, sent, outcome, result) if as_json else result)
    if outcome != "applied":
        raise SystemExit(EFFECT_NOT_CONFIRMED if outcome == "not seen" else 1)
