"""`tidemark skip`, `retire`, `join`: an operator's act, tried on the state that Postgres holds before it is sent.

The trial is the state machine's own answer. The pipeline may know more by the time that it reads the record; so the act
names the epoch that it was tried with, and one whose writer has started again since is refused there.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import click
import msgspec

from tidemark.app import open_ranges
from tidemark.app.commands import (
    MOST_ID,
    NOT_SEEN,
    CommandFailed,
    OurCommand,
    answering,
    confirmed,
    loaded,
    no_stream,
    tell,
    until_seen,
)
from tidemark.app.lag_json import last_seen
from tidemark.app.open_ranges import NO_POLICIES, OpenRange, silence
from tidemark.app.output import as_object, duration, id_range
from tidemark.app.remedies import Verdict
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
from tidemark.streaming.core.effects import Forced, StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.limits import Bounds, Reason
from tidemark.streaming.values.policies import Policies
from tidemark.streaming.wire import records, runs
from tidemark.streaming.wire.records import ANY_WRITER, Topic
from tidemark.streaming.wire.runs import PackedRuns

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


@dataclass(frozen=True, slots=True)
class Trial:
    """What `act` would do at `now` (s since 1970) to its stream, as Postgres holds that. Writers are silent after
    `silent` seconds."""

    act: records.Marker
    before: StreamState
    after: StreamState
    done: StreamEffects
    waiting: list[OpenRange]
    now: float
    silent: float

    @property
    def forced(self) -> Forced:
        """The act as the audit will have it, with the epoch that it means."""
        (forced,) = self.done.forced
        return forced

    def objections(self) -> Iterator[str]:
        """Why it is not sent unless that is overruled: a name that is mistyped, as it seems, and writers that may yet
        complete what it settles."""
        if self._is_unheard_of():
            yield (
                f"no record of {self.act.stream} has named {self.act.writer}: `tidemark status` shows its writers;"
                " --force overrules this"
            )
        for name, verdict, seen in self._lives():
            if verdict != "silent":
                how = "has a transaction open" if verdict == "open transaction" else "is alive"
                yield (
                    f"{name} {how}, {_heard(seen, self.now)}, and may yet complete its IDs: end its transaction or stop"
                    " it first; --force overrules this"
                )

    def _lives(self) -> Iterator[tuple[str, Verdict, datetime | None]]:
        """Writers that the act settles, each with what is known of its life; none of one that is waited for again."""
        if self._takes_back():
            return
        for it in self._holders():
            unknown = it.verdict == "unknown"
            yield it.writer, self._verdict(it.last_seen, []) if unknown else it.verdict, it.last_seen
        known = self.before.writers.get(self.act.writer)
        if not self.waiting and known is not None and known.retired is None:
            open_, seen = self.before.transactions.get(self.act.writer, []), last_seen(known.seen)
            yield self.act.writer, self._verdict(seen, open_), seen

    def _verdict(self, seen: datetime | None, transactions: Sequence[str]) -> Verdict:
        return open_ranges.verdict(seen, transactions, self.now, self.silent)

    def dangers(self) -> Iterator[str]:
        """Why an epoch may not be ended by hand, whatever the operator says."""
        name, known = self.act.writer, self.before.writers.get(self.act.writer)
        if not self.fences or known is None:
            return
        if self.done.timelines:
            yield f"{name} has completed what lies beyond that ID: all writers of the stream would begin a new timeline"
        if known.start is not None:
            yield (
                f"{name} is told by a relay, or by what joins like one: its database goes on in epoch {known.epoch},"
                " and all that it tells from now on would be refused"
            )
        if any(verdict == "alive" for _, verdict, _ in self._lives()):
            yield (
                f"{name} is alive, and what it completes meanwhile beyond that ID would begin a new timeline for all"
                " writers: stop it, or take its right to write to Kafka away, and wait a minute"
            )

    @property
    def fences(self) -> bool:
        """Whether an epoch that has joined ends by it."""
        known = self.before.writers.get(self.act.writer)
        return isinstance(self.act, records.Join) and known is not None and known.epoch < self.act.epoch

    def _is_unheard_of(self) -> bool:
        writer, before = self.act.writer, self.before
        return writer not in {ANY_WRITER, *before.writers, *(name for name, _ in before.unjoined)}

    def _takes_back(self) -> bool:
        known = self.before.writers.get(self.act.writer)
        return isinstance(self.act, records.Join) and known is not None and known.epoch == self.forced.epoch

    def _holders(self) -> list[OpenRange]:
        """Of each incarnation the first: behind its lowest gap waits most."""
        return [*{(it.writer, it.epoch): it for it in reversed(self.waiting)}.values()][::-1]

    def settled(self) -> list[tuple[int, int]]:
        """Ranges that the act settles on the writer's chain, `(low, high]`, signed."""
        incarnation = self.act.writer, self.act.epoch
        was = self.before.writers.get(self.act.writer) or self.before.unjoined.get(incarnation)
        now = self.after.writers.get(self.act.writer)
        if was is None or now is None:
            return []
        signed = self.after.direction.signed
        ranges = now.chain.settled().difference(was.chain.settled())
        return [(signed(max(low, 0)), signed(high)) for low, high in ranges if high > 0]

    def warnings(self) -> Iterator[str]:
        """What waits for the act, and what is lost where it is wrong. For people, before they confirm it."""
        for it in self._holders():
            waits = (
                f"; IDs of it that are complete and wait: {it.waiting}, with a fact: {it.facts}" if it.waiting else ""
            )
            yield f"{it.writer} is {it.verdict}, {_heard(it.last_seen, self.now)}{waits}"
        settled = self.settled()
        if settled:
            ranges = ", ".join(id_range(low, high) for low, high in settled[:SHOWN])
            more = f" and {len(settled) - SHOWN} ranges more" if len(settled) > SHOWN else ""
            yield f"nothing proves that {ranges}{more} of {self.act.writer} will hold no fact: that is your word alone."
        if settled and not self.fences:
            yield "Whatever completes there after all is late: no position counts it, and readers must repair by hand."
        if self.fences:
            yield f"What {self.act.writer} sends in an epoch below {self.act.epoch} from now on is refused, facts too."
            yield f"Its next start needs an epoch above {self.act.epoch}; the line waits for that, or its RETIRE."
        if isinstance(self.act, records.Retire):
            yield f"The line waits for {self.act.writer} no more: an ID higher up that is open may be passed, too."

    def moves(self) -> Iterator[str]:
        """What would happen, in lines for people."""
        before, after, done = self.before, self.after, self.done
        act, reopened = self.forced, False
        yield f"{act.kind} of {act.writer} in epoch {act.epoch}, by {act.by}: {act.why}"
        was, now = (it.writers.get(act.writer) for it in (before, after))
        if was is not None and now is not None and now.chain.reach < was.chain.reach:
            reopened = True
            low, position = after.direction.signed(now.chain.position), after.direction.signed(now.position)
            then = f"; what it completes up to {position} is late" if position != low else ""
            yield f"{act.writer} is waited for again from {low} on{then}"
        told = [*moved(done)]
        yield from told
        if not (reopened or told):
            yield f"nothing moves; the line of {done.stream} stays at {done.linear}"


