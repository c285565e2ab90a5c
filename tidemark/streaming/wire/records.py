"""The records on Kafka (docs/design.md 3): typed structs, encoding, and decoding with one exact reason for rejection.

`read` defines the meaning of records. `streaming.ingest.decode` has faster code for batches. The faster code accepts a
record only if `read` would accept the record with the same content, and leaves all other records to `read`.

Integers are JSON integers: `1.0` and `1e3` have the wrong type. Unknown fields of a kind are ignored. IDs are signed.
"""

import re
from collections.abc import Iterator
from enum import Enum, IntEnum
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from tidemark.common.errors import BadRecord
from tidemark.streaming.values.limits import Reason

MAX_ID: Final = 2**63 - 1

ANY_WRITER: Final = "*"
"""The `writer` of an operator's RETIRE of all writers that never joined. Not a legal name of a writer."""

CURRENT_EPOCH: Final = -1
"""Stands for the writer's current epoch in an operator's record that has no `epoch`. Not a legal epoch."""

MAX_NAME_LENGTH: Final = 255
"""The largest number of characters in the name of a stream or writer."""

MAX_TRANSACTIONS: Final = 10
"""The largest number of `transactions` of an OPEN."""

MAX_TRANSACTION_LENGTH: Final = 500
"""The largest number of characters in one item of `transactions` and in `blocked` of an OPEN."""

MAX_HEARTBEAT_SECONDS: Final = 7 * 24 * 3600
"""The largest `heartbeat` of an OPEN, in seconds."""

# Unicode's Default_Ignorable_Code_Point (zero-width and bidirectional control characters), and other invisible
# characters. Names that differ only in these characters would look the same.
_INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_NOT_IN_NAMES = rf"\s\x00-\x1f\x7f-\x9f{_INVISIBLE}"
_name_schema: Final = {"minLength": 1, "maxLength": MAX_NAME_LENGTH, "not": {"pattern": f"[{_NOT_IN_NAMES}]"}}
_writer_schema: Final = {"allOf": [_name_schema, {"not": {"const": ANY_WRITER}}]}

# For the JSON Schema only: msgspec decodes any text, and `read` rejects a bad name with its own reason.
RecordName = Annotated[str, Meta(extra_json_schema=_name_schema)]
RecordWriter = Annotated[str, Meta(extra_json_schema=_writer_schema)]

Id = Annotated[int, Meta(ge=-MAX_ID, le=MAX_ID)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_ID)]


class Topic(Enum):
    """The topic of a record: writers send facts, operators send control records."""

    FACTS = "facts"
    CONTROL = "control"


class Kind(IntEnum):
    """The kinds of records (docs/design.md 3). `kind` on Kafka is the name; columns, runs and markers have the number.

    RDATA, VOID and POSITION are edges; a RUN is a chain of edges. JOIN, RETIRE, SKIP and OPEN are markers. The number 3
    belongs to `ROW`.
    """

    RDATA = 0
    VOID = 1
    POSITION = 2
    JOIN = 4
    RETIRE = 5
    SKIP = 6
    OPEN = 8
    RUN = 9


ROW: Final = 3
"""The number of batch rows, in columns of kinds. A batch row is an RDATA with `"id": "batch"`, or a row of a fact in a
RUN after the first row.
"""


class _Record(msgspec.Struct, kw_only=True, frozen=True, gc=False, omit_defaults=True, tag_field="kind"):
    stream: RecordName
    writer: RecordWriter


class _EdgeRecord(_Record, kw_only=True, frozen=True):
    epoch: Epoch = 0


class _OverridableRecord(_Record, kw_only=True, frozen=True):
    """A record that operators may send too, on the control topic with `by` and `why`.

    Attributes:
        epoch: if the field is missing, 0 on the facts topic, and the writer's current epoch on the control topic.
        beyond: True if `id` may be beyond the stream's allocated IDs. Ignored on the facts topic.
    """

    epoch: Epoch = CURRENT_EPOCH
    by: str | None = None
    why: str | None = None
    beyond: bool = False


class Rdata(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.RDATA.name):
    """A row of the fact `id`, which is complete. A missing `prev` means the neighbour of `id` towards 0.

    If `id` is `"batch"`, more rows of the fact follow, and the last row has the ID.
    """

    prev: Id | UnsetType = UNSET
    id: Id | Literal["batch"]
    row: Raw


class Void(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.VOID.name):
    """`id` is complete and has no fact, usually because its transaction was rolled back.

    None of the IDs between `prev` and `id` is the writer's.
    """

    prev: Id
    id: Id


class Position(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.POSITION.name):
    """No ID in `(prev, id]` is the writer's. `id` may belong to another writer and be open."""

    prev: Id
    id: Id


