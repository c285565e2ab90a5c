"""Every error of Tidemark, by who must act.

TidemarkError
├── Retry                 the world will mend it: back off and try again
│   ├── Unavailable(what, where)
│   ├── LeaseLost(held, now)
│   ├── NotReached(stream, token, stands)
│   ├── Rotated(what)
│   └── QueryFailed(problem)
├── Reject                this record is wrong, its neighbours are not: dead-letter it and go on
│   ├── BadRecord(reason, detail)
│   ├── RowTooLarge(stream, size, limit)     a fact that its writer refused: roll its transaction back
│   ├── FactWithoutRow(stream, ids)
│   ├── BadToken(text, problem)
│   ├── BadCommand(problem)
│   └── TokenFromTheFuture(stream, token, head)
├── Stopping              the process was told to end: leave at once, nothing is wrong
├── SparkDied(problem)    this process is of no use any more: whoever started it starts it again
└── Stop                  a person must decide: one line, exit code 2
    ├── BadSetting(name, problem)
    ├── TopicMissing(topic)
    ├── TopicCompacted(topic, policy)
    ├── PartitionsChanged(topic, was, now)
    ├── TopicReplaced(topic)
    ├── RecordsGone(topic, partition, wanted, earliest)
    ├── RecordsBeyondEnd(topic, partition, wanted, end)
    ├── SchemaMismatch(found, wanted)
    ├── VersionSkew(ours, pipeline)
    ├── ShardsChanged(was, now)
    ├── StateTooNew(found, known)
    ├── ChainBroken(stream, writer, position, prev)
    ├── WriterFenced(instance, epoch)
    ├── UnknownWriter(instance, known)
    ├── SequenceUnfit(sequence, problem)
    ├── SequenceSetBack(stream)
    ├── ReaderModeChanged(reader, stream, was, now)
    ├── LateUnknown(stream, after, number)
    ├── LateNeedsWriter(stream, writer)
    ├── ExtraMissing(what, module, extra)    an ImportError too
    └── Refused(what, problem)
"""


class TidemarkError(Exception):
    """Base of all errors that Tidemark raises on purpose. Its text is one line, written for a person."""


class Retry(TidemarkError):
    """The world will mend it: the caller backs off and tries again."""


class Unavailable(Retry):
    """`what` (Kafka, Postgres, Redis) does not answer at `where` (an address without secrets)."""

    def __init__(self, what: str, where: str, problem: str) -> None:
        super().__init__(f"{what} at {where} does not answer: {problem}")
        self.what = what
        self.where = where


class LeaseLost(Retry):
    """Another query holds the lease; nothing of ours may be published any more (docs/design.md, rule 6)."""

    def __init__(self, held: int, now: int) -> None:
        super().__init__(f"the lease was taken over: ours has token {held}, the newest is {now}")
        self.held = held
        self.now = now


class NotReached(Retry):
    """A wait was over before `stream` came as far as `token`; it `stands` there, or None: Redis is recovering."""

    def __init__(self, stream: str, token: str, stands: str | None, seconds: float) -> None:
        found = f"it stands at {stands}" if stands else "Redis knows nothing of it"
        super().__init__(f"stream {stream} did not reach {token} within {seconds:g} s: {found}")
        self.stream = stream
        self.token = token
        self.stands = stands


class Rotated(Retry):
    """A password or certificate for `what` is another now; connections that are open do not take it up."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a secret for {what} has changed")
        self.what = what


class QueryFailed(Retry):
    """Spark ended the query; `problem` is the innermost cause it names. Starting it again replays the batch in hand."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the query failed: {problem}")
        self.problem = problem


class Reject(TidemarkError):
    """One record is wrong; it goes to the dead letters and its neighbours go on."""


class BadRecord(Reject):
    """`reason` is one of `streaming.records.Reason`; `detail` says what was found where."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class RowTooLarge(Reject):
    def __init__(self, stream: str, size: int, limit: int) -> None:
        super().__init__(
            f"a row of stream {stream} has {size} bytes of JSON and Kafka takes {limit}: leave in the row what readers"
            " need to find the fact, or give it in several rows"
        )
        self.stream = stream
        self.size = size
        self.limit = limit


class FactWithoutRow(Reject):
    """To commit it would tell readers that nothing is there, and whatever the transaction wrote would be missed."""

    def __init__(self, stream: str, ids: list[int]) -> None:
        named = ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
        super().__init__(
            f"stream {stream}: {named} reserved and no row given: rolled back; give a row with"
            " facts.add(stream, id, row), or say facts.void(stream, id) where nothing was written"
        )
        self.stream = stream
        self.ids = ids


class BadToken(Reject):
    """`text` does not say how far a stream was read."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"{text!r} is not a token such as m7~first.9: {problem}")
        self.text = text
        self.problem = problem


