"""The tree of Tidemark's errors: `Retry`, `Reject` (one record, token or command), and `Stop`.

The decorator `message` gives an error class its text. The annotations of the class are the fields of the error. In the
text, a field is written in braces.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar, dataclass_transform

_Error = TypeVar("_Error", bound=Exception)


@dataclass_transform(eq_default=False)
def message(text: str) -> Callable[[type[_Error]], type[_Error]]:
    """Create a class decorator that gives an error class a text, and a constructor that takes the fields.

    The constructor takes the fields in the order of their annotations, or by name.

    Args:
        text: a format string. `{name}` is a field, and `{it.name}` is a property of the error. A field that is a list
            is shown as its first 20 elements, or as `none` if the list is empty.
    """

    def with_fields(error: type[_Error]) -> type[_Error]:
        names = [name for kind in reversed(error.__mro__) for name in vars(kind).get("__annotations__", ())]

        def fill(self: _Error, *given: object, **named: object) -> None:
            vars(self).update(zip(names, given, strict=False), **named)  # other fields have a default
            values = {name: getattr(self, name) for name in names}
            lists = {
                name: ", ".join(map(str, value[:20])) or "none"
                for name, value in values.items()
                if isinstance(value, list)
            }
            Exception.__init__(self, " ".join(text.split()).format(it=self, **(values | lists)))

        error.__init__ = fill  # type: ignore[method-assign, assignment]
        return error

    return with_fields


class TidemarkError(Exception):
    """The base class of Tidemark's errors. The text is one line, for a person.

    Attributes:
        hint: what a person should do about errors of this kind.
    """

    hint = "Start the program again: it continues from its stored position."

    @property
    def short(self) -> str:
        """The error without a traceback: one line with the text, and one line with the hint."""
        return f"{' '.join(str(self).split())}\nHint: {self.hint}"


class Retry(TidemarkError):
    """A temporary problem: the caller waits and tries again."""

    hint = "Try again later: a server was not available, or another process has to finish first. Nothing was lost."


@message("{what} at {where} is unavailable: {problem}")
class Unavailable(Retry):
    """A server does not answer, or cannot do its work now."""

    what: str  # the server: Kafka, Postgres or Redis
    where: str  # its address, without secrets
    problem: str


@message("{what} at {where} answers slowly: {problem}")
class Slow(Unavailable):
    """The server did not answer one request in time, but may answer other requests."""


@message("{what} at {where} ended the transaction of a batch while its handler was working: {problem}")
class BatchTimedOut(Unavailable):
    """The server's time limit for transactions is shorter than the run time of the handler. The batch is read again."""

    setting: str  # the setting of the server, or of a pooler, that ended the transaction


@message("{what} is not possible yet: {problem}")
class PrerequisitePending(Unavailable):
    """Another process or a transaction has to finish first. `what`: the action that is not possible yet."""


@message("""sequence {sequence} is at {head} and was at {seen}: its database, or the sequence alone, went back to an
    earlier state; the stream continues in a new timeline""")
class SequenceWentBack(Retry):
    """A sequence of the database has gone back to an earlier value."""

    sequence: str
    seen: int  # the earlier value
    head: int  # the value now


@message("""stream {stream}: the rows with ID {id} differ from the rows that were published: the database, or its
    sequence alone, was restored""")
class FactsReplaced(Retry):
    """The database has other rows for an ID than the rows that were published."""

    stream: str
    id: int


@message("{it.cause}")
class LeaseLost(Retry):
    """Another process took the lease, or this process gave it up, and must not publish: docs/design.md, rule 6."""

    own: int  # the token of this process
    newest: int  # the newest token that this process has read; 0 if Postgres has no token
    was_given_up: bool = False  # this process gave up the lease

    @property
    def cause(self) -> str:
        """Why this process does not have the lease, as text for the message."""
        if self.newest > self.own:
            return f"the lease was taken over: this process has token {self.own}, the newest token is {self.newest}"
        if self.was_given_up:
            return f"this process gave up the lease with token {self.own}, and publishes nothing more with this token"
        return f"Postgres no longer has the lease with token {self.own}: its row was deleted or restored"


@message("""Postgres has {found}, but this batch follows {wanted}: commits were lost (a failover, or a restored backup);
    the query starts again from the positions in Postgres""")
class ChainBroken(Retry):
    """A batch does not follow the newest batch or position in Postgres (docs/design.md, rule 3)."""

    wanted: str  # the batch or the writer's position that this batch follows, as text for the message
    found: str  # the batch or the writer's position that Postgres has, as text for the message


@message("""{records} records had more facts than fit into memory: the rest of the batch is read again, at first in
    batches of at most {max_records} records""")
