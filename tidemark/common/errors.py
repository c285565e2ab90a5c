"""Every error of Tidemark, by who must act. The text of an error stands above its class, with its fields in braces."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar, dataclass_transform

_Error = TypeVar("_Error", bound=Exception)


@dataclass_transform(eq_default=False)
def says(text: str) -> Callable[[type[_Error]], type[_Error]]:
    """The arguments of the error are its fields, in their order; `{it.…}` in the text is a property."""

    def with_fields(error: type[_Error]) -> type[_Error]:
        names = [name for kind in reversed(error.__mro__) for name in vars(kind).get("__annotations__", ())]

        def fill(self: _Error, *given: object, **named: object) -> None:
            vars(self).update(zip(names, given, strict=False), **named)  # what is left has a default
            values = {name: getattr(self, name) for name in names}
            lists = {
                name: ", ".join(map(str, it[:20])) or "none" for name, it in values.items() if isinstance(it, list)
            }
            Exception.__init__(self, " ".join(text.split()).format(it=self, **(values | lists)))

        error.__init__ = fill  # type: ignore[method-assign, assignment]
        return error

    return with_fields


class TidemarkError(Exception):
    """Base of all errors that Tidemark raises on purpose. Its text is one line, written for a person.

    `hint` says in general what to do about errors of this kind.
    """

    hint = "Start the program again: it continues from its stored position."

    @property
    def short(self) -> str:
        """The error for a person, without a traceback: one line with what happened, and one with the hint."""
        return f"{' '.join(str(self).split())}\nHint: {self.hint}"


class Retry(TidemarkError):
    """The world will mend it: the caller backs off and tries again."""

    hint = "Try again later: a server was not available, or another process has to finish first. Nothing was lost."


@says("{what} at {where} does not answer: {problem}")
class Unavailable(Retry):
    what: str  # Kafka, Postgres, Redis
    where: str  # an address without secrets
    problem: str


@says("{what} at {where} is slow: {problem}")
class Slow(Unavailable):
    pass  # with one question, and it answers others


@says("{what} is not possible yet: {problem}")
class PrerequisitePending(Unavailable):
    pass  # transactions or a relay have to do something before


@says("""sequence {sequence} has given out {head}, and had given out {seen}: its database, or it alone, went back""")
class SequenceWentBack(Retry):  # IDs are given out again: begin anew, with a new timeline
    sequence: str
    seen: int
    head: int


@says("""the rows of stream {stream} with ID {id} are other ones than were published: its database, or its sequence
    alone, went back""")
class FactsReplaced(Retry):
    stream: str
    id: int


@says("the lease was taken over: ours has token {held}, the newest is {now}")
class LeaseLost(Retry):  # nothing of ours may be published any more: docs/design.md, rule 6
    held: int
    now: int


@says("""Postgres holds {found} and this batch follows {wanted}: commits were lost (a failover, a restored backup);
    the query begins anew with what Postgres holds""")
class ChainBroken(Retry):  # docs/design.md, rule 3
    wanted: str
    found: str


@says("""{records} records had more facts than memory has room for: what their batch left is read again, in batches of
    {fewer}""")
class BatchTooLarge(Retry):
    records: int
    fewer: int


@says("stream {stream} did not reach {token} within {seconds:g} s: {it.found}")
class NotReached(Retry):
    stream: str
    token: str
    stands: str | None  # None: Redis is recovering
    seconds: float

    @property
    def found(self) -> str:
        return f"it stands at {self.stands}" if self.stands else "Redis knows nothing of it"


@says("""Postgres refuses what follows from batch {batch}, and not because it is away: {problem}; no single record of it
    is refused, so the next batch reads at most {fewer} records""")
class ContentRefused(Retry):
    batch: int
    problem: str
    fewer: int


@says("""Postgres refuses what follows from {records} records: {problem}; they go to the dead letters as not_storable,
    and their batch is read again without them""")
class RecordsRefused(Retry):
    records: int
    problem: str
    places: Mapping[str, Mapping[int, Sequence[int]]]  # offsets by topic and partition


@says("the query begins anew: {what} changed while it ran")
class ConfigurationChanged(Retry):
    what: str  # a query and its connections take it up when they begin


@says("the query failed: {problem}")
class QueryFailed(Retry):
    problem: str  # the innermost cause that Spark names; the next query reads again what its batch had


class Reject(TidemarkError):
    """One record (or token, or command) is wrong and its neighbours are not: it is dead-lettered, and they go on."""

    hint = "Correct the value that the message names. Nothing else is affected."


@says("{reason}: {detail}")
class BadRecord(Reject):
    reason: str  # one of streaming.values.limits.Reason
    detail: str  # what was found where


@says("a row of stream {stream} is refused: {problem}")
class BadRow(Reject):
    stream: str
    problem: str


@says("""this transaction has not reserved ID {id} of stream {stream}, or has completed it: reserve and complete belong
    into one transaction, and a savepoint that is rolled back takes the ID""")
class NotReserved(Reject):
    stream: str
    id: int


@says("{text!r} is not a token such as m7~first.9: {problem}")
class BadToken(Reject):
    text: str
    problem: str


class BadCommand(Reject):
    """A line of the replication protocol that is no command (docs/reference/protocol.md)."""


@says("{token} is ahead of stream {stream}, whose writers have come to {allocated}: of another stream or database")
class TokenAhead(Reject):
    stream: str
    token: str
    allocated: int  # the highest ID that any record of the stream named


@says("nothing was ever told of stream {stream}: check its name; for one that is to come, wait with a longer grace")
class StreamNotKnown(Reject):
    stream: str


class Stopping(TidemarkError):
    """The process was told to end while it waited; what it waited for is done again after the next start."""


@says("Spark is gone: {problem}; start the pipeline again, it goes on where it was")
class SparkDied(TidemarkError):  # this process is of no use any more: whoever started it starts it again
    problem: str  # out of memory, killed, never up, dropped by its cluster


class Stop(TidemarkError):
    """A person must decide. Printed as one line; the process ends with exit code 2."""

    hint = "Correct what the message names, then start the program again: it continues from its stored position."


@says("{name}: {problem}")
class BadSetting(Stop):
    name: str
    problem: str


@says("""the checkpoint cannot be kept at {path} ({problem}): let this user write there, or name another place in
    TIDEMARK_CHECKPOINT or TIDEMARK_CHECKPOINT_STORE""")
class CheckpointNotWritable(Stop):
    path: str
    problem: str


@says("topic {topic} does not exist; create it with cleanup.policy=delete, or set TIDEMARK_KAFKA_CREATE_TOPICS=true")
class TopicMissing(Stop):
    topic: str


@says("""topic {topic} has cleanup.policy={policy}: compaction keeps one record per stream and destroys the rest; set it
    back: kafka-configs --alter --topic {topic} --add-config cleanup.policy=delete""")
class TopicCompacted(Stop):
    topic: str
    policy: str


@says("""topic {topic} had {was} partitions and has {now}: streams have moved between partitions and lost their order;
    stop all writers, let the pipeline read what is left, start it once with --accept partitions, then the writers""")
class PartitionsChanged(Stop):
    topic: str
    was: int
    now: int


@says("""topic {topic} was deleted and created again (id {was}, now {now}): records may be lost; restart the writers so
    that they join again, and start the pipeline once with --accept loss""")
class TopicReplaced(Stop):
    topic: str
    was: str
    now: str


@says("""{topic}[{partition}]: the next record to read is {wanted} but the topic now begins at {earliest}: retention
    removed records before they were read; raise retention.ms, then start the pipeline once with --accept loss (what was
    lost shows as gaps that hold until their writers join again)""")
class RecordsGone(Stop):
    topic: str
    partition: int
    wanted: int
    earliest: int


@says("""{topic}[{partition}]: the next record to read is {wanted} but the topic ends at {end}: the brokers lost records
    that were read already (an unclean election, or an older copy of their disks); restart the writers so that they join
    again, and start the pipeline once with --accept loss""")
class RecordsBeyondEnd(Stop):
    topic: str
    partition: int
    wanted: int
    end: int


@says("the database has schema version {found} and this Tidemark needs {wanted}: {it.remedy}")
class SchemaMismatch(Stop):
    found: int
    wanted: int
    command: str = "tidemark migrate"

    @property
    def remedy(self) -> str:
        return f"run `{self.command}`" if self.found < self.wanted else "upgrade this Tidemark: it is the older one"


@says("""this is Tidemark {ours} and the pipeline of this database is, or was last, {pipeline}: they may differ by one
    minor version; upgrade the older of them, or roll the newer back, one minor version at a time""")
class VersionSkew(Stop):
    ours: str
    pipeline: str  # that has, or had last, the lease


@says("""the database was made with {was} shards and TIDEMARK_SHARDS is {now}: set
    TIDEMARK_SHARDS={was}, or start the pipeline once with --accept shards to seed it anew from Postgres""")
class ShardsChanged(Stop):
    was: int
    now: int


@says("a stream's state has format {found} and this Tidemark knows formats up to {known}: upgrade this Tidemark")
class StateTooNew(Stop):
    found: int
    known: int


@says("sequence {sequence}: {problem}; {do}")
class UnsuitableSequence(Stop):  # its IDs would not be safe to announce: docs/design.md 4b
    sequence: str
    problem: str
    do: str


@says("""fact {id} of stream {stream} in tidemark.append_outbox is no JSON ({problem}), so no function put it there:
    mend its rows""")
class MalformedFact(Stop):
    stream: str
    id: int
    problem: str


@says("""reader {reader} has read stream {stream} in {was} mode and would now go on in {now} mode, which cannot tell
    what it has read: go on as before, or give the reader a new name (it then begins anew)""")
class ReaderModeChanged(Stop):
    reader: str
    stream: str
    was: str
    now: str


@says("""stream {stream}: late completions beyond number {after}, up to {number}, are not listed in Redis any more: give
    the reader the dsn of Tidemark's Postgres, which keeps them""")
