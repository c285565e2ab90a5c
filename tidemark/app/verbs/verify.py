"""`tidemark verify`: compare every replica of the positions with Postgres, and the tables of Postgres with each other.

A replica is Redis or a sidecar. Streams move during the comparison, so Postgres is read before and after the replica.
Within `patience` seconds, the replica must reach the positions that Postgres had before. The replica must never be
beyond the positions that Postgres has afterwards (docs/design.md, rule 4).
"""

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import click

from tidemark.app.commands import Amount, Utf8Command, load_settings
from tidemark.app.output import count, echo, json_text, one_line, progress, shows_progress
from tidemark.app.serving.tls_listener import client_tls_context
from tidemark.common.errors import BadSetting, BadToken, TidemarkError, Unavailable
from tidemark.sinks.postgres.status import Audit, AuditedStream, HistoryFault
from tidemark.sinks.reader import Token
from tidemark.sinks.redis.publish import Redis, RedisConfig, RedisPositions
from tidemark.streaming.core import codec
from tidemark.streaming.values.direction import is_beyond

PAGE_SIZE = 1000  # streams in one answer of a sidecar
SIDECAR_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaPositions:
    """The positions of a stream in a replica. None: the replica has no such value.

    Attributes:
        linear: the linear position.
        positions: writer -> position.
        allocated: the highest allocated ID.
        last_late_number: the number of the newest late completion.
        has_all_writers: whether `positions` has all writers. If False, a writer that is not in `positions` is at or
            below the linear position.
        is_in_stream_names: whether the replica's set of stream names has the stream.
        problem: why the replica's data of the stream cannot be read.
    """

    linear: int | None
    positions: Mapping[str, int] = field(default_factory=dict)
    allocated: int | None = None
    last_late_number: int | None = None
    has_all_writers: bool = True
    is_in_stream_names: bool = True
    problem: str | None = None


class Replica(Protocol):
    """A replica of the positions. All methods query the replica, and raise `TidemarkError` if the replica does not
    answer or refuses the request."""

    @property
    def name(self) -> str:
        """The name of the replica in the output."""

    def names(self) -> set[str]:
        """Read the names of all streams in the replica. A replica that shares its list of names with another replica
        returns an empty set, so that the list is read once."""

    def read(self, streams: Sequence[str]) -> dict[str, ReplicaPositions]:
        """Read the positions of these streams: stream -> positions, also for streams that the replica does not have.
        `streams` must be sorted, and must not be empty."""


class RedisKeys:
    """The positions in Redis that are not tokens: one value for each writer and stream."""

    name = "redis"

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def names(self) -> set[str]:
        return self._redis.names()

    def read(self, streams: Sequence[str]) -> dict[str, ReplicaPositions]:
        return _read_redis(
            self._redis,
            streams,
            lambda row: ReplicaPositions(
                row.linear,
                row.positions,
                row.allocated,
                row.last_late_number,
                is_in_stream_names=row.is_in_stream_names,
            ),
        )


class RedisTokens:
    """The tokens in Redis: one text with all positions of a stream. `names` is empty: `RedisKeys` has the names."""

    name = "redis's token"

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def names(self) -> set[str]:
        return set()

    def read(self, streams: Sequence[str]) -> dict[str, ReplicaPositions]:
        return _read_redis(self._redis, streams, lambda row: _parse_token(row.token))


def _read_redis(
    redis: Redis, streams: Sequence[str], convert: Callable[[RedisPositions], ReplicaPositions]
) -> dict[str, ReplicaPositions]:
    positions = {stream: convert(row) for stream, row in redis.snapshots(streams).items()}
    return positions | {
        stream: ReplicaPositions(None, problem=redis.faults[stream]) for stream in streams if stream not in positions
    }


def _parse_token(text: str | None) -> ReplicaPositions:
    if text is None:
        return ReplicaPositions(None)
    try:
        token = Token.parse(text)
    except BadToken as problem:
        return ReplicaPositions(None, problem=str(problem))
    return ReplicaPositions(token.linear, dict(token.positions), has_all_writers=False)


