"""Checks whether Synapse's database still has the published history. If not, a new timeline begins where that history
ends.

A standby that lags may have been promoted, a backup restored, a sequence set back, and the workers may have written for
a long time before the bridge notices. So the head at that moment is no evidence. Published facts are: a published fact
that still exists proves that no ID below it is given out again.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from tidemark.common.errors import BadSetting
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection
from tidemark.sources.synapse import evidence, state
from tidemark.sources.synapse.decider import StreamFact
from tidemark.sources.synapse.evidence import MOST_FACTS, PublishedFacts
from tidemark.sources.synapse.state import StreamProgress, SynapseServer
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.streaming.wire.records import Timeline

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _PreviousState:
    """The database when facts were last published. `head`: the highest known ID that was given out."""

    database: str
    lsn: str
    head: int


ReadTable = Callable[[int, int], list[StreamFact]]
"""Reads the facts of the tables in `(low, top]`, without their rows."""


def begin(
    connection: Connection,
    stream: SynapseStream,
    name: str,
    seen: SynapseServer,
    head: int,
    table: ReadTable,
    highest: int = 0,
) -> tuple[StreamProgress, PublishedFacts] | None:
    """Load the progress of the stream and its published facts; None if the stream is new. `head` was read after `seen`.
    `highest`: the highest head that this process has seen. Raises `BadSetting` if the stream belongs to another
    Synapse."""
    if (previous := _find(connection, stream, name, seen.name)) is None:
        return None
    known, was = previous
    published = evidence.load(connection, name)
    why = _why_another(connection, known, was, seen, head, highest)
    if not why and published is not None and (other := published.replaced(table(published.since, known.reach))):
        why = f"other rows have IDs that were published, as {other[0].id}"
    if not why:
        if published is None:
            lowest = min(known.sent_upto.values(), default=known.floor)
            since = max(known.floor, lowest - MOST_FACTS)
            facts = [
                fact for fact in table(since, known.reach) if fact.id <= known.all_sent_upto.get(fact.writer, lowest)
            ]
            published = evidence.begin(connection, name, since, facts)
        return known, published
    at = min(_agreed(connection, known, published, table), head)
    if published is None:
        published = PublishedFacts(at)
    with connection.transaction():
        evidence.go_back(connection, name, published, at)
        begun = _turn(connection, known, seen, at, head)
    log.warning(
        "Synapse's database went back: a new timeline of the stream begins, and what follows the ID is published again",
        stream=name, reason=why, id=at, published=known.reach, given_out=head,
    )  # fmt: skip
    return begun, published


def _why_another(
    connection: Connection, known: StreamProgress, was: _PreviousState, seen: SynapseServer, head: int, highest: int
) -> str:
    """The reason why IDs may be given out again; empty if they cannot be."""
    if was.database != seen.database:
        return "another database, or another timeline of its server"
    row = connection.execute("select %s::pg_lsn > %s::pg_lsn", [was.lsn, seen.lsn]).fetchone()
    if row is None or row[0]:
        return "the server's log is shorter than it was"
    if head < (before := max(known.reach, was.head, highest)):
        return f"{known.stream.sequence} has given out less than it had ({before})"
    return ""


def _agreed(connection: Connection, known: StreamProgress, published: PublishedFacts | None, table: ReadTable) -> int:
    """The ID up to which the tables certainly have the published history."""
    if published is None:
        return known.floor
    sent_upto = {writer: at for writer, at in known.all_sent_upto.items() if writer not in known.backlog}
    sent_upto[""] = min(known.sent_upto.values(), default=0)  # for rows without a writer
    if (id := published.agreed(table(published.since, known.reach), sent_upto)) is not None:
        return max(id, known.floor)
    for anchor in evidence.anchors(connection, known.name, published.since):
        if any(fact.is_proof and fact.marks <= anchor.marks for fact in table(anchor.id - 1, anchor.id)):
            return max(anchor.id, known.floor)
    return known.floor


def _find(
    connection: Connection, stream: SynapseStream, name: str, server_name: str
) -> tuple[StreamProgress, _PreviousState] | None:
    row = connection.execute(
        "update tidemark.synapse_streams set server = coalesce(server, %s) where stream = %s"
        " returning history, start, after, floor, server, database, lsn::text, coalesce(head, 0)",
        [server_name, name],
    ).fetchone()
    if row is None:
        return None
    history, start, after, floor, server, database, lsn, head = row
    if server != server_name:
        raise BadSetting(
            "--prefix", f"stream {name} is published for {server}: the streams of {server_name} need other names"
        )
    rows = connection.execute(
        "select writer, epoch, sent_upto, backlog_from, state = 'retired' from tidemark.synapse_writers"
        " where stream = %s",
        [name],
    ).fetchall()
    sent_upto = {writer: at for writer, _, at, _, gone in rows if not gone}
    epochs = {writer: epoch for writer, epoch, _, _, gone in rows if not gone}
    retired = {writer: at for writer, _, at, _, gone in rows if gone}
    backlog = {writer: low for writer, _, _, low, gone in rows if not gone and low is not None}
    known = StreamProgress(stream, name, Timeline(history, start, after), sent_upto, epochs, floor, retired, backlog)
    return known, _PreviousState(database, lsn, head)


def _turn(connection: Connection, known: StreamProgress, seen: SynapseServer, at: int, head: int) -> StreamProgress:
    """Begin a new timeline: IDs beyond `at` may be given out again. Runs in the caller's transaction."""
    token = uuid.uuid4().hex
    turned = Timeline(f"{seen.database}/{token}", token, known.timeline.start)
    now = state.clock(connection)
    begun = replace(
        known,
        timeline=turned,
        sent_upto={writer: min(sent_upto, at) for writer, sent_upto in known.sent_upto.items()},
        epochs={writer: max(epoch + 1, now) for writer, epoch in known.epochs.items()},
        retired={writer: min(sent_upto, at) for writer, sent_upto in known.retired.items()},
        backlog={writer: min(low, at) for writer, low in known.backlog.items()},
    )
    connection.execute(
        "update tidemark.synapse_streams set database = %s, history = %s, lsn = %s, start = %s, after = %s, head = %s"
        " where stream = %s",
        [seen.database, turned.database, seen.lsn, turned.start, turned.after, head, known.name],
    )
    connection.execute(
        "update tidemark.synapse_writers set sent_upto = least(sent_upto, %(at)s),"
        " backlog_from = case when backlog_from is not null then least(backlog_from, %(at)s) end"
        " where stream = %(name)s",
        {"at": at, "name": known.name},
    )
    for writer, epoch in begun.epochs.items():
        connection.execute(
            "update tidemark.synapse_writers set epoch = %s where (stream, writer) = (%s, %s)",
            [epoch, known.name, writer],
        )
    state.append_outbox(
        connection, known.name, [begun.encoder(writer).join(sent_upto) for writer, sent_upto in begun.sent_upto.items()]
    )
    return begun