def moved(done: StreamEffects) -> Iterator[str]:
    """What a batch of one record did to a stream, in lines for people; none where nothing moved."""
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


def attempt(stored: bytes, act: records.Marker, now: float, policies: Policies = NO_POLICIES) -> Trial:
    """What `act` would do to a stream whose encoded state is `stored`; `now` in s. Raises `BadRecord`."""
    records.read(records.encode(act), act.stream.encode(), Topic.CONTROL)
    milliseconds = int(now * 1000)
    packet = runs.Packet("control", 0, Topic.CONTROL, 1, PackedRuns(), [], [runs.Marker.of(act, 0, milliseconds)], [])
    states = {act.stream: stored}
    effects = advance(0, States(states), [packet], milliseconds, Bounds())
    for bad in effects.rejected:
        reason, before = Reason(bad.reason), codec.decode(stored)
        how = _in_the_way(act, before, now, silence(policies, act.stream)) if reason is Reason.CONFLICT else None
        raise BadRecord(bad.reason, how or HINTS.get(reason, "it does not fit what the stream holds"))
    (done,) = effects.streams
    (forced,) = done.forced
    act = msgspec.structs.replace(act, epoch=forced.epoch)
    waiting = [
        it
        for it in open_ranges.read({act.stream: stored}, now, policies)
        if (
            it.verdict == "unknown" if act.writer == ANY_WRITER else (it.writer == act.writer and it.epoch <= act.epoch)
        )
    ]
    trial = Trial(
        act, codec.decode(stored), codec.decode(states[act.stream]), done, waiting, now, silence(policies, act.stream)
    )
    if isinstance(act, records.Skip) and not trial.settled():
        raise BadRecord("not_a_gap", "nothing of the writer is open there: `tidemark gaps` shows what is")
    return trial


