"""The open ranges that block positions, with their causes and remedies, for the commands and the live page.

Only `read_open_ranges` queries a server. `lag_answer` converts the linear lag for the JSON of `tidemark status` and of
the sidecar.
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
from tidemark.sinks.postgres.status import ReadStatus
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import BlockReason, LinearLag, Source, is_brief, linear_lag, sources
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writers import UnjoinedWriter, WriterState
from tidemark.streaming.values.limits import Policies

Verdict = Literal["open transaction", "alive", "silent", "fenced", "unknown", "no heartbeat", "blocked"]

_PROCESS_PATTERN = re.compile(r"\bpid (\d+)\b")
_PREPARED_PATTERN = re.compile(r"\bprepared transaction (.+?)(?: in database .*| since .*|, user .*|)$")


@dataclass(frozen=True, slots=True)
class Remedy:
    """What a person can do. `advice`: text, which ends with a colon if there is a command. `command`: the shell command
    or SQL statement to run; empty if there is none."""

    advice: str
    command: str


def choose_remedy(
    verdict: Verdict,
    stream: str,
    writer: str,
    *,
    id: int,
    epoch: int,
    transactions: Sequence[str],
    is_relayed: bool,
    is_bridged: bool,
    cause: str = "",
) -> Remedy:
    """Choose the remedy for a writer that blocks a position.

    Args:
        verdict: the state of the writer.
        stream: the name of the stream.
        writer: the name of the writer.
        id: the highest ID that the writer has completed, signed. The remedy may settle all IDs up to this ID.
        epoch: the epoch of the open IDs.
        transactions: the reported transactions with open IDs of the writer, as text; the oldest first.
        is_relayed: whether a relay sends the writer's records, so that `tidemark relay blockers` lists the writer.
        is_bridged: whether `tidemark synapse` sends the stream's records.
        cause: for "blocked", why the relay or bridge sends nothing new, and what to do, as in an OPEN record.
    """
    if verdict == "blocked":
        return Remedy(f"{cause}.", "")
    if verdict == "no heartbeat":
        program = "the bridge to Synapse" if is_bridged else f"the relay of {writer}" if is_relayed else writer
        return Remedy(f"Start {program} if it does not run; the end of its log shows the cause.", "")
    blockers = f"tidemark {'synapse' if is_bridged else 'relay'} blockers"
    if verdict == "open transaction":
        if statement := _terminate_statement(transactions):
            return Remedy("End the transaction with this statement in its own database:", statement)
        return Remedy(
            f"A transaction is open in the database of {writer}. To see the transaction and how to end it, run this"
            " command against that database:",
            blockers,
        )
    if verdict == "alive":
        if is_relayed or is_bridged:
            return Remedy(
                f"{writer} is alive: a transaction is open, or was rolled back a moment ago. To see open transactions,"
                " run this command against its database:",
                blockers,
            )
        return Remedy(f"{writer} is alive and has not completed these IDs: see its log.", "")
    advice = f"{_START_ADVICE[verdict].format(writer, epoch)} If it is gone for good:"
    if is_bridged:
        return Remedy(advice, _synapse_retire(stream, writer))
    epoch_option = ["--epoch", str(epoch)] if verdict == "unknown" else []
    options = shlex.join([*epoch_option, f"--id={id}"])
    names = shlex.join(shell_arguments(stream, writer))
    return Remedy(advice, f'tidemark retire {options} --by "$USER" --why "gone for good" {names}')


_START_ADVICE = {
    "silent": "Start {0}, or the relay of its database.",
    "fenced": "Start {0}, in an epoch above {1}.",
    "unknown": "Let {0} join.",
}


def shell_arguments(*words: str) -> list[str]:
    """The words, with `--` before them if a word could be parsed as an option."""
    return [*(["--"] if any(word.startswith("-") for word in words) else []), *words]


def _synapse_retire(stream: str, writer: str) -> str:
    """The command that retires a writer of Synapse. The command checks in Synapse's tables that the writer is gone."""
    return f"tidemark synapse retire {shlex.join(shell_arguments(writer, stream))}"