class FactRun(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.RUN.name):
    """A chain of edges in one record, equivalent to one record per edge.

    The first edge is `(prev, ids[0]]`, and edge `i` is `(ids[i-1], ids[i]]`. `rows[i]` has the rows of the fact
    `ids[i]`. If `rows[i]` is empty, the ID was rolled back.
    """

    prev: Id
    ids: Annotated[list[Id], Meta(min_length=1)]
    rows: list[list[Raw]]


class DatabaseStart(msgspec.Struct, frozen=True):
    """Identifies the writer's database and this start of the writer, so that a restored database can be detected.

    If `after` is not the token of the writer's last known start, the database was restored. If a JOIN is sent again for
    the same start, `start` and `after` are the same again.

    Attributes:
        database: a value that changes when the database is restored, such as its system identifier and its Postgres
            timeline; None if it is unknown.
        start: a new token that this start of the writer stored in the database.
        after: the token of the writer's previous start that was in the database; None if there was none.
    """

    database: str | None
    start: str
    after: str | None = None


class Join(_OverridableRecord, kw_only=True, frozen=True, tag=Kind.JOIN.name):
    """A new epoch begins, and all IDs of the writer up to `id` are complete.

    Attributes:
        unseen: True if open IDs up to `id` may be facts that nobody announced.
        published: an upper bound: according to the database, earlier epochs of the writer published no ID beyond it.
            The database still has all published facts up to this ID, and the new epoch publishes those beyond `id`
            again. None: not known.
        timeline: the writer's database and start; None if the writer does not report them.
    """

    id: Id
    unseen: bool = False
    published: Id | None = None
    timeline: DatabaseStart | None = None


class Retire(_OverridableRecord, kw_only=True, frozen=True, tag=Kind.RETIRE.name):
    """All IDs of the writer up to `id` are complete, and no record of the writer follows."""

    id: Id


class Skip(_OverridableRecord, kw_only=True, frozen=True, tag=Kind.SKIP.name):
    """An operator settles the writer's open IDs in `(prev, id]`, without evidence. For the control topic only."""

    prev: Id
    id: Id


class Open(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.OPEN.name):
    """A report of what blocks the writer, for people. Moves no position. Replaces the writer's previous OPEN.

    Attributes:
        transactions: the open transactions with IDs of the writer, one line of text for each.
        blocked: why the writer sends no new record of the stream; empty if it is not blocked.
        heartbeat: the writer sends at least one record of the stream within this many seconds; 0: no promise.
    """

    transactions: Annotated[
        list[Annotated[str, Meta(max_length=MAX_TRANSACTION_LENGTH)]], Meta(max_length=MAX_TRANSACTIONS)
    ]
    blocked: Annotated[str, Meta(max_length=MAX_TRANSACTION_LENGTH)] = ""
    heartbeat: Annotated[int, Meta(ge=0, le=MAX_HEARTBEAT_SECONDS)] = 0


OverridableRecord = Join | Retire | Skip
Record = Rdata | Void | Position | FactRun | Open | OverridableRecord

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_NAME_PATTERN = re.compile(rf"[^{_NOT_IN_NAMES}]{{1,{MAX_NAME_LENGTH}}}")


def kind_of(record: Record) -> Kind:
    return Kind[str(record.__struct_config__.tag)]


def encode_row(value: object) -> Raw:
    """Encode a value as JSON for the `row` of an RDATA. Tidemark does not read the content of rows."""
    return Raw(_encoder.encode(value))


def format_row(row: Raw) -> str:
    """The JSON of a row in one line. If the row has newlines, removes all white space between its tokens."""
    text = bytes(row)
    return (msgspec.json.format(text, indent=-1) if b"\n" in text or b"\r" in text else text).decode()


def encode(record: Record) -> bytes:
    """Encode a record as the value of a Kafka message, without fields that have their default.

    The key of the message must be the stream's name in UTF-8.
    """
    return _encoder.encode(record)


def is_name(name: str) -> bool:
    """Whether `name` is a legal name of a stream. Names of writers have one more rule: see `is_writer_name`."""
    return _NAME_PATTERN.fullmatch(name) is not None


def is_writer_name(name: str) -> bool:
    """Whether `name` is a legal name of a writer, which must not be `*`."""
    return name != ANY_WRITER and is_name(name)


def explain_bad_name(name: str) -> str:
    """Explain why `name` is not a legal name of a stream or writer."""
    begin = name[: MAX_NAME_LENGTH + 1]
    return (
        f"{begin!r} is not a legal name: use 1 to {MAX_NAME_LENGTH} characters, without white space, control characters"
        f" and invisible characters; no writer may be called `{ANY_WRITER}`"
    )