def _in_the_way(act: records.Marker, before: StreamState, now: float, silent: float) -> str | None:
    """Why this writer cannot retire there, and what to do; None where it is no RETIRE of a writer that has joined."""
    known = before.writers.get(act.writer)
    if not isinstance(act, records.Retire):
        return None
    if (held := before.unjoined.get((act.writer, act.epoch))) is not None:
        reach = before.direction.signed(max(held.chain.reach, 0))
        done = f"{act.writer} never joined in epoch {act.epoch} and has completed IDs up to {reach}"
        return f"{done}: --id={reach} settles them"
    if known is None:
        return None
    signed, seen = before.direction.signed, last_seen(known.seen)
    if known.retired is not None:
        return f"{act.writer} has retired, at {signed(known.position)}"
    settles = f"--id={signed(known.chain.reach)} settles what is open below what it has completed"
    if open_ranges.verdict(seen, before.transactions.get(act.writer, []), now, silent) == "silent":
        return settles
    return f"{act.writer} is alive, {_heard(seen, now)}: stop it first; then {settles}"


def of_a_bridge(act: records.Marker, bridged: Collection[str]) -> Iterator[str]:
    """Why no worker of Synapse retires by an operator's word; `bridged`: streams that `tidemark synapse` tells."""
    if isinstance(act, records.Retire) and act.stream in bridged:
        yield (
            f"{act.stream} is told by a bridge, which would go on waiting for {act.writer}:"
            f" `tidemark synapse retire` ends it with all that Synapse's tables have of it; --force overrules this"
        )