class Sidecar:
    """The replica in a sidecar.

    Args:
        url: the URL of the sidecar, such as `http://host:9480`.
        token_file: a file whose first non-empty line is the bearer token; None: send no token.
        tls_context: checks the certificate of the sidecar; None: the default context of `urlopen`.

    Raises:
        BadSetting: `url` is not such a URL, or `token_file` cannot be read.
    """

    def __init__(self, url: str, token_file: Path | None, tls_context: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadSetting("--sidecar", f"{url!r} is not a URL such as http://host:9480")
        self.name = f"sidecar {url}"
        self._url = url.rstrip("/")
        self._headers = {} if token_file is None else {"Authorization": f"Bearer {_read_token(token_file)}"}
        self._tls_context = tls_context

    def names(self) -> set[str]:
        return {row["stream"] for row in self._pages("", None)}

    def read(self, streams: Sequence[str]) -> dict[str, ReplicaPositions]:
        positions = dict.fromkeys(streams, ReplicaPositions(None))
        # A page begins after a name. The first stream's name without its last character sorts before that stream.
        for row in self._pages(streams[0][:-1], streams[-1]):
            if row["stream"] in positions:
                positions[row["stream"]] = ReplicaPositions(row["linear"], row["vector"])
        return positions

    def _pages(self, after: str | None, last_name: str | None) -> list[dict[str, Any]]:
        """Read the streams with names beyond `after` page by page; with `last_name`, at least up to this name."""
        rows: list[dict[str, Any]] = []
        while after is not None and (last_name is None or after < last_name):
            page = self._get_json(f"/v1/streams?limit={PAGE_SIZE}&after={quote(after, safe='')}")
            rows += page["streams"]
            after = page["next"]
        return rows

    def _get_json(self, path: str) -> Any:
        request = Request(self._url + path, headers=self._headers)
        try:
            with urlopen(request, timeout=SIDECAR_TIMEOUT_SECONDS, context=self._tls_context) as answer:
                return json.load(answer)
        except HTTPError as problem:
            hint = "; set TIDEMARK_SIDECAR_TOKENS_FILE to a file with a token of the sidecar"
            text = f"{problem.code} {problem.reason}{hint if problem.code == 401 else ''}"
            raise Unavailable("the sidecar", self._url, text) from None
        except (OSError, HTTPException, ValueError) as problem:
            raise Unavailable("the sidecar", self._url, str(problem)) from None


def _read_token(file: Path) -> str:
    try:
        return next((line.strip() for line in file.read_text().splitlines() if line.strip()), "")
    except OSError as problem:
        raise BadSetting("TIDEMARK_SIDECAR_TOKENS_FILE", f"cannot read {file}: {problem.strerror}") from None


CHUNK_SIZE = 500  # streams that are compared together
MAX_HISTORY_FAULTS = 1000  # in the result
ADVANCES_PER_PART = 500_000  # of the history: 2 million advances take 5 s in one part, and 7 s in four or ten
MAX_HISTORY_PARTS = 10
MAX_SHOWN = 20  # differences of one kind in the text; the JSON has all
POLL_SECONDS = 0.2  # between two reads of a replica that is behind

Verdict = Literal["behind", "ahead", "differs", "unknown stream", "fault", "away"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between a replica, or the encoded state of a stream, and the tables of Postgres.

    Attributes:
        copy: the name of the replica; `the query's state` for the encoded state.
        stream: the name of the stream; empty if the replica does not answer.
        writer: the name of the writer; None if the value belongs to the stream.
        what: the name of the compared value, such as `linear` or `position`; empty if no value was compared.
        found: the value in the replica, or the error text; None if the replica has no value.
        postgres: the value in Postgres; None if Postgres has no value.
        verdict: `behind`: the replica is below Postgres for longer than `patience`; `ahead`: the replica is beyond
            Postgres; `unknown stream`: only the replica has the stream; `fault`: the data cannot be read; `away`: the
            query of the replica failed; `differs`: rows and encoded state differ.
    """

    copy: str
    stream: str
    writer: str | None
    what: str
    found: int | str | None
    postgres: int | str | None
    verdict: Verdict


@dataclass(slots=True)
class VerifyReport:
    """The result of a comparison.

    Attributes:
        streams: the number of streams in Postgres.
        copies: the names of the replicas.
        advances: the number of stored advances; None if the history was not checked.
        differences: the differences of the replicas and of the encoded states.
        history: the faults of the history, at most `MAX_HISTORY_FAULTS`; empty if the history was not checked.
    """

    streams: int = 0
    copies: list[str] = field(default_factory=list)
    advances: int | None = None
    differences: list[Difference] = field(default_factory=list)
    history: list[HistoryFault] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether neither a difference nor a fault of the history was found."""
        return not self.differences and not self.history


def compare_replicas(
    audit: Audit, replicas: Sequence[Replica], patience: float, clock: Callable[[], float] = time.monotonic
) -> VerifyReport:
    """Compare all streams of all replicas, and the encoded states, with the tables of Postgres. Shows the progress.

    A replica whose query fails is reported as a difference, and not queried again.

    Args:
        audit: reads Postgres. Errors of Postgres are raised.
        replicas: the replicas.
        patience: seconds in which a replica must reach the positions in Postgres, for each `CHUNK_SIZE` streams.
        clock: returns a monotonic time in seconds.
    """
    report = VerifyReport(copies=[replica.name for replica in replicas])
    names = audit.names()
    report.streams = len(names)
    reachable = [*replicas]
    with progress("comparing", len(names), "stream") as advance:
        for start in range(0, len(names), CHUNK_SIZE):
            part = names[start : start + CHUNK_SIZE]
            before = audit.streams(part)
            for stream, rows in before.items():
                report.differences += state_differences(audit, stream, rows)
            for replica in [*reachable]:
                try:
                    report.differences += _replica_differences(audit, replica, before, clock() + patience, clock)
                except TidemarkError as problem:
                    reachable.remove(replica)
                    report.differences.append(_no_answer_difference(replica, problem))
            advance(len(part))
    for replica in reachable:
        try:
            replica_names = replica.names()
        except TidemarkError as problem:
            report.differences.append(_no_answer_difference(replica, problem))
            continue
        if unknown := replica_names.difference(names):
            unknown = unknown.difference(audit.names())
        report.differences += [
            Difference(replica.name, stream, None, "", None, None, "unknown stream") for stream in sorted(unknown)
        ]
    return report


def _no_answer_difference(replica: Replica, problem: TidemarkError) -> Difference:
    return Difference(replica.name, "", None, "", one_line(problem), None, "away")


def _replica_differences(
    audit: Audit, replica: Replica, before: Mapping[str, AuditedStream], deadline: float, clock: Callable[[], float]
) -> list[Difference]:
    """Compare the streams `before` with the replica. Streams that are behind are read again until `deadline`, a time of
    `clock`."""
    pending, differences = sorted(before), []
    while pending:
        in_replica = replica.read(pending)
        ahead = [
            stream for stream in pending if any(_values_ahead(replica.name, stream, before[stream], in_replica[stream]))
        ]
        after = audit.streams(ahead) if ahead else {}
        wrong = {stream: [*_values_ahead(replica.name, stream, after[stream], in_replica[stream])] for stream in after}
        behind = {
            stream: [*_values_behind(replica.name, stream, before[stream], in_replica[stream])] for stream in pending
        }
        timed_out = clock() >= deadline
        differences += [
            difference
            for stream in pending
            if timed_out or not behind[stream]
            for difference in [*wrong.get(stream, ()), *behind[stream]]
        ]
        pending = [] if timed_out else [stream for stream in pending if behind[stream]]
        if pending:
            time.sleep(POLL_SECONDS)
    return differences


def _values_ahead(copy: str, stream: str, rows: AuditedStream, in_replica: ReplicaPositions) -> Iterator[Difference]:
    """The values in the replica that are beyond those in Postgres, and the writers that Postgres does not have."""
    for name, copied, stored in _compared_values(rows, in_replica):
        if copied is not None and is_beyond(copied, stored):
            yield Difference(copy, stream, None, name, copied, stored, "ahead")
    for writer, copied in in_replica.positions.items():
        known = rows.writers.get(writer)
        if known is None or is_beyond(copied, known.position):
            yield Difference(
                copy, stream, writer, "position", copied, None if known is None else known.position, "ahead"
            )


def _values_behind(copy: str, stream: str, rows: AuditedStream, in_replica: ReplicaPositions) -> Iterator[Difference]:
    """The values in the replica that are below those in Postgres, and the positions that the replica lacks. If the
    replica's data cannot be read, only this problem."""
    if in_replica.problem is not None:
        yield Difference(copy, stream, None, "", in_replica.problem, None, "fault")
        return
    if not in_replica.is_in_stream_names:
        yield Difference(copy, stream, None, "name", None, stream, "behind")
    for name, copied, stored in _compared_values(rows, in_replica):
        if (copied is None and name == "linear") or (copied is not None and is_beyond(stored, copied)):
            yield Difference(copy, stream, None, name, copied, stored, "behind")
    for writer, stored in rows.positions.items():
        at = in_replica.positions.get(writer, None if in_replica.has_all_writers else in_replica.linear)
        if at is None or is_beyond(stored, at):
            yield Difference(copy, stream, writer, "position", at, stored, "behind")


def _compared_values(rows: AuditedStream, in_replica: ReplicaPositions) -> list[tuple[str, int | None, int]]:
    """The compared values of a stream itself, each as (name, value in the replica, value in Postgres)."""
    return [
        ("linear", in_replica.linear, rows.linear),
        ("allocated", in_replica.allocated, rows.allocated),
        ("late completions", in_replica.last_late_number, rows.late),
    ]


STATE = "the query's state"  # `Difference.copy` for the encoded states
GAP = "open gap"  # `Difference.what` for a gap


def state_differences(audit: Audit, stream: str, rows: AuditedStream) -> Iterator[Difference]:
    """Compare a stream's rows in Postgres with its encoded state in Postgres. One transaction writes rows and state.

    Three values of the rows may be beyond the state: position and epoch of a writer that returns after its state was
    removed, and the allocated ID after a restore. The other values must be equal.
    """

    def differs(writer: str | None, name: str, decoded: int | str | None, stored: int | str | None) -> Difference:
        return Difference(STATE, stream, writer, name, decoded, stored, "differs")

    stored = codec.decode(rows.state)
    stored.writers.decode_waiting()
    signed = stored.direction.signed
    if signed(stored.linear.position) != rows.linear:
        yield differs(None, "linear", signed(stored.linear.position), rows.linear)
    if stored.allocated > abs(rows.allocated):
        yield differs(None, "allocated", signed(stored.allocated), rows.allocated)
    gaps: set[tuple[str, int]] = set()
    for name, known in stored.writers.items():
        gaps |= {(name, signed(top)) for _, top, _ in known.chain.gaps()}
        row, position = rows.writers.get(name), signed(known.position)
        if row is None:
            yield differs(name, "position", position, None)
            continue
        if position != row.position and not (
            is_beyond(row.position, position) and audit.end_of_history(stream, name, position) == row.position
        ):
            yield differs(name, "position", position, row.position)
        if known.epoch > row.epoch:
            yield differs(name, "epoch", known.epoch, row.epoch)
        elif known.epoch == row.epoch and (known.retired_at is not None) != row.retired:
            yield differs(
                name,
                "status",
                *("retired" if is_retired else "active" for is_retired in (known.retired_at is not None, row.retired)),
            )
    yield from (
        differs(name, "position", None, at) for name, at in rows.positions.items() if name not in stored.writers
    )
    yield from (differs(name, GAP, top, None) for name, top in sorted(gaps - rows.gaps))
    yield from (differs(name, GAP, None, top) for name, top in sorted(rows.gaps - gaps))


def add_history(audit: Audit, report: VerifyReport) -> None:
    """Check the whole history, and set `advances` and `history` of the report.

    If a progress bar is shown, a long history is checked in parts, so that the bar can move. The check then takes
    longer, because Postgres reads the history once for each part.
    """
    report.advances = audit.count_advances()
    parts = min(MAX_HISTORY_PARTS, report.advances // ADVANCES_PER_PART + 1) if shows_progress() else 1
    with progress("checking the history", report.advances, "advance") as advance:
        sizes = [report.advances * (part + 1) // parts - report.advances * part // parts for part in range(parts)]
        report.history = audit.history_faults(None, MAX_HISTORY_FAULTS, parts, lambda: advance(sizes.pop()))


_REMEDIES: dict[tuple[str, str], str] = {
    ("redis", "behind"): "the pipeline refills Redis within a minute; `tidemark status` shows whether a pipeline runs",
    (
        "redis",
        "ahead",
    ): "was the database restored? Redis keeps its positions, because readers may have used them. The"
    " pipeline reads the facts again and catches up; `tidemark status` shows the Kafka lag",
    (
        "redis",
        "unknown stream",
    ): "Redis belongs to another database: check TIDEMARK_REDIS_URL and TIDEMARK_POSTGRES_DSN",
    ("redis", "fault"): "delete the stream's keys; the pipeline refills them from Postgres within a minute",
    ("redis", "away"): "start Redis; meanwhile, readers that have the address of Postgres use Postgres",
    (
        "state",
        "differs",
    ): "one transaction writes rows and state, so another program wrote into the schema tidemark. Stop the pipeline"
    " and restore the rows",
    (
        "sidecar",
        "behind",
    ): "the sidecar has lost Redis and Postgres, or hangs: see its /readyz and its log, and restart it",
    ("sidecar", "ahead"): "a sidecar never moves back: was the database restored? Restart the sidecar when the"
    " pipeline has caught up",
    (
        "sidecar",
        "unknown stream",
    ): "the sidecar reads other servers: compare its `tidemark config` with that of this command",
    ("sidecar", "away"): "start the sidecar, or correct the URL of --sidecar",
}

_HISTORY_REMEDY = (
    "rows were deleted or written by hand, or a part of the database was restored. Positions stay correct, because they"
    " do not come from the history; readers that were down read the missing range from their table"
)


def _remedy(copy: str, verdict: str) -> str:
    """The text that says what to do about differences of `copy` with this verdict."""
    kind = "state" if copy == STATE else copy.split(maxsplit=1)[0].removesuffix("'s")
    return _REMEDIES[kind, verdict]


def to_json(report: VerifyReport) -> str:
    fields = {
        "is_equal": report.is_equal,
        "streams": report.streams,
        "copies": report.copies,
        "advances": report.advances,
        "differences": report.differences,
        "history": report.history,
    }
    return json_text(fields)


def to_text(report: VerifyReport) -> str:
    """Text for people. For each replica and verdict: a line for each of the first `MAX_SHOWN` differences, and the
    remedy. Then the same for the faults of the history, and a summary.
    """
    lines: list[str] = []
    kinds: dict[tuple[str, str], list[Difference]] = {}
    for difference in report.differences:
        kinds.setdefault((difference.copy, difference.verdict), []).append(difference)
    for (copy, verdict), differences in kinds.items():
        lines += [_difference_line(difference) for difference in differences[:MAX_SHOWN]]
        if len(differences) > MAX_SHOWN:
            lines.append(f"{copy}: {len(differences) - MAX_SHOWN} more {verdict}; {_count_text(differences)} in total")
        lines.append(f"    {_remedy(copy, verdict)}")
    lines += [_history_fault_line(fault) for fault in report.history[:MAX_SHOWN]]
    if len(report.history) > MAX_SHOWN:
        more = " or more" if len(report.history) == MAX_HISTORY_FAULTS else ""
        lines.append(f"history: {len(report.history)}{more} faults in total")
    if report.history:
        lines.append(f"    {_HISTORY_REMEDY}")
    return "\n".join([*lines, _summary_line(report)])


def _difference_line(difference: Difference) -> str:
    if difference.verdict == "away":
        return f"{difference.copy}: {difference.found}"
    if difference.verdict == "unknown stream":
        return f"{difference.stream}: in {difference.copy}, not in Postgres"
    if difference.verdict == "fault":
        return f"{difference.stream}: {difference.copy} cannot be read: {difference.found}"
    if difference.what == GAP:
        where, other = (difference.copy, "Postgres") if difference.postgres is None else ("Postgres", difference.copy)
        top = difference.found if difference.postgres is None else difference.postgres
        gap = f"the gap of {difference.writer} up to {top}"
        return f"{difference.stream}: {gap} is open in {where}, not in {other}: {difference.verdict}"
    value = difference.what if difference.writer is None else f"{difference.what} of {difference.writer}"
    copied, stored = ("nothing" if at is None else str(at) for at in (difference.found, difference.postgres))
    return (
        f"{difference.stream}: {value} is {copied} in {difference.copy} and {stored} in Postgres: {difference.verdict}"
    )


def _history_fault_line(fault: HistoryFault) -> str:
    match fault.fault:
        case "hole":
            problem = f"a hole: no advance from {fault.expected} to {fault.found}"
        case "overlap":
            problem = f"an overlap: after {fault.expected}, the next advance begins at {fault.found}"
        case "regress":
            problem = f"a step back: from {fault.expected} to {fault.found}"
        case "no writer":
            problem = f"an advance to {fault.found}, but Postgres has no position of the writer"
    return f"{fault.stream}: the history of {fault.writer} has {problem}"


def _count_text(differences: Sequence[Difference]) -> str:
    streams = len({difference.stream for difference in differences})
    return f"{len(differences)} in {count(streams, 'stream')}"


def _summary_line(report: VerifyReport) -> str:
    where = ", ".join(["Postgres", STATE, *report.copies])
    history = "" if report.advances is None else f"; {count(report.advances, 'advance')} without a hole"
    if report.advances is not None and report.history:
        history = f"; {count(report.advances, 'advance')} with {count(len(report.history), 'fault')}"
    return f"{count(len(report.differences), 'difference')} in {count(report.streams, 'stream')} of {where}{history}"


@click.command("verify", cls=Utf8Command)
@click.option(
    "--history", is_flag=True, help="Also check that the whole history has no hole, no overlap and no step back."
)
@click.option("--sidecar", "sidecars", multiple=True, metavar="URL", help="Also compare this sidecar; may be repeated.")
@click.option(
    "--patience",
    type=Amount(min=0),
    default=5.0,
    show_default=True,
    help="Seconds in which a replica must reach the positions in Postgres.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def verify(context: click.Context, sidecars: tuple[str, ...], patience: float, *, history: bool, as_json: bool) -> None:
    """Compare Postgres, the pipeline's state, Redis and sidecars. Exit code 1 if they differ, or if a server does not
    answer."""
    settings = load_settings()
    tls_context = client_tls_context(settings.sidecar_ca_file)
    sidecar_replicas = [Sidecar(url, settings.sidecar_tokens_file, tls_context) for url in sidecars]
    with Audit(settings.postgres) as audit, Redis(RedisConfig(settings.redis)) as redis:
        audit.check_readable()
        report = compare_replicas(audit, [RedisKeys(redis), RedisTokens(redis), *sidecar_replicas], patience)
        if history:
            add_history(audit, report)
    if as_json:
        click.echo(to_json(report))
    else:
        echo(to_text(report))
    if not report.is_equal:
        context.exit(1)