def _terminate_statement(transactions: Sequence[str]) -> str:
    """The SQL statement that ends the first of `transactions`, which is the oldest. Empty if the line of this
    transaction names neither a process nor a prepared transaction."""
    if not transactions:
        return ""
    if match := _PROCESS_PATTERN.search(transactions[0]):
        return f"select pg_terminate_backend({match[1]})"
    if match := _PREPARED_PATTERN.search(transactions[0]):
        return "rollback prepared '{}'".format(match[1].replace("'", "''"))
    return ""


StreamId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]


class LagCauseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A writer that blocks the linear position, with or without a gap."""

    writer: Name
    epoch: Annotated[int, Meta(ge=0)]
    reason: Annotated[
        BlockReason,
        Meta(
            description="`transaction`: the writer reported an open transaction. `gap`: it completed IDs above open"
            " IDs. `silent`: it has sent nothing beyond `position`. `unknown`: it never joined."
        ),
    ]
    position: Annotated[StreamId | None, Meta(description="The position of the writer; null if it never joined.")]
    since: Annotated[
        datetime | None, Meta(description="Since when the writer has blocked the linear position; null if not known.")
    ]
    last_seen: Annotated[
        datetime | None, Meta(description="When the pipeline read the writer's newest record; null if not known.")
    ]


class LinearLagAnswer(msgspec.Struct, frozen=True):
    """How far the linear position is below the highest allocated ID. `blockers`: up to ten of the `blocker_count`
    writers that block the linear position: first the writers that never joined, then the writers with the lowest
    positions."""

    ids: Annotated[
        int,
        Meta(ge=0, description="The distance in IDs; 0 if only writers that never joined block the linear position."),
    ]
    since: Annotated[
        datetime | None,
        Meta(description="Since when there have been IDs beyond the linear position; null if not known."),
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
            last_seen=last_seen(blocker.last_seen),
        )
        for blocker in lag.blockers
    ]
    return LinearLagAnswer(lag.id_count, None if lag.since is None else moment(lag.since), blockers, lag.blocker_count)


def last_seen(milliseconds: int) -> datetime | None:
    """The time of a writer's newest record, from milliseconds since 1970; None for 0, which means unknown."""
    return moment(milliseconds) if milliseconds else None


def moment(milliseconds: int) -> datetime:
    """Convert milliseconds since 1970 to a time."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


NO_POLICIES = Policies()


@dataclass(frozen=True, slots=True)
class OpenRange:
    """The IDs in `(low, top]` of `writer`, which are not complete. IDs are signed.

    Attributes:
        low: the lower end of the gap, or the position of a writer without a gap; None if the writer never joined.
        top: the upper end of the gap; None if there is no gap: all IDs beyond `low` may be open.
        since: since when the range has been open; None if not known.
        waiting: the number of complete IDs of the writer above the range.
        facts: how many of these complete IDs have a fact.
        last_seen: when the pipeline read the writer's newest record; None if not known.
        transactions: the reported transactions with open IDs of the writer.
        verdict: the state of the writer.
        advice: what to do (`Remedy.advice`).
        verb: the shell command or SQL statement to run (`Remedy.command`).
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