class BatchTooLarge(Retry):
    """The facts of a batch did not fit into memory."""

    records: int  # the number of records of the batch
    max_records: int  # the largest number of records of the next query's first batch


@message("stream {stream} did not reach {token} within {seconds:g} s: {it.progress}")
class NotReached(Retry):
    """A wait for a token has reached its time limit."""

    stream: str
    token: str  # the token that the caller waited for
    position: str | None  # the token of the stream's positions; None: Redis has no position of the stream
    seconds: float  # the duration of the wait
    allocated: int | None = None  # the highest ID that any record of the stream has named; None if not known
    is_ahead: bool = False  # the token is beyond `allocated`
    may_exist: bool = True  # False: Redis and Postgres have no stream of this name

    @property
    def progress(self) -> str:
        """The stream's position and the cause of the wait, as text for the message."""
        if self.position is None:
            return "Redis has no position of the stream"
        if not self.is_ahead:
            return f"it is at {self.position}"
        return (
            f"it is at {self.position}, and the highest ID in the records that Tidemark has read is {self.allocated}:"
            " the record with the token's ID has not arrived (the relay or the pipeline has lag, see `tidemark"
            " status`), or the token belongs to another stream or database"
        )


@message("""Postgres rejects the effects of batch {batch}: {problem}; no single record causes it, so the next batch
    reads at most {max_records} records""")
class ContentRefused(Retry):
    """Postgres rejects the effects of a batch, and no single record is the cause."""

    batch: int  # the number of the batch
    problem: str
    max_records: int  # the largest number of records of the next batch


@message("""Postgres rejects the effects of {records} records: {problem}; the records go to the dead letters as
    not_storable, and the batch is read again without them""")
class RecordsRefused(Retry):
    """Postgres rejects the effects of some records of a batch."""

    records: int  # the number of these records
    problem: str
    offsets: Mapping[str, Mapping[int, Sequence[int]]]  # topic -> partition -> offsets of these records


@message("the query starts again: {what} changed")
class ConfigurationChanged(Retry):
    """A configuration changed that is read only when a query starts."""

    what: str  # names the configuration


@message("the query failed: {problem}")
class QueryFailed(Retry):
    """A query of Spark ended with an error. The next query repeats the batch."""

    problem: str  # the innermost cause that Spark names


class Reject(TidemarkError):
    """One record, token or command is wrong and is rejected. Other records, tokens and commands are not affected."""

    hint = "Correct the value that the message names. Nothing else is affected."


@message("{reason}: {detail}")
class BadRecord(Reject):
    """A record, or a command of an operator, is rejected."""

    reason: str  # one of streaming.values.limits.Reason, or a code of a command such as `replayed_before`
    detail: str  # what is wrong, and in which field


@message("stream {stream}: a row is rejected: {problem}")
class BadRow(Reject):
    """A writer rejects a row of a fact, for example because the row is not JSON or the fact is too large."""

    stream: str
    problem: str


@message("""this transaction has not reserved ID {id} of stream {stream}, or has completed it: reserve and complete the
    ID in one transaction, and do not use an ID of a savepoint that was rolled back""")
class NotReserved(Reject):
    """A writer was called to complete an ID that its transaction has not reserved, or has already completed."""

    stream: str
    id: int


@message("invalid positions {text!r}: {problem}")
class BadToken(Reject):
    """A text is not a positions token, or not a set of IDs, or does not fit the stream."""

    text: str
    problem: str


class BadCommand(Reject):
    """A text line of the replication protocol is not a command (docs/reference/protocol.md)."""


@message("""no record of stream {stream} was published: check its name; a wait for a stream that is created later
    needs a longer grace""")
class StreamNotKnown(Reject):
    """No record of a stream was published."""

    stream: str


class Stopping(TidemarkError):
    """The process was asked to stop during a wait. The next start repeats the wait."""


@message("Spark is not running: {problem}; start the pipeline again, it continues from its stored position")
class SparkDied(TidemarkError):
    """Spark ended, or did not start. The process must end, and its supervisor starts it again."""

    problem: str


class Stop(TidemarkError):
    """A person must act. A command prints the text and the hint, and ends with exit code 2 (`exit_on_error`)."""

    hint = "Correct what the message names, then start the program again: it continues from its stored position."


@message("{name}: {problem}")
class BadSetting(Stop):
    """A setting or an option has an invalid value."""

    name: str  # the name of the setting or option
    problem: str


@message("""cannot write the checkpoint to {path} ({problem}): give this user write permission, or set another location
    with TIDEMARK_CHECKPOINT or TIDEMARK_CHECKPOINT_STORE""")
