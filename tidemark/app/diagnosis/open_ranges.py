"""The open ranges that block positions, with their causes and remedies, for the verbs and the live page.

Only `of` queries a server. `remedy` returns the advice for a blocked writer. `lag_answer` is the linear lag in the
answers of `tidemark status` and of the sidecar.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidemark.app.output import duration
from tidemark.sinks.postgres.status import Reading
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import BlockReason, LinearLag, Source, is_brief, linear_lag, sources
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writers import UnjoinedWriter, WriterState
from tidemark.streaming.values.limits import Policies

Verdict = Literal["open transaction", "alive", "silent", "fenced", "unknown", "no heartbeat", "blocked"]

_PROCESS = re.compile(r"\bpid (\d+)\b")
_PREPARED = re.compile(r"\bprepared transaction (.+?)(?: in database .*| since .*|, user .*|)$")


@dataclass(frozen=True, slots=True)
class Remedy:
    """`advice` is a sentence for people; `command` is the command to run, empty if only the writer can act."""

    advice: str
    command: str


def remedy(
    verdict: Verdict,
    stream: str,
    writer: str,
    *,
    id: int,
    epoch: int,
    transactions: Sequence[str],
    relayed: bool,
    bridged: bool,
    cause: str = "",
) -> Remedy:
    """The advice and command that settle the open IDs of a writer, or end the wait for it.

    Args:
        verdict: the state of the writer.
        id: the highest ID that the writer has completed, signed: everything up to it may be settled.
        epoch: the epoch of the blocked IDs.
        transactions: the transactions with its open IDs, one line each, in the form of an OPEN record.
        relayed: whether a relay sends its records, so that `tidemark relay blockers` knows it.
        bridged: whether `tidemark synapse` sends the stream's records.
        cause: why its relay or bridge sends nothing new, and what to do, in the form of an OPEN record.
    """
    if verdict == "blocked":
        return Remedy(f"{cause}.", "")
    if verdict == "no heartbeat":
        program = "the bridge to Synapse" if bridged else f"the relay of {writer}" if relayed else writer
        return Remedy(f"Start {program}; the end of its log says why it ended.", "")
    blockers = f"tidemark {'synapse' if bridged else 'relay'} blockers"
    if verdict == "open transaction":
        if statement := _ending(transactions):
            return Remedy("End the transaction, by this statement in its own database:", statement)
        return Remedy("In its database, this names the transaction and how to end it:", blockers)
    if verdict == "alive":
        if relayed or bridged:
            return Remedy(
                f"{writer} is alive, so a transaction of it is open. In its database, this names the transaction:",
                blockers,
            )
        return Remedy(f"{writer} is alive and has not completed these IDs: look at its own log.", "")
    if bridged:
        return Remedy(
            f"{_WAITING[verdict].format(writer, epoch)} If it is gone for good:", _synapse_retire(stream, writer)
        )
    named = ["--epoch", str(epoch)] if verdict == "unknown" else []
    options = shlex.join([*named, f"--id={id}"])
    command = f'tidemark retire {options} --by "$USER" --why "gone for good" {shlex.join(arguments(stream, writer))}'
    return Remedy(f"{_WAITING[verdict].format(writer, epoch)} If it is gone for good:", command)


_WAITING = {
    "silent": "Start {0}, or the relay of its database.",
    "fenced": "Start {0}, in an epoch above {1}.",
    "unknown": "Let {0} join.",
}


def arguments(*words: str) -> list[str]:
    """Quote names for a shell command, so that no name is parsed as an option."""
    return [*(["--"] if any(word.startswith("-") for word in words) else []), *words]


def _synapse_retire(stream: str, writer: str) -> str:
    """The remedy for a writer of Synapse: the bridge checks in Synapse's tables that the writer is gone."""
    return f"tidemark synapse retire {shlex.join(arguments(writer, stream))}"


def _ending(transactions: Sequence[str]) -> str:
    """The statement that ends the first transaction, the oldest one; empty if its line does not identify the
    session.
    """
    if not transactions:
        return ""
    if match := _PROCESS.search(transactions[0]):
        return f"select pg_terminate_backend({match[1]})"
    if match := _PREPARED.search(transactions[0]):
        return "rollback prepared '{}'".format(match[1].replace("'", "''"))
    return ""