def read(value: bytes | None, key: bytes | None, topic: Topic) -> Record:
    """Decode and check one message.

    Returns:
        The record. A JOIN or RETIRE without `epoch` has epoch 0 on the facts topic. On the control topic, each record
        without `epoch` has `CURRENT_EPOCH`.

    Raises:
        BadRecord: the record is not valid. If several reasons apply, the error has the first one. Order of the reasons:
            the JSON, missing fields, fields of the wrong type, fields out of range, names, key, topic, `by` and `why`,
            the order of `prev` and `id`.
    """
    record = decode(value)
    is_any_writer = isinstance(record, Retire) and topic is Topic.CONTROL and record.writer == ANY_WRITER
    for field, name, is_legal in (
        ("stream", record.stream, is_name(record.stream)),
        ("writer", record.writer, is_any_writer or is_writer_name(record.writer)),
    ):
        if not is_legal:
            raise BadRecord(Reason.BAD_NAME, f"{field} {explain_bad_name(name)}")
    if isinstance(record, OverridableRecord) and record.epoch == CURRENT_EPOCH and topic is Topic.FACTS:
        record = msgspec.structs.replace(record, epoch=0)
    if key != record.stream.encode():
        raise BadRecord(Reason.KEY_MISMATCH, f"the key is {key!r}, but must be the stream name {record.stream!r}")
    _check_topic(record, topic)
    if isinstance(record, Void | Position | Skip):
        _check_range(record.prev, record.id)
    elif isinstance(record, Rdata) and record.id != "batch":
        _check_range(effective_prev(record), record.id)
    elif isinstance(record, FactRun):
        _check_chain(record)
    elif isinstance(record, Join) and (record.published or 0) * record.id < 0:
        raise BadRecord(
            Reason.MIXED_SIGN, f"published {record.published} and id {record.id} lie on different sides of 0"
        )
    return record


def effective_prev(record: Rdata) -> int:
    """The `prev` of an RDATA with an ID. If the field `prev` is missing, this is the neighbour of `id` towards 0.

    Raises:
        ValueError: the record is a batch row, which has no ID.
    """
    if isinstance(record.id, str):
        raise ValueError("a batch row has no ID")
    if record.prev is not UNSET:
        return record.prev
    return record.id - 1 if record.id > 0 else record.id + 1


def decode(value: bytes | None) -> Record:
    """Decode one message, and check only the JSON and its fields: no names, key, topic, or order of `prev` and `id`.

    Raises:
        BadRecord: the JSON or a field is not valid, with the same reason as from `read`.
    """
    if value is None:
        raise BadRecord(Reason.NOT_JSON, "the message has no value")
    try:
        value.decode()  # msgspec does not check UTF-8 in values that it skips
        return _decoder.decode(value)
    except (ValueError, RecursionError) as error:
        raise diagnose(value, error) from None


def _check_topic(record: Record, topic: Topic) -> None:
    kind = kind_of(record).name
    if not isinstance(record, OverridableRecord):
        if topic is Topic.CONTROL:
            raise BadRecord(Reason.WRONG_TOPIC, f"{kind} belongs on the facts topic")
    elif topic is Topic.CONTROL:
        if not ((record.by or "").strip() and (record.why or "").strip()):
            raise BadRecord(Reason.MISSING_FIELD, f"{kind} on the control topic needs `by` and `why`")
        for field, text in (("by", record.by), ("why", record.why)):
            if text is not None and "\0" in text:
                raise BadRecord(Reason.BAD_TEXT, f"{field} has the character NUL, which Postgres cannot store")
    elif isinstance(record, Skip) or record.by is not None or record.why is not None:
        raise BadRecord(Reason.WRONG_TOPIC, f"{kind} by an operator belongs on the control topic")


def _check_chain(run: FactRun) -> None:
    if len(run.rows) != len(run.ids):
        raise BadRecord(Reason.UNEVEN_RUN, f"ids has {len(run.ids)} entries and rows has {len(run.rows)}")
    for index, (prev, id) in enumerate(pairwise([run.prev, *run.ids])):
        _check_range(prev, id, f"ids[{index}]")


def _check_range(prev: int, id: int, name: str = "id") -> None:
    if prev * id < 0:
        raise BadRecord(Reason.MIXED_SIGN, f"prev {prev} and {name} {id} lie on different sides of 0")
    if abs(id) <= abs(prev):
        raise BadRecord(Reason.ID_NOT_BEYOND_PREV, f"{name} {id} is not beyond prev {prev}")


_RECORD_TYPES: Final = {str(type_.__struct_config__.tag): type_ for type_ in get_args(Record)}
_FIELDS: Final = {type_: msgspec.structs.fields(type_) for type_ in _RECORD_TYPES.values()}
_INTEGER_PATTERN = re.compile(rb"-?[0-9]+")

