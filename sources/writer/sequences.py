"""Streams of a writer, and the sequence behind each: checked (`problem`, which is pure), made, and read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from psycopg import sql

from tidemark.streaming.direction import Direction, DirectionName
from tidemark.streaming.errors import BadSetting, SequenceUnfit
from tidemark.streaming.postgres_session import Connection
from tidemark.streaming.records import is_name, is_writer, why_no_name


@dataclass(frozen=True, slots=True)
class Stream:
    """`sequence` (may have a schema: `shop.orders_id_seq`) is `<name>_id_seq` where it is not given."""

    name: str
    sequence: str = ""
    direction: DirectionName = "forward"

    def __post_init__(self) -> None:
        if not self.sequence:
            object.__setattr__(self, "sequence", f"{self.name}_id_seq")

    @property
    def towards(self) -> Direction:
        return Direction.named(self.direction)


def named(streams: Iterable[str | Stream], instance: str, direction: DirectionName) -> tuple[Stream, ...]:
    """The streams, those given by name alone in this direction. Raises `BadSetting` for a name that Kafka may not see.

    Checked here, because a writer of a bad name would only find its facts among the dead letters.
    """
    found = tuple(
        each if isinstance(each, Stream) else Stream(each, direction=direction)
        for each in ([streams] if isinstance(streams, str) else streams)
    )
    if not is_writer(instance):
        raise BadSetting("instance", why_no_name(instance))
    for each in found:
        if not is_name(each.name):
            raise BadSetting("stream", why_no_name(each.name))
    if len({each.name for each in found}) < len(found) or not found:
        raise BadSetting("streams", "name each stream once, and at least one")
    return found


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence as the catalogue has it. `filled` are columns (`shop.orders.id`) whose default takes from it."""

    oid: int
    type: str
    increment: int
    lowest: int
    highest: int
    cache: int
    cycle: bool
    persistent: bool
    filled: list[str]


def problem(found: Sequence, towards: Direction) -> tuple[str, str] | None:
    """Why a stream cannot live on it, and what to do; None where it can."""
    if found.cache != 1:
        return "sessions take numbers from it in advance, so IDs would not ascend: CACHE", "alter sequence {} cache 1"
    if found.increment != towards:
        return (
            f"it goes by {found.increment} and the stream goes {towards.name.lower()}: INCREMENT",
            f"alter sequence {{}} increment {towards.value}",
        )
    if found.type != "bigint":
        return f"it is of type {found.type} and stream IDs have 64 bits", "alter sequence {} as bigint"
    if found.cycle:
        return "it would begin again at its end, and an ID is given once: CYCLE", "alter sequence {} no cycle"
    if not found.persistent:
        return "it is unlogged or temporary, and would begin again after a crash", "alter sequence {} set logged"
    if towards is Direction.FORWARD and found.lowest < 1:
        return (
            "it may give 0 or negative numbers to a stream that goes forward: MINVALUE",
            "alter sequence {} minvalue 1",
        )
    if towards is Direction.BACKWARD and found.highest > -1:
        return (
            "it may give 0 or positive numbers to a stream that goes backward: MAXVALUE",
            "alter sequence {} maxvalue -1",
        )
    if found.filled:
        # Nobody would announce that row, and every heartbeat says that nothing is there (docs/design.md, rule 1).
        column = found.filled[0]
        table, _, name = column.rpartition(".")
        return (
            f"an INSERT that leaves out {column} takes a number from it that no writer knows of: DEFAULT",
            f"alter table {table} alter column {name} drop default (or drop identity, and make the sequence anew)",
        )
    return None


def inspect(connection: Connection, name: str) -> Sequence | None:
    """The sequence called so (its schema may be left out, as in any statement), None where there is none."""
    row = connection.execute(
        """
        select s.seqrelid, format_type(s.seqtypid, null), s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle,
            c.relpersistence = 'p',
            array(
                select format('%%I.%%I.%%I', t.relnamespace::regnamespace, t.relname, a.attname)
                from pg_depend d
                left join pg_attrdef e on d.classid = 'pg_attrdef'::regclass and d.deptype = 'n' and e.oid = d.objid
                join pg_attribute a on (a.attrelid, a.attnum) = (e.adrelid, e.adnum)
                join pg_class t on t.oid = a.attrelid
                where d.refclassid = 'pg_class'::regclass and d.refobjid = s.seqrelid
                union
                select format('%%I.%%I.%%I', t.relnamespace::regnamespace, t.relname, a.attname)
                from pg_depend d
                join pg_attribute a on (a.attrelid, a.attnum) = (d.refobjid, d.refobjsubid)
                join pg_class t on t.oid = a.attrelid
                where d.classid = 'pg_class'::regclass and d.objid = s.seqrelid and d.deptype = 'i'
            )
        from pg_sequence s join pg_class c on c.oid = s.seqrelid
        where s.seqrelid = to_regclass(%s)
        """,
        [name],
    ).fetchone()
    return None if row is None else Sequence(*row)


def require(connection: Connection, streams: Iterable[Stream]) -> dict[str, int]:
    """The sequences' OIDs by stream. Raises `SequenceUnfit` for the first that is missing or breaks a rule."""
    found = {}
    for stream in streams:
        sequence = inspect(connection, stream.sequence)
        if sequence is None:
            do = f"run `tidemark writer migrate --sequence {stream.sequence}`"
            raise SequenceUnfit(stream.sequence, f"it does not exist (stream {stream.name})", do)
        refuse_unfit(stream.sequence, sequence, stream.towards)
        found[stream.name] = sequence.oid
    return found


def refuse_unfit(name: str, found: Sequence, towards: Direction) -> None:
    if (why := problem(found, towards)) is not None:
        raise SequenceUnfit(name, why[0], why[1].format(name))


def create(connection: Connection, name: str, towards: Direction) -> None:
    """A sequence as a stream wants it: bigint, from 1 up or from -1 down, no cache, no cycle."""
    connection.execute(
        sql.SQL("create sequence {} as bigint increment by {} start with {} cache 1 no cycle").format(
            sql.Identifier(*name.split(".")), sql.Literal(towards.value), sql.Literal(towards.value)
        )
    )


def allocated(connection: Connection, sequences: Mapping[str, tuple[int, Direction]]) -> dict[str, int]:
    """For each stream, given its sequence's OID and direction: up to where IDs were given out, as a magnitude.

    Where none was yet, what comes before the first: 0, or 1 for a sequence that starts with 2.
    """
    rows = connection.execute(
        """
        select case when exists (select from pg_class where pg_class.oid = given.oid)
               then abs(tidemark.sequence_head(given.oid, given.sign)) end
        from unnest(%s::oid[], %s::integer[]) with ordinality as given (oid, sign, number) order by number
        """,
        [[oid for oid, _ in sequences.values()], [towards.value for _, towards in sequences.values()]],
    ).fetchall()
    found = dict(zip(sequences, (row[0] for row in rows), strict=True))
    for stream, allocated in found.items():
        if allocated is None:
            raise SequenceUnfit(stream, "the sequence of this stream was dropped", "make it again, beyond the last ID")
    return found