def find_open_ranges(
    encoded_states: Mapping[str, bytes],
    now: float,
    policies: Policies = NO_POLICIES,
    operator_epochs: Collection[tuple[str, str, int]] = (),
    bridged_streams: Collection[str] = (),
    read_status: ReadStatus | None = None,
) -> list[OpenRange]:
    """Find the open ranges, sorted by stream and then by age: ranges of unknown age first, then the oldest.

    Leaves out a writer without a gap that has blocked the linear position for less than `BRIEF_WAIT_SECONDS`, because a
    transaction of usual length may be the cause.

    Args:
        encoded_states: the encoded states, by stream.
        now: seconds since 1970.
        policies: the policies of the streams.
        operator_epochs: the epochs that an operator began, as (stream, writer, epoch). A silent writer in one of them
            is fenced.
        bridged_streams: the streams that `tidemark synapse` sends.
        read_status: the partitions that the pipeline reads with lag. If None, missed heartbeats are not detected.

    Raises:
        StateTooNew: a newer Tidemark has encoded a state.
    """
    open_ranges: list[OpenRange] = []
    for name, data in sorted(encoded_states.items()):
        stream = codec.decode(data)
        ranges = [*_stream_ranges(name, stream, now, silent_after_seconds(policies, name), read_status)]
        ranges += _source_ranges(name, stream, now, read_status, {open_range.writer for open_range in ranges})
        of_stream = [
            _as_fenced(open_range) if (name, open_range.writer, open_range.epoch) in operator_epochs else open_range
            for open_range in ranges
        ]
        if name in bridged_streams:
            of_stream = of_stream or [*_transaction_ranges(name, stream)]
        of_stream = [_with_remedy(open_range, stream, is_bridged=name in bridged_streams) for open_range in of_stream]
        open_ranges += sorted(
            of_stream,
            key=lambda open_range: (
                open_range.since is not None,
                open_range.since,
                open_range.writer,
                abs(open_range.low or 0),
            ),
        )
    return open_ranges


def read_open_ranges(
    postgres: Postgres, encoded_states: Mapping[str, bytes], now: float, defaults: Mapping[str, int]
) -> list[OpenRange]:
    """Call `find_open_ranges` with the policies, the epochs that operators began, the bridges and the lagging
    partitions in Postgres.

    Args:
        postgres: Tidemark's database.
        encoded_states: the encoded states, by stream.
        now: seconds since 1970.
        defaults: the settings of streams without a policy.
    """
    policies, conditions = Policies(postgres.policies.read(), defaults), postgres.conditions
    return find_open_ranges(
        encoded_states,
        now,
        policies,
        conditions.epochs_begun_by_operators(),
        conditions.bridges(),
        conditions.reading_status(),
    )


def silent_after_seconds(policies: Policies, stream: str) -> float:
    """After how many seconds without a record a writer of the stream counts as silent; 0: always."""
    return policies.value(stream, "silent_seconds") or 0


def _stream_ranges(
    name: str, stream: StreamState, now: float, silent_seconds: float, read_status: ReadStatus | None
) -> Iterator[OpenRange]:
    lag = linear_lag(stream)
    stream.writers.decode_waiting()
    for (writer, epoch), unjoined in stream.unjoined.items():
        yield _unjoined_range(name, stream, writer, epoch, unjoined)
    with_gaps = {writer: known for writer, known in stream.writers.decoded.items() if known.chain.pending}
    for writer, known in with_gaps.items():
        yield from _gap_ranges(
            name,
            stream,
            writer,
            known,
            writer_verdict(stream, writer, known.last_seen, now, silent_seconds, read_status),
        )
    for blocker in lag.blockers if lag else ():
        if blocker.reason == "unknown" or blocker.writer in with_gaps or is_brief(blocker.since, now):
            continue
        transactions = stream.transactions.get(blocker.writer, [])
        since, seen = None if blocker.since is None else moment(blocker.since), last_seen(blocker.last_seen)
        # A record from before the linear position was blocked does not show that the writer is alive.
        seen_since_blocked = blocker.last_seen if blocker.since is None or blocker.last_seen > blocker.since else 0
        verdict = writer_verdict(stream, blocker.writer, seen_since_blocked, now, silent_seconds, read_status)
        yield OpenRange(
            name, blocker.writer, blocker.epoch, blocker.position, None, since, 0, 0, seen, transactions, verdict
        )


def source_of(stream: StreamState, writer: str) -> Source | None:
    """The relay or bridge that sends the writer's records; None if no source with OPEN records is known to send them.
    All JOIN records of one relay have the same start token."""
    known = stream.writers.get(writer)
    start = None if known is None else known.start_token
    for source in sources(stream):
        if source.writer == writer or (start is not None and start == stream.writers[source.writer].start_token):
            return source
    return None