_json_decoder = msgspec.json.Decoder(Raw)
_list_decoder = msgspec.json.Decoder(list[Raw])
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_text_decoder = msgspec.json.Decoder(str)
_id_decoder = msgspec.json.Decoder(Id)
_batch_decoder = msgspec.json.Decoder(Literal["batch"])
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "stream": _text_decoder,
    "writer": _text_decoder,
    "row": _json_decoder,
    "rows": msgspec.json.Decoder(list[list[Raw]]),
    **{field.name: msgspec.json.Decoder(field.type) for field in _FIELDS[Open][-3:]},
    "unseen": msgspec.json.Decoder(bool),
    "published": msgspec.json.Decoder(Id | None),
    "beyond": msgspec.json.Decoder(bool),
    "timeline": msgspec.json.Decoder(DatabaseStart | None),
    "by": msgspec.json.Decoder(str | None),
    "why": msgspec.json.Decoder(str | None),
}


def diagnose(value: bytes, error: Exception) -> BadRecord:
    """Find the reason why `decode` rejected `value`.

    `error`: the error of msgspec or of the UTF-8 decoder. Its text is used if no other reason is found.
    """
    try:
        value.decode()
        _json_decoder.decode(value)
    except (ValueError, RecursionError) as problem:
        return BadRecord(Reason.NOT_JSON, str(problem))
    try:
        fields = {name: bytes(raw) for name, raw in _object_decoder.decode(value).items()}
    except msgspec.ValidationError as problem:
        return BadRecord(Reason.NOT_AN_OBJECT, str(problem))
    if "kind" not in fields:
        return BadRecord(Reason.MISSING_FIELD, "kind is missing")
    if not _accepts(_text_decoder, fields["kind"]):
        return BadRecord(Reason.WRONG_TYPE, "kind is not a string")
    record_type = _RECORD_TYPES.get(_text_decoder.decode(fields["kind"]))
    if record_type is None:
        return BadRecord(Reason.UNKNOWN_KIND, f"kind {_excerpt(fields['kind'])} is none of {', '.join(_RECORD_TYPES)}")
    for field in _FIELDS[record_type]:
        if field.required and field.name not in fields:
            return BadRecord(Reason.MISSING_FIELD, f"{field.name} is missing")
    given = {field.name: fields[field.name] for field in _FIELDS[record_type] if field.name in fields}
    for name, raw in given.items():
        if not _is_of_its_type(record_type, name, raw):
            label, part = _faulty_part(name, raw)
            return BadRecord(Reason.WRONG_TYPE, f"{label} is {_excerpt(part)}")
    for name, raw in given.items():
        for label, number in _integers(name, raw):
            if not _accepts(_id_decoder, number):
                return BadRecord(Reason.OUT_OF_64_BITS, f"{label} is {_excerpt(number)}")
    if given.get("epoch", b"").startswith(b"-"):
        return BadRecord(Reason.NEGATIVE_EPOCH, f"epoch is {_excerpt(given['epoch'])}")
    return BadRecord(
        Reason.WRONG_TYPE, str(error)
    )  # for example, a field occurs twice, and only its first value is wrong


def _is_of_its_type(record_type: type[Record], name: str, raw: bytes) -> bool:
    if name in _DECODERS:
        return _accepts(_DECODERS[name], raw)
    if name == "ids":
        return _accepts(_list_decoder, raw) and 0 < len(_list_decoder.decode(raw)) == len([*_integers(name, raw)])
    return _INTEGER_PATTERN.fullmatch(raw) is not None or (
        record_type is Rdata and name == "id" and _accepts(_batch_decoder, raw)
    )


def _faulty_part(name: str, raw: bytes) -> tuple[str, bytes]:
    """The label and the JSON of the first entry of a wrong type in `ids` or `rows`; otherwise of the whole field."""
    if name in ("ids", "rows") and _accepts(_list_decoder, raw):
        for index, entry in enumerate(map(bytes, _list_decoder.decode(raw))):
            if not (_INTEGER_PATTERN.fullmatch(entry) if name == "ids" else _accepts(_list_decoder, entry)):
                return f"{name}[{index}]", entry
    return name, raw


def _integers(name: str, raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the label and the JSON of the integer in a field, or of each integer in the list `ids`."""
    if name == "ids":
        for index, entry in enumerate(map(bytes, _list_decoder.decode(raw))):
            if _INTEGER_PATTERN.fullmatch(entry):
                yield f"ids[{index}]", entry
    elif _INTEGER_PATTERN.fullmatch(raw):
        yield name, raw


def _accepts(decoder: msgspec.json.Decoder[Any], raw: bytes) -> bool:
    try:
        decoder.decode(raw)
    except ValueError:
        return False
    return True


def _excerpt(raw: bytes) -> str:
    return raw[:80].decode(errors="replace")