class LateUnknown(Stop):
    stream: str
    after: int
    number: int


@says("""stream {stream}: a completion of {writer} in ({prev}, {id}] came late, and there are rows of other writers too,
    or rows without a writer: tell the reader the table's writer column, Table(..., writer=...), and fill the column in
    each row of that range""")
class LateNeedsWriter(Stop):
    stream: str
    writer: str
    prev: int
    id: int


@says("""the row with ID {id} cannot be made values of Python ({problem}): leave the column out with
    Table(..., columns=...), read a view that casts it, or register a loader with psycopg""")
class RowUnreadable(Stop):
    id: str
    problem: str


@says("""reader {reader} of stream {stream}: the transaction of a batch was ended by what was done on its connection (a
    COMMIT or ROLLBACK), so what came of the batch and the reader's place are no longer one; nothing of the place was
    written: take the statement out, and see which effects of the batch are there""")
class TransactionEnded(Stop):
    reader: str
    stream: str


class ExtraMissing(Stop, ImportError):
    def __init__(self, what: str, module: str, extra: str) -> None:
        super().__init__(f"{what} needs {module}, which is not installed: pip install 'tidemark-streams[{extra}]'")
        self.name = module
        self.extra = extra

    @classmethod
    def instead_of(cls, error: ModuleNotFoundError, what: str, extra: str) -> "ExtraMissing":
        """Of what was raised where `what` was imported. Raises `error` itself where the module is one of ours."""
        if (module := (error.name or "").partition(".")[0]) in {"", "tidemark"}:
            raise error
        return cls(what, module, extra)


@says("{what} at {where} refused us: {problem}; {do}")
class Refused(Stop):  # a server that answered and said no
    what: str
    where: str
    problem: str
    do: str


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the program with the short form of an error of Tidemark, in place of a traceback.

    For the outermost block of a program. Writes `TidemarkError.short` to standard error. Every other error passes, and
    so does a group (of `asyncio.TaskGroup`) that has other errors too.

    Raises:
        SystemExit: with code 2 for a `Stop`, 1 for any other error of Tidemark, as the command line does.
    """
    try:
        yield
    except TidemarkError as error:
        code = _exit_code(error)
    except BaseExceptionGroup as group:
        ours, others = group.split(TidemarkError)
        if ours is None or others is not None:
            raise
        code = _exit_code(_first_of(ours))
    else:
        return
    raise SystemExit(code)  # outside of the handlers: it has no context that anybody would print


def _exit_code(error: TidemarkError) -> int:
    sys.stderr.write(f"error: {error.short}\n")
    return 2 if isinstance(error, Stop) else 1


def _first_of(group: BaseExceptionGroup[TidemarkError]) -> TidemarkError:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