class CheckpointNotWritable(Stop):
    """This user cannot write to the location of Spark's checkpoint."""

    path: str
    problem: str


@message("topic {topic} does not exist: create it with `tidemark topics`, or set TIDEMARK_KAFKA_CREATE_TOPICS=true")
class TopicMissing(Stop):
    """A topic of Kafka does not exist."""

    topic: str


@message("""topic {topic} has cleanup.policy={policy}; Tidemark needs {needed}: a clean-up by another policy removes
    records that are needed. Run: kafka-configs --alter --topic {topic} --add-config cleanup.policy={needed}""")
class WrongCleanupPolicy(Stop):
    """A topic has another `cleanup.policy` than Tidemark needs."""

    topic: str
    policy: str  # the policy that the topic has
    needed: str


@message("""topic {topic} had {was} partitions and has {now}: records of one stream may be in two partitions now,
    without an order between them; stop all writers, let the pipeline read the remaining records, start the pipeline
    once with --accept partitions, then start the writers""")
class PartitionsChanged(Stop):
    """A topic has another number of partitions than at the last start."""

    topic: str
    was: int  # number of partitions
    now: int


@message("""topic {topic} was deleted and created again (id {was}, now {now}): records may be lost; restart the writers
    so that they join again, and start the pipeline once with --accept loss""")
class TopicReplaced(Stop):
    """A topic was deleted and created again."""

    topic: str
    was: str  # Kafka's ID of the topic
    now: str


@message("""{topic}[{partition}]: the next offset to read is {wanted}, but the partition begins at {earliest}: records
    were removed before they were read, usually by retention; raise retention.ms, then start the pipeline once with
    --accept loss (lost records leave gaps, which block positions until the writers join again)""")
class RecordsGone(Stop):
    """Kafka removed records before the pipeline read them, usually because of retention."""

    topic: str
    partition: int
    wanted: int  # the next offset to read
    earliest: int  # the oldest offset that Kafka has


@message("""{topic}[{partition}]: the next offset to read is {wanted}, but the partition ends at {end}: the brokers lost
    records that were read already (an unclean leader election, or disks restored from an older copy); restart the
    writers so that they join again, and start the pipeline once with --accept loss""")
class RecordsBeyondEnd(Stop):
    """The brokers lost records that the pipeline has read."""

    topic: str
    partition: int
    wanted: int  # the next offset to read
    end: int  # the end offset of the partition


@message("the database has schema version {found} and this Tidemark needs {wanted}: {it.remedy}")
class SchemaMismatch(Stop):
    """This Tidemark cannot use the schema of the database."""

    found: int  # the version of the schema
    wanted: int  # the version for which this Tidemark was written
    command: str = "tidemark migrate"  # the command that migrates the schema

    @property
    def remedy(self) -> str:
        """What to do, for the message."""
        return (
            f"run `{self.command}`"
            if self.found < self.wanted
            else "upgrade this Tidemark, which is older than the database"
        )


@message("""this is Tidemark {ours} and the pipeline of this database has or had version {pipeline}: the versions may
    differ by one minor version; upgrade the older one, or downgrade the newer one, by one minor version at a time""")
class VersionSkew(Stop):
    """The versions of this Tidemark and of the pipeline differ by more than one minor version."""

    ours: str  # version of this Tidemark
    pipeline: str  # version of the pipeline that has, or last had, the lease


@message("""the database was created with {was} shards and TIDEMARK_SHARDS is {now}: set TIDEMARK_SHARDS={was}, or start
    the pipeline once with --accept shards, which loads the states from Postgres""")
class ShardsChanged(Stop):
    """TIDEMARK_SHARDS differs from the number of shards in the database."""

    was: int  # the number in the database
    now: int  # the setting


@message(
    "the state of a stream has format {found} and this Tidemark reads formats up to {known}: upgrade this Tidemark"
)
class StateTooNew(Stop):
    """A newer Tidemark has encoded the state of a stream."""

    found: int  # the format of the state
    known: int  # the newest format that this Tidemark reads


@message("sequence {sequence}: {problem}; {do}")
class UnsuitableSequence(Stop):
    """The IDs of a sequence cannot be announced safely: docs/design.md 4b."""

    sequence: str
    problem: str
    do: str  # what a person has to do


@message("""fact {id} of stream {stream} in tidemark.append_outbox is not JSON ({problem}): another program has written
    to the table; correct the rows of the fact""")
class MalformedFact(Stop):
    """A row of the table `tidemark.append_outbox` is not JSON."""

    stream: str
    id: int
    problem: str