StreamId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]


class LagCauseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A writer that blocks the linear position below the allocated position, with a gap or without one."""

    writer: Name
    epoch: Annotated[int, Meta(ge=0)]
    reason: Annotated[
        BlockReason,
        Meta(
            description="`transaction`: the writer reported an open one; `gap`: it completed IDs above open ones;"
            " `silent`: it has sent nothing beyond `position`; `unknown`: it never joined."
        ),
    ]
    position: Annotated[StreamId | None, Meta(description="Position of the writer; null if it never joined.")]
    since: Annotated[
        datetime | None, Meta(description="Since when it blocks the linear position; null if that was not noted.")
    ]
    last_seen: Annotated[
        datetime | None, Meta(description="When the pipeline read its newest record; null if none was noted.")
    ]


class LinearLagAnswer(msgspec.Struct, frozen=True):
    """The linear position is below the allocated position. `blockers` has the ten lowest of `blocker_count` writers."""

    ids: Annotated[int, Meta(ge=0, description="How far, in IDs.")]
    since: Annotated[
        datetime | None, Meta(description="When IDs beyond it were first seen; null if that was not noted.")
    ]
    blockers: list[LagCauseAnswer]
    blocker_count: Annotated[int, Meta(ge=0)]


def lag_answer(lag: LinearLag | None) -> LinearLagAnswer | None:
    if lag is None:
        return None
    blockers = [
        LagCauseAnswer(
            writer=blocker.writer,
            epoch=blocker.epoch,
            reason=blocker.reason,
            position=None if blocker.reason == "unknown" else blocker.position,
            since=None if blocker.since is None else moment(blocker.since),
            last_seen=last_seen(blocker.seen),
        )
        for blocker in lag.blockers
    ]
    return LinearLagAnswer(lag.ids, None if lag.since is None else moment(lag.since), blockers, lag.count)


def last_seen(milliseconds: int) -> datetime | None:
    """The time of the writer's last record; None if it is not known."""
    return moment(milliseconds) if milliseconds else None


def moment(milliseconds: int) -> datetime:
    """Convert milliseconds since 1970 to a time."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


NO_POLICIES = Policies()


@dataclass(frozen=True, slots=True)
class OpenRange:
    """The IDs in `(low, top]` of `writer`, which are missing. `top` is None if the writer has sent nothing beyond
    `low`; both are None if it never joined. IDs are signed. Above the range, `waiting` IDs, `facts` of them with a
    fact, are complete and buffered. `verb`: a command or statement that settles the range, empty if only the writer
    can; `advice`: when to use it.
    """

    stream: str
    writer: str
    epoch: int
    low: int | None
    top: int | None
    since: datetime | None
    waiting: int
    facts: int
    last_seen: datetime | None
    transactions: list[str]
    verdict: Verdict
    advice: str = ""
    verb: str = ""


def read(
    stored: Mapping[str, bytes],
    now: float,
    policies: Policies = NO_POLICIES,
    begun: Collection[tuple[str, str, int]] = (),
    bridged: Collection[str] = (),
    reading: Reading | None = None,
) -> list[OpenRange]:
    """The open ranges in the encoded states at `now` (s since 1970), by stream, longest first. Omits short waits for a
    silent writer, which a transaction may cause. `begun`: (stream, writer, epoch) of epochs that an operator began; a
    silent writer in such an epoch is fenced. `bridged`: streams that `tidemark synapse` sends. `reading`: None: no
    heartbeat counts as missed."""
    open_ranges: list[OpenRange] = []
    for name, data in sorted(stored.items()):
        stream = codec.decode(data)
        ranges = [*_of_stream(name, stream, now, silence(policies, name), reading)]
        ranges += _sources(name, stream, now, reading, {open_range.writer for open_range in ranges})
        of_stream = [_fenced(span) if (name, span.writer, span.epoch) in begun else span for span in ranges]
        if name in bridged:
            of_stream = of_stream or [*_open(name, stream)]
        of_stream = [_with_remedy(span, stream, bridged=name in bridged) for span in of_stream]
        open_ranges += sorted(
            of_stream, key=lambda span: (span.since is not None, span.since, span.writer, abs(span.low or 0))
        )
    return open_ranges


def of(postgres: Postgres, stored: Mapping[str, bytes], now: float, defaults: Mapping[str, int]) -> list[OpenRange]:
    """Call `read` with the policies (on top of `defaults`), the operators' epochs and the bridges in `postgres`."""
    policies, asked = Policies(postgres.policies.given(), defaults), postgres.conditions
    return read(stored, now, policies, asked.begun(), asked.bridges(), asked.reading())


