"""All that holds positions back, what is known of it, and what would settle it: for the verbs and the live page alike.

Pure, but for `of`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tidemark.app.diagnosis.lag_json import last_seen, moment
from tidemark.app.diagnosis.remedies import Verdict, remedy
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import is_brief, linear_lag
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
) -> list[OpenRange]:
    """From the encoded states at `now` (s since 1970): by stream, then longest first. A line that waits for a silent
    writer no longer than a transaction takes is left out. `begun`: the stream, writer and epoch of each epoch that an
    operator began; who is silent in one of these is fenced. `bridged`: streams that `tidemark synapse` tells."""
    found: list[OpenRange] = []
    for name, data in sorted(stored.items()):
        stream = codec.decode(data)
        ranges = _of_stream(name, stream, now, silence(policies, name))
        of_stream = [_fenced(it) if (name, it.writer, it.epoch) in begun else it for it in ranges]
        if name in bridged:
            of_stream = of_stream or [*_open(name, stream)]
        of_stream = [_with_remedy(it, stream, bridged=name in bridged) for it in of_stream]
        found += sorted(of_stream, key=lambda it: (it.since is not None, it.since, it.writer, abs(it.low or 0)))
    return found


def of(postgres: Postgres, stored: Mapping[str, bytes], now: float, defaults: Mapping[str, int]) -> list[OpenRange]:
    """`read`, with what `postgres` tells of policies, over these `defaults`, of operators' epochs, and of bridges."""
    policies, asked = Policies(postgres.policies.given(), defaults), postgres.conditions
    return read(stored, now, policies, asked.begun(), asked.bridges())


def silence(policies: Policies, stream: str) -> float:
    """Seconds in which a writer of the stream that lives is heard of."""
    return policies.value(stream, "silent_seconds") or 0


def _of_stream(name: str, stream: StreamState, now: float, silent: float) -> Iterator[OpenRange]:
    holding = linear_lag(stream)
    stream.writers.open_waiting()
    for (writer, epoch), held in stream.unjoined.items():
        yield _unknown(name, stream, writer, epoch, held)
    owing = {writer: known for writer, known in stream.writers.open.items() if known.chain.pending}
    for writer, known in owing.items():
        yield from _gaps(name, stream, writer, known, now, silent)
    for it in holding.blockers if holding else ():
        if it.reason == "unknown" or it.writer in owing or is_brief(it.since, now):
            continue
        transactions = stream.transactions.get(it.writer, [])
        since, seen = None if it.since is None else moment(it.since), last_seen(it.seen)
        heard = it.since is None or it.seen > it.since  # before the line waited it was one of many
        how = verdict(seen if heard else None, transactions, now, silent)
        yield OpenRange(name, it.writer, it.epoch, it.position, None, since, 0, 0, seen, transactions, how)


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
    )
    return replace(it, advice=found.advice, verb=found.command)


def _fenced(it: OpenRange) -> OpenRange:
    return replace(it, verdict="fenced") if it.verdict == "silent" else it


def _gaps(
    name: str, stream: StreamState, writer: str, known: WriterState, now: float, silent: float
) -> Iterator[OpenRange]:
    signed, transactions = stream.direction.signed, stream.transactions.get(writer, [])
    seen = last_seen(known.seen)
    how = verdict(seen, transactions, now, silent)
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


def verdict(seen: datetime | None, transactions: Sequence[str], now: float, silent: float) -> Verdict:
    """Of a writer that joined, by its last sign of life and what it says to be open, at `now` (s since 1970). After
    `silent` seconds without one it is silent."""
    if transactions:
        return "open transaction"
    return "alive" if seen is not None and now - seen.timestamp() < silent else "silent"