@message("""reader {reader} has read stream {stream} in {was} mode and cannot continue in {now} mode, because the two
    modes have different kinds of positions: use {was} mode, or give the reader a new name, which reads the stream from
    the start""")
class ReaderModeChanged(Stop):
    """A reader has stored positions of another mode than its present mode."""

    reader: str
    stream: str
    was: str
    now: str


@message("""reader {reader} has another number of partitions than {other}, which has a stored place in stream {stream}:
    use the same number as {other}, or another name for the reader; or let all partitions reach the same place, stop the
    readers, and run the function tidemark_reader.repartition, which `tidemark follow migrate` installs""")
class ReaderPartitionsChanged(Stop):
    """Two readers of one name have different numbers of partitions."""

    reader: str
    stream: str
    other: str  # the stored name of the other reader, with its partition


@message("""stream {stream}: Redis no longer has all late completions after number {after} up to {number}: give the
    reader the dsn of Tidemark's Postgres, which has all of them""")
class LateUnknown(Stop):
    """Redis no longer has all late completions that a reader needs."""

    stream: str
    after: int  # number of the newest late completion that the reader knows
    number: int  # number of the newest late completion


@message("""stream {stream}: a completion of {writer} in ({prev}, {id}] came late, and the range has rows of other
    writers or without a writer: name the writer column of the table, Table(..., writer=...), and fill the column in
    each row of that range""")
class LateNeedsWriter(Stop):
    """A reader cannot find the rows of a late completion without the writer of each row."""

    stream: str
    writer: str
    prev: int
    id: int


@message("""the row with ID {id} cannot be converted to Python values ({problem}): leave the column out with Table(...,
    columns=...), read a view that casts the column, or register a loader with psycopg""")
class RowUnreadable(Stop):
    """psycopg cannot convert a row of the table."""

    id: str  # the value of the row's ID column, as text
    problem: str


@message("""reader {reader} of stream {stream}: a COMMIT or ROLLBACK on the connection ended the transaction of a batch,
    so the reader's position was not stored with the effects of the batch: remove the statement, and check which effects
    of the batch were committed""")
class TransactionEnded(Stop):
    """A handler ended the transaction of a batch."""

    reader: str
    stream: str


@message("""reader {reader} of stream {stream} is in use by another {kind}: give each {kind} a reader of its own;
    readers with one name take turns""")
class ReaderInUse(Stop):
    """Two threads or tasks use one reader object at the same time."""

    reader: str
    stream: str
    kind: str  # thread or task


class ExtraMissing(Stop, ImportError):
    """An optional library is not installed. `name`: the missing module. `extra`: the extra that installs it."""

    def __init__(self, what: str, module: str, extra: str) -> None:
        super().__init__(f"{what} needs {module}, which is not installed: pip install 'tidemark-streams[{extra}]'")
        self.name = module
        self.extra = extra

    @classmethod
    def for_import_error(cls, error: ModuleNotFoundError, what: str, extra: str) -> "ExtraMissing":
        """Create the error for a feature whose import failed.

        Args:
            error: the error of the import. Raised again if the missing module is Tidemark's own.
            what: the feature, for the message.
            extra: the extra of the package that installs the missing module.
        """
        if (module := (error.name or "").partition(".")[0]) in {"", "tidemark"}:
            raise error
        return cls(what, module, extra)


@message("{what} at {where} rejected the request: {problem}; {do}")
class Refused(Stop):
    """A server refused a request, and would refuse it again: for example a wrong password or a missing right."""

    what: str  # the server: Kafka, Postgres or Redis
    where: str  # its address, without secrets
    problem: str
    do: str  # what a person has to do


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the program with the short form of a Tidemark error instead of a traceback.

    For the outermost block of a program. Writes `TidemarkError.short` to standard error. Ctrl-C ends the program
    without a message. Other errors are raised unchanged, and so are exception groups that contain another error.

    Raises:
        SystemExit: with code 2 for a `Stop`, 1 for another Tidemark error and 130 for Ctrl-C.
    """
    try:
        yield
    except TidemarkError as error:
        code = _report(error)
    except BaseExceptionGroup as group:
        ours, others = group.split(TidemarkError)
        if ours is None or others is not None:
            raise
        code = _report(_first_error(ours))
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells report it
    else:
        return
    raise SystemExit(code)  # outside of the handlers, so that the exception has no context to print


def _report(error: TidemarkError) -> int:
    """Write the error to standard error, and return the exit code."""
    sys.stderr.write(f"error: {error.short}\n")
    return 2 if isinstance(error, Stop) else 1


def _first_error(group: BaseExceptionGroup[TidemarkError]) -> TidemarkError:
    first = group.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first