def silence(policies: Policies, stream: str) -> float:
    """Seconds without a record after which a writer of the stream is silent."""
    return policies.value(stream, "silent_seconds") or 0


def _of_stream(
    name: str, stream: StreamState, now: float, silent: float, reading: Reading | None
) -> Iterator[OpenRange]:
    holding = linear_lag(stream)
    stream.writers.open_waiting()
    for (writer, epoch), unjoined in stream.unjoined.items():
        yield _unknown(name, stream, writer, epoch, unjoined)
    owing = {writer: known for writer, known in stream.writers.open.items() if known.chain.pending}
    for writer, known in owing.items():
        yield from _gaps(name, stream, writer, known, life(stream, writer, known.seen, now, silent, reading))
    for blocker in holding.blockers if holding else ():
        if blocker.reason == "unknown" or blocker.writer in owing or is_brief(blocker.since, now):
            continue
        transactions = stream.transactions.get(blocker.writer, [])
        since, seen = None if blocker.since is None else moment(blocker.since), last_seen(blocker.seen)
        # Before the linear position was blocked, the writer was not the cause.
        since_it_waits = blocker.seen if blocker.since is None or blocker.seen > blocker.since else 0
        how = life(stream, blocker.writer, since_it_waits, now, silent, reading)
        yield OpenRange(
            name, blocker.writer, blocker.epoch, blocker.position, None, since, 0, 0, seen, transactions, how
        )


def source_of(stream: StreamState, writer: str) -> Source | None:
    """The relay or bridge that sends the writer's records, if it sends OPEN records: all its writers have the same
    start.
    """
    known = stream.writers.get(writer)
    start = None if known is None else known.start
    for source in sources(stream):
        if source.writer == writer or (start is not None and start == stream.writers[source.writer].start):
            return source
    return None


def missed(source: Source, home: int | None, now: float, reading: Reading | None) -> float | None:
    """Seconds since the last record of a source that has missed its heartbeat. None if it has not, or if that is
    unknown, because no pipeline is active or the stream's partition `home` has unread records.
    """
    if reading is None or home in reading.lagging:
        return None
    return source.overdue(now, reading.since)


def problem(source: Source, home: int | None, now: float, reading: Reading | None, *, bridged: bool = False) -> str:
    """The problem of a source as text, or empty."""
    name = "the bridge to Synapse" if bridged else f"the relay {source.writer}"
    if (seconds := missed(source, home, now, reading)) is not None:
        return f"no heartbeat from {name} for {duration(seconds)}: is it running?"
    if source.report.blocked:
        age = duration(now - source.report.since / 1000)
        return f"{name} has sent nothing new for {age}: {source.report.blocked}"
    return ""


def source_problems(
    stored: Mapping[str, bytes], now: float, reading: Reading | None, bridged: Collection[str] = ()
) -> Iterator[str]:
    """The problems of the streams' sources, one line each. Streams without reports are not decoded."""
    for name, data in sorted(stored.items()):
        if codec.decode_stored(data).reports:
            stream = codec.decode(data)
            for source in sources(stream):
                if text := problem(source, stream.home, now, reading, bridged=name in bridged):
                    yield f"{name}: {text}"


