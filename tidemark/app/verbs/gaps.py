"""`tidemark gaps`: all that holds a position back, with what is known of it and the command that would settle it."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from tidemark.app.behind import last_seen, moment
from tidemark.app.printed import as_object, for_people
from tidemark.app.verbs.status import aged, ids_between
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming import state
from tidemark.streaming.holders import behind, is_brief
from tidemark.streaming.policies import Policies
from tidemark.streaming.stream import StreamState
from tidemark.streaming.writers import HeldWriter, WriterState

NO_POLICIES = Policies()
SHOWN = 10  # gaps of one writer in the text; the JSON has all

Verdict = Literal["open transaction", "alive", "silent", "fenced", "unknown"]

_WAITED_FOR: Mapping[Verdict, str] = {
    "silent": "start it",
    "fenced": "start it, in an epoch above {}",
    "unknown": "let it join",
}


@dataclass(frozen=True, slots=True)
class OpenRange:
    """`writer` owes the IDs in `(low, top]`; without `top` it has told nothing beyond `low`, and without both it never
    joined. IDs are signed. `waiting` IDs, `facts` of them with a fact, are complete and held back by it. `verb` settles
    it, where the writer itself does not.
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
    verb: str


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
        stream = state.decode(data)
        ranges = _of_stream(name, stream, now, silence(policies, name))
        of_stream = [_fenced(it) if (name, it.writer, it.epoch) in begun else it for it in ranges]
        if name in bridged:
            of_stream = [replace(it, verb=_bridge_verb(it)) for it in of_stream or _open(name, stream)]
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
    holding = behind(stream)
    stream.writers.open_waiting()
    for (writer, epoch), held in stream.held.items():
        yield _unknown(name, stream, writer, epoch, held)
    owing = {writer: known for writer, known in stream.writers.open.items() if known.chain.pending}
    for writer, known in owing.items():
        yield from _gaps(name, stream, writer, known, now, silent)
    for it in holding.holders if holding else ():
        if it.reason == "unknown" or it.writer in owing or is_brief(it.since, now):
            continue
        transactions = stream.transactions.get(it.writer, [])
        since, seen = None if it.since is None else moment(it.since), last_seen(it.seen)
        heard = it.since is None or it.seen > it.since  # before the line waited it was one of many
        how = verdict(seen if heard else None, transactions, now, silent)
        verb = _verb(how, name, it.writer, it.position)
        yield OpenRange(name, it.writer, it.epoch, it.position, None, since, 0, 0, seen, transactions, how, verb)


def _open(name: str, stream: StreamState) -> Iterator[OpenRange]:
    """What is open though nobody is seen to wait: a bridge tells nothing that lies beyond it."""
    for writer, transactions in stream.transactions.items():
        if transactions and (known := stream.writers.get(writer)) is not None:
            low, seen = stream.direction.signed(known.position), last_seen(known.seen)
            yield OpenRange(
                name, writer, known.epoch, low, None, None, 0, 0, seen, transactions, "open transaction", ""
            )


def _fenced(it: OpenRange) -> OpenRange:
    return replace(it, verdict="fenced") if it.verdict == "silent" else it


def _gaps(
    name: str, stream: StreamState, writer: str, known: WriterState, now: float, silent: float
) -> Iterator[OpenRange]:
    signed, transactions = stream.direction.signed, stream.transactions.get(writer, [])
    seen = last_seen(known.seen)
    how = verdict(seen, transactions, now, silent)
    verb = _verb(how, name, writer, signed(known.chain.reach))
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
            verb,
        )
        waiting, facts = waiting - span.edges, facts - span.evidence.facts


def _unknown(name: str, stream: StreamState, writer: str, epoch: int, held: HeldWriter) -> OpenRange:
    chain = held.chain
    waiting = chain.waiting
    facts = sum(span.evidence.facts for span in chain.pending)
    reach = stream.direction.signed(max(chain.reach, 0))
    verb = _verb("unknown", name, writer, reach, epoch)
    since, seen = moment(held.since), last_seen(held.seen)
    return OpenRange(name, writer, epoch, None, None, since, waiting, facts, seen, [], "unknown", verb)


def verdict(seen: datetime | None, transactions: Sequence[str], now: float, silent: float) -> Verdict:
    """Of a writer that joined, by its last sign of life and what it says to be open, at `now` (s since 1970). After
    `silent` seconds without one it is silent."""
    if transactions:
        return "open transaction"
    return "alive" if seen is not None and now - seen.timestamp() < silent else "silent"


def _verb(how: Verdict, stream: str, writer: str, id: int, epoch: int | None = None) -> str:
    if how in ("open transaction", "alive"):
        return "tidemark relay blockers"
    named = [] if epoch is None else ["--epoch", str(epoch)]
    options = shlex.join([*named, f"--id={id}"])
    return f'tidemark retire {options} --by "$USER" --why "gone for good" {shlex.join(_names(stream, writer))}'


def _bridge_verb(it: OpenRange) -> str:
    """Of a worker of Synapse, of whom the bridge can prove what no operator could."""
    if it.verdict in ("open transaction", "alive"):
        return "tidemark synapse blockers"
    return f"tidemark synapse retire {shlex.join(_names(it.writer, it.stream))}"


def _names(*words: str) -> list[str]:
    """As arguments, of which none passes for an option."""
    return [*(["--"] if any(it.startswith("-") for it in words) else []), *words]


def as_json(found: Sequence[OpenRange]) -> str:
    return as_object({"gaps": found})


def as_text(found: Sequence[OpenRange], now: float) -> str:
    """A line for each, and below the last one of a writer its transactions and the verb."""
    lines: list[str] = []
    writers: dict[tuple[str, str, int], list[OpenRange]] = {}
    for it in found:
        writers.setdefault((it.stream, it.writer, it.epoch), []).append(it)
    for ranges in writers.values():
        lines += [_line(it, now) for it in ranges[:SHOWN]]
        if len(ranges) > SHOWN:
            lines.append(f"{ranges[0].stream}: {ranges[0].writer} has {len(ranges) - SHOWN} gaps more")
        lines += _remedy(ranges[0])
    return for_people(lines)


def _line(it: OpenRange, now: float) -> str:
    if it.low is None:
        what = "has not joined"
    elif it.top is None:
        what = f"has told nothing beyond {it.low}"
    else:
        what = f"owes {ids_between(it.low, it.top)}"
    age = "" if it.since is None else f", for {aged(now - it.since.timestamp())}"
    seen = "never seen" if it.last_seen is None else f"last seen {aged(now - it.last_seen.timestamp())} ago"
    waits = f"; {it.waiting} IDs wait, {it.facts} with a fact" if it.waiting else ""
    return f"{it.stream}: {it.writer} (epoch {it.epoch}) {what}{age}: {it.verdict}, {seen}{waits}"


def _remedy(it: OpenRange) -> Iterable[str]:
    yield from (f"    open: {transaction}" for transaction in it.transactions)
    if what := _WAITED_FOR.get(it.verdict):
        yield f"    {what.format(it.epoch)}; if it is gone for good: {it.verb}"
        if it.low is not None and it.top is not None:
            words = shlex.join(_names(it.stream, it.writer, ids_between(it.low, it.top)))
            yield f'    if it lives on and these IDs are lost: tidemark skip --by "$USER" --why "lost" {words}'
    else:
        yield f"    {it.verb}"