def missed_heartbeat_seconds(
    source: Source, home_partition: int | None, now: float, read_status: ReadStatus | None
) -> float | None:
    """Seconds since the newest record of a source, if the source has missed its heartbeat; otherwise None.

    Also None if this is not known: `read_status` is None, or the pipeline reads the partition `home_partition` with
    lag.

    Args:
        source: the relay or bridge.
        home_partition: the partition of the stream.
        now: seconds since 1970.
        read_status: the partitions that the pipeline reads with lag; None if not known (`reading_status`).
    """
    if read_status is None or home_partition in read_status.lagging_partitions:
        return None
    return source.overdue_seconds(now, read_status.since)


def source_problem(
    source: Source, home_partition: int | None, now: float, read_status: ReadStatus | None, *, is_bridged: bool = False
) -> str:
    """A message if a source has missed its heartbeat or is blocked, else an empty text. Arguments as for
    `missed_heartbeat_seconds`; `is_bridged`: whether the source is the bridge to Synapse.
    """
    name = "the bridge to Synapse" if is_bridged else f"the relay {source.writer}"
    if (seconds := missed_heartbeat_seconds(source, home_partition, now, read_status)) is not None:
        return f"no heartbeat from {name} for {duration(seconds)}: is it running?"
    if source.report.blocked:
        age = duration(now - source.report.since / 1000)
        return f"{name} has sent nothing new for {age}: {source.report.blocked}"
    return ""


def source_problems(
    encoded_states: Mapping[str, bytes],
    now: float,
    read_status: ReadStatus | None,
    bridged_streams: Collection[str] = (),
) -> Iterator[str]:
    """Yield a message for each source that has missed its heartbeat or is blocked, by stream. Decodes only the states
    of streams with OPEN records.

    Args:
        encoded_states: the encoded states, by stream.
        now: seconds since 1970.
        read_status: the partitions that the pipeline reads with lag; None if not known.
        bridged_streams: the streams that `tidemark synapse` sends.
    """
    for name, data in sorted(encoded_states.items()):
        if codec.decode_stored(data).reports:
            stream = codec.decode(data)
            for source in sources(stream):
                if text := source_problem(
                    source, stream.home_partition, now, read_status, is_bridged=name in bridged_streams
                ):
                    yield f"{name}: {text}"


def _source_ranges(
    name: str, stream: StreamState, now: float, read_status: ReadStatus | None, writers_with_range: Collection[str]
) -> Iterator[OpenRange]:
    """Yield an open range for each source that has missed its heartbeat or is blocked, because the source may
    have unsent facts. Leaves out the sources in `writers_with_range`, which have an open range already."""
    for source in sources(stream):
        if source.writer in writers_with_range or not source_problem(source, stream.home_partition, now, read_status):
            continue
        writer = stream.writers[source.writer]
        is_silent = missed_heartbeat_seconds(source, stream.home_partition, now, read_status) is not None
        yield OpenRange(
            name,
            source.writer,
            writer.epoch,
            stream.direction.signed(writer.position),
            None,
            moment(source.last_seen if is_silent else source.report.since),
            0,
            0,
            last_seen(source.last_seen),
            stream.transactions.get(source.writer, []),
            "no heartbeat" if is_silent else "blocked",
        )


def _transaction_ranges(name: str, stream: StreamState) -> Iterator[OpenRange]:
    """Yield an open range for each writer that has reported an open transaction. For streams of a bridge only: a bridge
    sends nothing beyond an open ID, so its writers have no gaps."""
    for writer, transactions in stream.transactions.items():
        if transactions and (known := stream.writers.get(writer)) is not None:
            low, seen = stream.direction.signed(known.position), last_seen(known.last_seen)
            yield OpenRange(name, writer, known.epoch, low, None, None, 0, 0, seen, transactions, "open transaction")


