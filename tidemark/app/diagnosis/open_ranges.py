"""All that holds positions back, what is known of it, and what would settle it: for the verbs and the live page alike.

Pure, but for `of`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tidemark.app.diagnosis.lag_json import last_seen, moment
from tidemark.app.diagnosis.remedies import Verdict, remedy
from tidemark.app.output import duration
from tidemark.sinks.postgres.status import Reading
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import Source, is_brief, linear_lag, sources
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writers import UnjoinedWriter, WriterState
from tidemark.streaming.values.limits import Policies

NO_POLICIES = Policies()


@dataclass(frozen=True, slots=True)
class OpenRange:
    """The IDs in `(low, top]` of `writer` are missing; without `top` it has sent nothing beyond `low`, and without both
    it never joined. IDs are signed. `waiting` IDs, `facts` of them with a fact, are complete and buffered above it.
    `verb` is a command or statement that settles it, empty if only the writer can; `advice` says when to use it.
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
    """From the encoded states at `now` (s since 1970): by stream, then longest first. A linear position that waits for
    a silent writer no longer than a transaction takes is left out. `begun`: the stream, writer and epoch of each epoch
    that an operator began; who is silent in one of these is fenced. `bridged`: streams that `tidemark synapse` sends.
    `reading`: without it no heartbeat counts as missed."""
    found: list[OpenRange] = []
    for name, data in sorted(stored.items()):
        stream = codec.decode(data)
        ranges = [*_of_stream(name, stream, now, silence(policies, name), reading)]
        ranges += _sources(name, stream, now, reading, {open_range.writer for open_range in ranges})
        of_stream = [_fenced(it) if (name, it.writer, it.epoch) in begun else it for it in ranges]
        if name in bridged:
            of_stream = of_stream or [*_open(name, stream)]
        of_stream = [_with_remedy(it, stream, bridged=name in bridged) for it in of_stream]
        found += sorted(of_stream, key=lambda it: (it.since is not None, it.since, it.writer, abs(it.low or 0)))
    return found


def of(postgres: Postgres, stored: Mapping[str, bytes], now: float, defaults: Mapping[str, int]) -> list[OpenRange]:
    """`read`, with what `postgres` tells of policies, over these `defaults`, of operators' epochs, and of bridges."""
    policies, asked = Policies(postgres.policies.given(), defaults), postgres.conditions
    return read(stored, now, policies, asked.begun(), asked.bridges(), asked.reading())


def silence(policies: Policies, stream: str) -> float:
    """Seconds in which a writer of the stream that lives is heard of."""
    return policies.value(stream, "silent_seconds") or 0


def _of_stream(
    name: str, stream: StreamState, now: float, silent: float, reading: Reading | None
) -> Iterator[OpenRange]:
    holding = linear_lag(stream)
    stream.writers.open_waiting()
    for (writer, epoch), held in stream.unjoined.items():
        yield _unknown(name, stream, writer, epoch, held)
    owing = {writer: known for writer, known in stream.writers.open.items() if known.chain.pending}
    for writer, known in owing.items():
        yield from _gaps(name, stream, writer, known, life(stream, writer, known.seen, now, silent, reading))
    for it in holding.blockers if holding else ():
        if it.reason == "unknown" or it.writer in owing or is_brief(it.since, now):
            continue
        transactions = stream.transactions.get(it.writer, [])
        since, seen = None if it.since is None else moment(it.since), last_seen(it.seen)
        # Before the linear position waited, the writer was one of many.
        since_it_waits = it.seen if it.since is None or it.seen > it.since else 0
        how = life(stream, it.writer, since_it_waits, now, silent, reading)
        yield OpenRange(name, it.writer, it.epoch, it.position, None, since, 0, 0, seen, transactions, how)


def source_of(stream: StreamState, writer: str) -> Source | None:
    """The relay or bridge that sends the writer's records, if it reports itself: all its writers have one start."""
    known = stream.writers.get(writer)
    start = None if known is None else known.start
    for source in sources(stream):
        if source.writer == writer or (start is not None and start == stream.writers[source.writer].start):
            return source
    return None


def missed(source: Source, home: int | None, now: float, reading: Reading | None) -> float | None:
    """Seconds since the last record of a source that has missed its heartbeat. None if it has not, or if that is not
    known: no pipeline reads, or it has not read all of the stream's partition `home`."""
    if reading is None or home in reading.lagging:
        return None
    return source.overdue(now, reading.since)


def problem(source: Source, home: int | None, now: float, reading: Reading | None, *, bridged: bool = False) -> str:
    """What is wrong with a source, in words; empty if nothing is."""
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
    """What is wrong with the sources of the streams, a line for each. Streams without reports are not decoded."""
    for name, data in sorted(stored.items()):
        if codec.decode_stored(data).reports:
            stream = codec.decode(data)
            for source in sources(stream):
                if text := problem(source, stream.home, now, reading, bridged=name in bridged):
                    yield f"{name}: {text}"


def _sources(
    name: str, stream: StreamState, now: float, reading: Reading | None, known: Collection[str]
) -> Iterator[OpenRange]:
    """Sources that send nothing although nobody is seen to wait: what they hold back is in no record."""
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
    """What is open though nobody is seen to wait: a bridge tells nothing that lies beyond it."""
    for writer, transactions in stream.transactions.items():
        if transactions and (known := stream.writers.get(writer)) is not None:
            low, seen = stream.direction.signed(known.position), last_seen(known.seen)
            yield OpenRange(name, writer, known.epoch, low, None, None, 0, 0, seen, transactions, "open transaction")


def _with_remedy(it: OpenRange, stream: StreamState, *, bridged: bool) -> OpenRange:
    known = stream.writers.get(it.writer) if it.low is not None else None
    if known is not None:
        id = stream.direction.signed(known.chain.reach) if it.top is not None else it.low
    else:
        id = stream.direction.signed(max(stream.unjoined[it.writer, it.epoch].chain.reach, 0))
    found = remedy(
        it.verdict,
        it.stream,
        it.writer,
        id=id or 0,
        epoch=it.epoch,
        transactions=it.transactions,
        relayed=known is not None and known.start is not None,
        bridged=bridged,
        cause="" if (source := source_of(stream, it.writer)) is None else source.report.blocked,
    )
    return replace(it, advice=found.advice, verb=found.command)


def _fenced(it: OpenRange) -> OpenRange:
    return replace(it, verdict="fenced") if it.verdict == "silent" else it


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


def _unknown(name: str, stream: StreamState, writer: str, epoch: int, held: UnjoinedWriter) -> OpenRange:
    chain = held.chain
    waiting = chain.waiting
    facts = sum(span.evidence.facts for span in chain.pending)
    since, seen = moment(held.since), last_seen(held.seen)
    return OpenRange(name, writer, epoch, None, None, since, waiting, facts, seen, [], "unknown")


def life(
    stream: StreamState, writer: str, seen: int, now: float, silent: float, reading: Reading | None = None
) -> Verdict:
    """What is known of the life of a writer that joined. `seen`: time (ms) of its last sign of life; 0 if there is
    none."""
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
    """Of a writer that joined, by its last sign of life and what it says to be open, at `now` (s since 1970). After
    `silent` seconds without one it is silent."""
    if transactions:
        return "open transaction"
    return "alive" if seen is not None and now - seen.timestamp() < silent else "silent"
