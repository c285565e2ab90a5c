"""Checks whether Synapse's database still has the published history. If not, begins a new timeline at the last ID that
both histories have.

The database may have lost history because a lagging standby was promoted, a backup was restored, or a sequence was set
back. The workers may have written for a long time before the bridge notices this. So the highest ID that was given out
is no evidence. Published facts are evidence: if a published fact still exists, no lower ID is given out again.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from tidemark.common.errors import BadSetting
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection
from tidemark.sources.synapse import evidence, state
from tidemark.sources.synapse.decider import StreamFact
from tidemark.sources.synapse.evidence import MAX_FACTS, PublishedFacts
from tidemark.sources.synapse.state import StreamProgress, SynapseServer
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.streaming.wire.records import DatabaseStart

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _PreviousState:
    """Synapse's database at the time when facts of the stream were last published.

    Attributes:
        database: the identity of the database (`ServerHistory.database`).
        lsn: the end of the server's write-ahead log, as text.
        head: the highest ID that was given out (a magnitude); 0 if not stored.
    """

    database: str
    lsn: str
    head: int


ReadTable = Callable[[int, int], list[StreamFact]]
"""Called with `low` and `top`. Reads the facts of Synapse's tables with IDs in `(low, top]`, without their rows."""


def load_progress(
    connection: Connection,
    stream: SynapseStream,
    name: str,
    server: SynapseServer,
    head: int,
    read_table: ReadTable,
    highest_head: int = 0,
) -> tuple[StreamProgress, PublishedFacts] | None:
    """Load the progress of a stream and its published facts.

    If the database no longer has the published history, also begins a new timeline, and writes its JOINs to the outbox.

    Args:
        connection: to the bridge's database.
        stream: the stream.
        name: the stream's name in Kafka.
        server: Synapse's database.
        head: the highest ID that was given out, read after `server`.
        read_table: reads facts of Synapse's tables.
        highest_head: the highest head of the stream that this process has read before.

    Returns:
        The progress and the published facts; None if the stream is new.

    Raises:
        BadSetting: the stream belongs to another Synapse.
    """
    if (previous := _load_stored(connection, stream, name, server.name)) is None:
        return None
    progress, before = previous
    published = evidence.load(connection, name)
    reason = _find_rollback_reason(connection, progress, before, server, head, highest_head)
    replaced = (
        []
        if reason or published is None
        else published.find_replaced(read_table(published.since_id, progress.max_sent_upto))
    )
    if replaced:
        reason = f"other rows have IDs that were published, such as {replaced[0].id}"
    if not reason:
        if published is None:
            lowest = min(progress.sent_upto.values(), default=progress.floor)
            since = max(progress.floor, lowest - MAX_FACTS)
            facts = [
                fact
                for fact in read_table(since, progress.max_sent_upto)
                if fact.id <= progress.all_sent_upto.get(fact.writer, lowest)
            ]
            published = evidence.begin(connection, name, since, facts)
        return progress, published
    at = min(_find_last_common_id(connection, progress, published, read_table), head)
    if published is None:
        published = PublishedFacts(at)
    with connection.transaction():
        evidence.truncate(connection, name, published, at)
        new_progress = _begin_timeline(connection, progress, server, at, head)
    log.warning(
        "Synapse's database was set back: a new timeline of the stream begins, and facts with IDs beyond `id` are"
        " published again",
        stream=name, reason=reason, id=at, published=progress.max_sent_upto, given_out=head,
    )  # fmt: skip
    return new_progress, published


def _find_rollback_reason(
    connection: Connection,
    progress: StreamProgress,
    before: _PreviousState,
    server: SynapseServer,
    head: int,
    highest_head: int,
) -> str:
    """Why published IDs may be given out again; empty if the database shows no reason.

    Compares the identity of the database, the write-ahead log and the head with their previous values.
    """
    if before.database != server.database:
        return "another database, or another timeline of its server"
    row = connection.execute("select %s::pg_lsn > %s::pg_lsn", [before.lsn, server.lsn]).fetchone()
    if row is None or row[0]:
        return "the write-ahead log of the server is shorter than before"
    if head < (last_head := max(progress.max_sent_upto, before.head, highest_head)):
        return f"the sequence {progress.stream.sequence} is below the ID that it gave out before ({last_head})"
    return ""