class BadCommand(Reject):
    """A line of the replication protocol that is no command (docs/protocol.md)."""


class TokenFromTheFuture(Reject):
    """`token` names an ID beyond `head`, the highest that any record of `stream` named: it will not be reached soon."""

    def __init__(self, stream: str, token: str, head: int) -> None:
        super().__init__(
            f"{token} is ahead of stream {stream}, whose writers have come to {head}: the token is of another stream,"
            " or of a database that was restored since"
        )
        self.stream = stream
        self.token = token
        self.head = head


class Stopping(TidemarkError):
    """The process was told to end while it waited; what it waited for is done again after the next start."""


class SparkDied(TidemarkError):
    """The JVM ended or never came up (out of memory, killed), or a cluster dropped it. A new process goes on."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Spark is gone: {problem}; start the pipeline again, it goes on where it was")
        self.problem = problem


class Stop(TidemarkError):
    """A person must decide. Printed as one line; the process ends with exit code 2."""


class BadSetting(Stop):
    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


class CheckpointNotWritable(Stop):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"the checkpoint cannot be kept at {path} ({problem}): let this user write there, or name another place"
            " in TIDEMARK_CHECKPOINT or TIDEMARK_CHECKPOINT_STORE"
        )
        self.path = path


class TopicMissing(Stop):
    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic} does not exist; create it with cleanup.policy=delete,"
            " or set TIDEMARK_KAFKA_CREATE_TOPICS=true"
        )
        self.topic = topic


class TopicCompacted(Stop):
    def __init__(self, topic: str, policy: str) -> None:
        super().__init__(
            f"topic {topic} has cleanup.policy={policy}: compaction keeps one record per stream and destroys the rest;"
            f" set it back: kafka-configs --alter --topic {topic} --add-config cleanup.policy=delete"
        )
        self.topic = topic
        self.policy = policy


class PartitionsChanged(Stop):
    def __init__(self, topic: str, was: int, now: int) -> None:
        super().__init__(
            f"topic {topic} had {was} partitions and has {now}: streams have moved between partitions and lost their"
            " order; stop all writers, let the pipeline read what is left, then start it once with --accept partitions"
            " and restart the writers (gaps that the move left open stay held)"
        )
        self.topic = topic
        self.was = was
        self.now = now


class TopicReplaced(Stop):
    def __init__(self, topic: str, was: str, now: str) -> None:
        super().__init__(
            f"topic {topic} was deleted and created again (id {was}, now {now}): records may be lost; restart the"
            " writers so that they join again, and start the pipeline once with --accept loss"
        )
        self.topic = topic


class RecordsGone(Stop):
    def __init__(self, topic: str, partition: int, wanted: int, earliest: int) -> None:
        super().__init__(
            f"{topic}[{partition}]: the next record to read is {wanted} but the topic now begins at {earliest}:"
            " retention removed records before they were read; raise retention.ms, then start the pipeline once with"
            " --accept loss (what was lost shows as gaps that hold until their writers join again)"
        )
        self.topic = topic
        self.partition = partition
        self.wanted = wanted
        self.earliest = earliest


class RecordsBeyondEnd(Stop):
    def __init__(self, topic: str, partition: int, wanted: int, end: int) -> None:
        super().__init__(
            f"{topic}[{partition}]: the next record to read is {wanted} but the topic ends at {end}: the brokers lost"
            " records that were read already (an unclean election, or an older copy of their disks); restart the"
            " writers so that they join again, and start the pipeline once with --accept loss"
        )
        self.topic = topic
        self.partition = partition
        self.wanted = wanted
        self.end = end


class SchemaMismatch(Stop):
    def __init__(self, found: int, wanted: int, command: str = "tidemark migrate") -> None:
        do = f"run `{command}`" if found < wanted else "upgrade this Tidemark: it is older than its database"
        super().__init__(f"the database has schema version {found} and this Tidemark needs {wanted}: {do}")
        self.found = found
        self.wanted = wanted


class VersionSkew(Stop):
    """The pipeline that has, or had last, the lease is of a version that this process was not tried with."""

    def __init__(self, ours: str, pipeline: str) -> None:
        super().__init__(
            f"this is Tidemark {ours} and the pipeline of this database is, or was last, {pipeline}: they may differ by"
            " one minor version; upgrade the older of them, or roll the newer back, one minor version at a time"
        )
        self.ours = ours
        self.pipeline = pipeline


class ShardsChanged(Stop):
    def __init__(self, was: int, now: int) -> None:
        super().__init__(
            f"the checkpoint and the database were made with {was} shards and TIDEMARK_SHARDS is {now}:"
            f" set TIDEMARK_SHARDS={was}, or start the pipeline once with --accept shards to seed it anew from Postgres"
        )
        self.was = was
        self.now = now


class StateTooNew(Stop):
    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"a stream's state has format {found} and this Tidemark knows formats up to {known}: upgrade this Tidemark"
        )
        self.found = found
        self.known = known


class ChainBroken(Stop):
    """A batch does not join what Postgres holds (docs/design.md, rule 3): a foreign checkpoint, a restored database."""

    def __init__(self, stream: str, writer: str, position: int, prev: int) -> None:
        super().__init__(
            f"stream {stream}: Postgres holds {writer} at {position} and this batch would go on from {prev}: the"
            " checkpoint is not of this database; set the checkpoint aside (it is disposable) and start again"
        )
        self.stream = stream
        self.writer = writer
        self.position = position
        self.prev = prev


class WriterFenced(Stop):
    """Nothing was written, and nothing can be any more in this process: its place is taken (docs/design.md 4)."""

    def __init__(self, instance: str, epoch: int) -> None:
        super().__init__(
            f"epoch {epoch} of writer {instance} is over: another process was started as {instance}, or an operator"
            " fenced it; end this process (each process needs an instance name of its own)"
        )
        self.instance = instance
        self.epoch = epoch


class UnknownWriter(Stop):
    def __init__(self, instance: str, known: list[str]) -> None:
        super().__init__(f"no writer {instance} ever started on this database; known: {', '.join(known) or 'none'}")
        self.instance = instance
        self.known = known


class SequenceUnfit(Stop):
    """The IDs of a sequence that breaks the rules of docs/design.md 4 would not be safe to announce."""

    def __init__(self, sequence: str, problem: str, do: str) -> None:
        super().__init__(f"sequence {sequence}: {problem}; {do}")
        self.sequence = sequence
        self.problem = problem


class SequenceSetBack(Stop):
    def __init__(self, stream: str, problem: str) -> None:
        super().__init__(
            f"{problem}: the database was set back (a backup, a lost standby, setval); restart this process so that it"
            " joins again, and readers learn that they must repair"
        )
        self.stream = stream


class ReaderModeChanged(Stop):
    def __init__(self, reader: str, stream: str, was: str, now: str) -> None:
        super().__init__(
            f"reader {reader} has read stream {stream} in {was} mode and would now go on in {now} mode, which cannot"
            " tell what it has read: go on as before, or give the reader a new name (it then begins anew)"
        )
        self.reader = reader
        self.stream = stream
        self.was = was
        self.now = now


class LateUnknown(Stop):
    """Completions came late, and their entries were cut off the list in Redis before this reader saw them."""

    def __init__(self, stream: str, after: int, number: int) -> None:
        super().__init__(
            f"stream {stream}: late completions numbered {after + 1} to {number} are not listed in Redis any more:"
            " give the reader the dsn of Tidemark's Postgres, which keeps them"
        )
        self.stream = stream
        self.after = after
        self.number = number


class LateNeedsWriter(Stop):
    """Which rows of a range belong to a late completion cannot be told without the name of the writer's column."""

    def __init__(self, stream: str, writer: str, prev: int, id: int) -> None:
        super().__init__(
            f"stream {stream}: a completion of {writer} in ({prev}, {id}] came late, and other writers have rows there"
            " too: tell the reader the table's writer column, Table(..., writer=...)"
        )
        self.stream = stream
        self.writer = writer


class ExtraMissing(Stop, ImportError):
    """`what` needs the library `module`, which `extra` of ours brings and this installation left out."""

    def __init__(self, what: str, module: str, extra: str) -> None:
        super().__init__(f"{what} needs {module}, which is not installed: pip install 'tidemark[{extra}]'")
        self.name = module
        self.extra = extra

    @classmethod
    def instead_of(cls, error: ModuleNotFoundError, what: str, extra: str) -> "ExtraMissing":
        """Of what was raised where `what` was imported. Raises `error` itself where the module is one of ours."""
        module = (error.name or "").partition(".")[0]
        if module in {"", "tidemark"}:
            raise error
        return cls(what, module, extra)


class Refused(Stop):
    """A server answered and said no (wrong password, missing right, unknown database)."""

    def __init__(self, what: str, where: str, problem: str, do: str) -> None:
        super().__init__(f"{what} at {where} refused us: {problem}; {do}")
        self.what = what
        self.where = where