def _with_remedy(open_range: OpenRange, stream: StreamState, *, is_bridged: bool) -> OpenRange:
    known = stream.writers.get(open_range.writer) if open_range.low is not None else None
    if known is not None:
        id = stream.direction.signed(known.chain.highest_settled) if open_range.top is not None else open_range.low
    else:
        id = stream.direction.signed(max(stream.unjoined[open_range.writer, open_range.epoch].chain.highest_settled, 0))
    proposed = choose_remedy(
        open_range.verdict,
        open_range.stream,
        open_range.writer,
        id=id or 0,
        epoch=open_range.epoch,
        transactions=open_range.transactions,
        is_relayed=known is not None and known.start_token is not None,
        is_bridged=is_bridged,
        cause="" if (source := source_of(stream, open_range.writer)) is None else source.report.blocked,
    )
    return replace(open_range, advice=proposed.advice, verb=proposed.command)


def _as_fenced(open_range: OpenRange) -> OpenRange:
    return replace(open_range, verdict="fenced") if open_range.verdict == "silent" else open_range


def _gap_ranges(
    name: str, stream: StreamState, writer: str, writer_state: WriterState, verdict: Verdict
) -> Iterator[OpenRange]:
    signed, transactions = stream.direction.signed, stream.transactions.get(writer, [])
    seen = last_seen(writer_state.last_seen)
    waiting = writer_state.chain.pending_edges
    facts = sum(span.evidence.facts for span in writer_state.chain.pending)
    for (low, top, since), span in zip(writer_state.chain.gaps(), writer_state.chain.pending, strict=True):
        yield OpenRange(
            name,
            writer,
            writer_state.epoch,
            signed(low),
            signed(top),
            moment(since),
            waiting,
            facts,
            seen,
            transactions,
            verdict,
        )
        waiting, facts = waiting - span.edge_count, facts - span.evidence.facts


def _unjoined_range(name: str, stream: StreamState, writer: str, epoch: int, unjoined: UnjoinedWriter) -> OpenRange:
    chain = unjoined.chain
    waiting = chain.pending_edges
    facts = sum(span.evidence.facts for span in chain.pending)
    since, seen = moment(unjoined.since), last_seen(unjoined.last_seen)
    return OpenRange(name, writer, epoch, None, None, since, waiting, facts, seen, [], "unknown")


def writer_verdict(
    stream: StreamState,
    writer: str,
    seen_ms: int,
    now: float,
    silent_seconds: float,
    read_status: ReadStatus | None = None,
) -> Verdict:
    """The state of a writer that joined.

    Args:
        stream: the state of the stream.
        writer: the name of the writer.
        seen_ms: when the writer's newest record was read (milliseconds since 1970); 0 if unknown.
        now: seconds since 1970.
        silent_seconds: after how many seconds without a record a writer counts as silent.
        read_status: the partitions that the pipeline reads with lag. If None, missed heartbeats are not detected.
    """
    transactions = stream.transactions.get(writer, [])
    source = source_of(stream, writer)
    if source is None:
        return verdict_from_records(last_seen(seen_ms), transactions, now, silent_seconds)
    if missed_heartbeat_seconds(source, stream.home_partition, now, read_status) is not None:
        return "no heartbeat"
    if source.report.blocked:
        return "blocked"
    if source.report.heartbeat:
        seen_ms = max(seen_ms, source.last_seen)
    longest_silence = max(silent_seconds, source.heartbeat_timeout_seconds)
    return verdict_from_records(last_seen(seen_ms), transactions, now, longest_silence)


def verdict_from_records(
    last_seen_at: datetime | None, transactions: Sequence[str], now: float, silent_seconds: float
) -> Verdict:
    """The state of a writer that joined: `open transaction`, `alive` or `silent`. Does not depend on heartbeats of a
    relay.

    Args:
        last_seen_at: when the writer's newest record was read; None if unknown.
        transactions: the reported transactions with open IDs of the writer.
        now: seconds since 1970.
        silent_seconds: after how many seconds without a record a writer counts as silent.
    """
    if transactions:
        return "open transaction"
    return "alive" if last_seen_at is not None and now - last_seen_at.timestamp() < silent_seconds else "silent"