def _find_last_common_id(
    connection: Connection, progress: StreamProgress, published: PublishedFacts | None, read_table: ReadTable
) -> int:
    """The ID up to which Synapse's tables certainly have the published history; at least the floor of the stream.

    Reads the tables for the newest published facts, and if none of them is proof, for some anchors.
    """
    if published is None:
        return progress.floor
    sent_upto = {writer: at for writer, at in progress.all_sent_upto.items() if writer not in progress.backlog_starts}
    sent_upto[""] = min(progress.sent_upto.values(), default=0)  # for rows without a writer
    if (
        id := published.find_last_common_id(read_table(published.since_id, progress.max_sent_upto), sent_upto)
    ) is not None:
        return max(id, progress.floor)
    for anchor in evidence.load_anchors(connection, progress.name, published.since_id):
        if any(fact.is_proof and fact.marks <= anchor.marks for fact in read_table(anchor.id - 1, anchor.id)):
            return max(anchor.id, progress.floor)
    return progress.floor


def _load_stored(
    connection: Connection, stream: SynapseStream, name: str, server_name: str
) -> tuple[StreamProgress, _PreviousState] | None:
    """Load the stored progress of a stream. Stores the server_name if none is stored.

    Returns None if the stream is new. Raises `BadSetting` if the stream belongs to another server_name.
    """
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
            "--prefix", f"the stream {name} belongs to {server}: set another prefix for the streams of {server_name}"
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
    progress = StreamProgress(
        stream, name, DatabaseStart(history, start, after), sent_upto, epochs, floor, retired, backlog
    )
    return progress, _PreviousState(database, lsn, head)


def _begin_timeline(
    connection: Connection, progress: StreamProgress, server: SynapseServer, at: int, head: int
) -> StreamProgress:
    """Begin a new timeline, because IDs beyond `at` may be given out again. Returns the new progress.

    Stores the positions, which are at most `at`, and writes the JOINs to the outbox. Runs in the caller's transaction.
    """
    token = uuid.uuid4().hex
    timeline = DatabaseStart(f"{server.database}/{token}", token, progress.timeline.start)
    now = state.read_clock(connection)
    new_progress = replace(
        progress,
        timeline=timeline,
        sent_upto={writer: min(sent_upto, at) for writer, sent_upto in progress.sent_upto.items()},
        epochs={writer: max(epoch + 1, now) for writer, epoch in progress.epochs.items()},
        retired_at_ids={writer: min(sent_upto, at) for writer, sent_upto in progress.retired_at_ids.items()},
        backlog_starts={writer: min(low, at) for writer, low in progress.backlog_starts.items()},
    )
    connection.execute(
        "update tidemark.synapse_streams set database = %s, history = %s, lsn = %s, start = %s, after = %s, head = %s"
        " where stream = %s",
        [server.database, timeline.database, server.lsn, timeline.start, timeline.after, head, progress.name],
    )
    connection.execute(
        "update tidemark.synapse_writers set sent_upto = least(sent_upto, %(at)s),"
        " backlog_from = case when backlog_from is not null then least(backlog_from, %(at)s) end"
        " where stream = %(name)s",
        {"at": at, "name": progress.name},
    )
    for writer, epoch in new_progress.epochs.items():
        connection.execute(
            "update tidemark.synapse_writers set epoch = %s where (stream, writer) = (%s, %s)",
            [epoch, progress.name, writer],
        )
    state.append_outbox(
        connection,
        progress.name,
        [new_progress.encoder(writer).join(at) for writer, at in new_progress.sent_upto.items()],
    )
    return new_progress