def _sources(
    name: str, stream: StreamState, now: float, reading: Reading | None, known: Collection[str]
) -> Iterator[OpenRange]:
    """Sources that send nothing although no position is blocked: their unsent facts are in no record."""
    for source in sources(stream):
        if source.writer in known or not problem(source, stream.home, now, reading):
            continue
        writer = stream.writers[source.writer]
        is_silent = missed(source, stream.home, now, reading) is not None
        yield OpenRange(
            name,
            source.writer,
            writer.epoch,
            stream.direction.signed(writer.position),
            None,
            moment(source.seen if is_silent else source.report.since),
            0,
            0,
            last_seen(source.seen),
            stream.transactions.get(source.writer, []),
            "no heartbeat" if is_silent else "blocked",
        )


def _open(name: str, stream: StreamState) -> Iterator[OpenRange]:
    """Open ranges without a pending edge above them, because a bridge sends nothing beyond them."""
    for writer, transactions in stream.transactions.items():
        if transactions and (known := stream.writers.get(writer)) is not None:
            low, seen = stream.direction.signed(known.position), last_seen(known.seen)
            yield OpenRange(name, writer, known.epoch, low, None, None, 0, 0, seen, transactions, "open transaction")


def _with_remedy(span: OpenRange, stream: StreamState, *, bridged: bool) -> OpenRange:
    known = stream.writers.get(span.writer) if span.low is not None else None
    if known is not None:
        id = stream.direction.signed(known.chain.reach) if span.top is not None else span.low
    else:
        id = stream.direction.signed(max(stream.unjoined[span.writer, span.epoch].chain.reach, 0))
    proposed = remedy(
        span.verdict,
        span.stream,
        span.writer,
        id=id or 0,
        epoch=span.epoch,
        transactions=span.transactions,
        relayed=known is not None and known.start is not None,
        bridged=bridged,
        cause="" if (source := source_of(stream, span.writer)) is None else source.report.blocked,
    )
    return replace(span, advice=proposed.advice, verb=proposed.command)


def _fenced(span: OpenRange) -> OpenRange:
    return replace(span, verdict="fenced") if span.verdict == "silent" else span


def _gaps(name: str, stream: StreamState, writer: str, known: WriterState, how: Verdict) -> Iterator[OpenRange]:
    signed, transactions = stream.direction.signed, stream.transactions.get(writer, [])
    seen = last_seen(known.seen)
    waiting = known.chain.waiting
    facts = sum(span.evidence.facts for span in known.chain.pending)
    for (low, top, since), span in zip(known.chain.gaps(), known.chain.pending, strict=True):
        yield OpenRange(
            name,
            writer,
            known.epoch,
            signed(low),
            signed(top),
            moment(since),
            waiting,
            facts,
            seen,
            transactions,
            how,
        )
        waiting, facts = waiting - span.edges, facts - span.evidence.facts


def _unknown(name: str, stream: StreamState, writer: str, epoch: int, unjoined: UnjoinedWriter) -> OpenRange:
    chain = unjoined.chain
    waiting = chain.waiting
    facts = sum(span.evidence.facts for span in chain.pending)
    since, seen = moment(unjoined.since), last_seen(unjoined.seen)
    return OpenRange(name, writer, epoch, None, None, since, waiting, facts, seen, [], "unknown")


def life(
    stream: StreamState, writer: str, seen: int, now: float, silent: float, reading: Reading | None = None
) -> Verdict:
    """The verdict on a writer that joined. `seen`: time (ms) of its last record; 0 if unknown."""
    transactions = stream.transactions.get(writer, [])
    source = source_of(stream, writer)
    if source is None:
        return verdict(last_seen(seen), transactions, now, silent)
    if missed(source, stream.home, now, reading) is not None:
        return "no heartbeat"
    if source.report.blocked:
        return "blocked"
    if source.report.heartbeat:
        seen = max(seen, source.seen)
    return verdict(last_seen(seen), transactions, now, max(silent, source.patience))


def verdict(seen: datetime | None, transactions: Sequence[str], now: float, silent: float) -> Verdict:
    """The verdict on a writer that joined, at `now` (s since 1970), from its last record and its reported transactions.
    A writer without a record for `silent` seconds is silent.
    """
    if transactions:
        return "open transaction"
    return "alive" if seen is not None and now - seen.timestamp() < silent else "silent"