def fence_fields(stored: bytes, writer: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of the JOIN that ends the writer's epoch: by default the next one, up to all that it completed. Raises
    `BadRecord` where there is none to end."""
    now = codec.decode(stored)
    known = now.writers.get(writer)
    if known is None or known.retired is not None:
        raise BadRecord(Reason.UNKNOWN_WRITER, "no epoch of it is open that could end: see `tidemark status`")
    epoch = known.epoch + 1 if fields["epoch"] is None else fields["epoch"]
    if epoch <= known.epoch:
        raise BadRecord(Reason.ZOMBIE, f"epoch {known.epoch} would not end by that: give a higher one")
    reach = now.direction.signed(max(known.reach, known.chain.position))
    return {**fields, "epoch": epoch, "id": reach if fields["id"] is None else fields["id"]}


def asked(kind: str, stored: bytes, fields: Mapping[str, Any]) -> records.Marker:
    """The record of an act; an option that was not given is None."""
    if kind == "FENCE":
        kind, fields = "JOIN", fence_fields(stored, fields["writer"], fields)
    return KINDS[kind](**{name: value for name, value in fields.items() if value is not None})


def standing(stored: bytes, writer: str) -> str:
    """Where the line and the writer are, in a line for people."""
    stream = codec.decode(stored)
    signed, known = stream.direction.signed, stream.writers.get(writer)
    where = f"the line is at {signed(stream.linear.position)}"
    return where if known is None else f"{writer} is at {signed(known.position)}, {where}"


def _heard(seen: datetime | None, now: float) -> str:
    return "never seen" if seen is None else f"last seen {duration(now - seen.timestamp())} ago"


Outcome = Literal["applied", "refused", "settled before", "not seen"]
LOOK_EVERY: Final = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class SentAct:
    """Where the record of an act stands in Kafka, and under which number it is noted."""

    noted: LoggedOverride
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


def send(acts: OverrideLog, connection: KafkaConnection, topic: str, trial: Trial) -> SentAct:
    """Note the act that was tried, and send it for the epoch that was shown."""
    require_topic(connection, topic)
    noted = acts.note(trial.act.stream, trial.forced)
    return send_noted(acts, noted, connection, topic, Topic.CONTROL, records.encode(trial.act))


def require_topic(connection: KafkaConnection, topic: str) -> None:
    """Raise `CommandFailed` where Kafka is away or has no such topic: then nothing is noted either."""
    try:
        Topics(connection).describe([topic])
    except TidemarkError as problem:
        raise CommandFailed(f"{problem}; nothing was noted or sent") from problem


def send_noted(
    acts: OverrideLog, noted: LoggedOverride, connection: KafkaConnection, topic: str, role: Topic, value: bytes
) -> SentAct:
    refused: list[str] = []
    try:
        produced = produce_lines(connection, topic, role, [value], refused.append)
    except TidemarkError as problem:
        raise CommandFailed(
            f"{problem}; act {noted.number} is noted, and whether Kafka has it is not known: look with `tidemark tail`"
        ) from problem
    assert produced.last is not None, refused
    acts.sent(noted, topic, *produced.last)
    return SentAct(noted, topic, *produced.last)


def outcome(acts: OverrideLog, sent: SentAct, seconds: float, became: Callable[[], Outcome]) -> Outcome:
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


def to_json(trial: Trial, sent: SentAct | None, found: Outcome | None, now: str | None) -> str:
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


_FORCING: Final[list[Callable[[Any], Any]]] = [
    click.option(
        "--epoch", type=click.IntRange(0), help="Without it the writer as it lives now; to fence it, the next."
    ),
    click.option("--beyond", is_flag=True, help="Also past what the stream has allocated. No position comes back."),
    click.option("--force", "overrule", is_flag=True, help="Also where the writer is alive."),
]


def _act(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_FORCING):
        command = option(command)
    return answering(until_seen(command))


class IdRange(click.ParamType[tuple[int, int]]):
    """`A..B`, both ends among the IDs, as `tidemark gaps` shows them; comes out as `(prev, id]`."""

    name = "A..B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        found = re.fullmatch(r"(-?\d+)(?:\.\.(-?\d+))?", str(value))
        first, last = (int(it or found[1]) for it in found.groups()) if found else (0, 0)
        if not first or first * last < 0 or abs(first) > abs(last) or abs(last) > MOST_ID:
            self.fail(f"{value!r} is no range of IDs such as 8..11, or -8..-11", param, ctx)
        return (first - 1 if first > 0 else first + 1), last


@click.command("skip", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@click.argument("ids", type=IdRange(), metavar="A..B")
@_act
def skip(ids: tuple[int, int], **options: Any) -> None:
    """Settle what WRITER has open from A to B, both among them. What completes there after all is late.

    The last resort: end the transaction that is open, or restart the writer that hangs.
    """
    _carry_out("SKIP", prev=ids[0], id=ids[1], **options)


@click.command("retire", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, default=0, help="Settle what is open up to here; without it nothing may be open.")
def retire(**options: Any) -> None:
    """Let the line of STREAM wait for WRITER no more; for `*`: for none that never joined."""
    _carry_out("RETIRE", **options)


@click.command("join", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, required=True, help="All of the writer's up to here is complete.")
def join(**options: Any) -> None:
    """Join in the name of WRITER, which never joined STREAM; or take back what was skipped beyond --id."""
    _carry_out("JOIN", **options)


@click.command("fence", cls=OurCommand)
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, help="All of it up to here is complete. Without it the last ID that it completed.")
def fence(**options: Any) -> None:
    """End the epoch of WRITER, so that nothing counts any more that its old process sends.

    For a process that cannot be stopped. What it left open is settled, and what it sends from now on is refused.
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
        act = asked(kind, stored, fields)
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
            tell(sent.told(), err=as_json)
            found = outcome(noted, sent, wait, lambda: noted.became(sent.noted))
        except KeyboardInterrupt:
            tell(
                f"it is sent, and not taken back: `tidemark acts show {sent.noted.number}` tells what becomes of it",
                err=True,
            )
            raise
        now = result(found, postgres, trial, wait)
    tell(to_json(trial, sent, found, now) if as_json else now)
    if found != "applied":
        raise SystemExit(NOT_SEEN if found == "not seen" else 1)
