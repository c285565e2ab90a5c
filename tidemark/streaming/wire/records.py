"""The records on Kafka (docs/design.md 3): typed structs, encoding, and decoding with one exact reason for rejection.

`read` defines the meaning of records. `streaming.ingest.decode` is faster for batches of records. It accepts a record
only if `read` would accept it with the same content, and leaves all others to `read`.

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
"""The `epoch` of an operator's record without this field: the current epoch of the writer. Not a legal epoch."""

MAX_NAME_LENGTH: Final = 255
"""The largest number of characters in the name of a stream or writer."""

MAX_TRANSACTIONS: Final = 10
"""The largest number of `transactions` of an OPEN."""

MAX_TRANSACTION_LENGTH: Final = 500
"""The largest number of characters of each of the `transactions` of an OPEN, and of `blocked`."""

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

    RDATA, VOID and POSITION are edges. JOIN, RETIRE, SKIP and OPEN are markers. The number 3 is `ROW`.
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
"""The kind, in columns, of a batch row: an RDATA with `"id": "batch"`, or a further row of a fact in a RUN."""


class _Record(msgspec.Struct, kw_only=True, frozen=True, gc=False, omit_defaults=True, tag_field="kind"):
    stream: RecordName
    writer: RecordWriter


class _EdgeRecord(_Record, kw_only=True, frozen=True):
    epoch: Epoch = 0


class _OverridableRecord(_Record, kw_only=True, frozen=True):
    """A record that operators may send too, on the control topic with `by` and `why`.

    The default `epoch` is the writer's current epoch on the control topic, and 0 on the facts topic. `beyond`: `id` may
    be beyond the stream's allocated IDs; ignored on the facts topic.
    """

    epoch: Epoch = CURRENT_EPOCH
    by: str | None = None
    why: str | None = None
    beyond: bool = False


class Rdata(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.RDATA.name):
    """A row of the fact `id`, which is complete. If `id` is `"batch"`, the ID comes with the last row of the fact."""

    prev: Id | UnsetType = UNSET
    id: Id | Literal["batch"]
    row: Raw


class Void(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.VOID.name):
    """`id` is complete and has no fact, usually because the transaction was rolled back."""

    prev: Id
    id: Id


class Position(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.POSITION.name):
    """The writer has no ID in `(prev, id]`."""

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


class Timeline(msgspec.Struct, frozen=True):
    """The state of the database in which a writer joined. Shows whether the database was restored.

    If `after` is not the token of the writer's last known start, the database was restored. If a JOIN is sent again for
    the same start, both tokens are the same again.

    Attributes:
        database: a value that changes when the database is restored, such as its system identifier and its Postgres
            timeline; None if it is unknown.
        start: a new token that this start of the writer stored in the database.
        after: the token of the writer's previous start, as the database had it.
    """

    database: str | None
    start: str
    after: str | None = None


class Join(_OverridableRecord, kw_only=True, frozen=True, tag=Kind.JOIN.name):
    """A new epoch begins, and all IDs of the writer up to `id` are complete.

    Attributes:
        unseen: True if open IDs up to `id` may be facts that nobody announced.
        published: according to the database, earlier epochs of the writer published no ID beyond this one, and no
            published fact up to this ID is lost. The new epoch publishes facts beyond `id` again.
    """

    id: Id
    unseen: bool = False
    published: Id | None = None
    timeline: Timeline | None = None


class Retire(_OverridableRecord, kw_only=True, frozen=True, tag=Kind.RETIRE.name):
    """All IDs of the writer up to `id` are complete, and no record of the writer follows."""

    id: Id


class Skip(_OverridableRecord, kw_only=True, frozen=True, tag=Kind.SKIP.name):
    """An operator settles `(prev, id]` without evidence."""

    prev: Id
    id: Id


class Open(_EdgeRecord, kw_only=True, frozen=True, tag=Kind.OPEN.name):
    """A report of what blocks the writer, for people. Moves no position. Each OPEN replaces the previous one.

    Attributes:
        transactions: the transactions with the writer's open IDs, one line of text for each.
        blocked: why the writer sends no new record of the stream; empty if it is not blocked.
        heartbeat: the writer sends at least one record of the stream within this many seconds; 0: no promise.
    """

    transactions: Annotated[
        list[Annotated[str, Meta(max_length=MAX_TRANSACTION_LENGTH)]], Meta(max_length=MAX_TRANSACTIONS)
    ]
    blocked: Annotated[str, Meta(max_length=MAX_TRANSACTION_LENGTH)] = ""
    heartbeat: Annotated[int, Meta(ge=0, le=MAX_HEARTBEAT_SECONDS)] = 0


Marker = Join | Retire | Skip
Record = Rdata | Void | Position | FactRun | Open | Marker

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_NAME = re.compile(rf"[^{_NOT_IN_NAMES}]{{1,{MAX_NAME_LENGTH}}}")


def kind_of(record: Record) -> Kind:
    return Kind[str(record.__struct_config__.tag)]


def row(value: object) -> Raw:
    """Encode a JSON value as the opaque `row` of an RDATA."""
    return Raw(_encoder.encode(value))


def format_row(row: Raw) -> str:
    """The JSON of a row, without newlines. Removes the newlines that a sender may have put between tokens."""
    text = bytes(row)
    return (msgspec.json.format(text, indent=-1) if b"\n" in text or b"\r" in text else text).decode()


def encode(record: Record) -> bytes:
    """Encode a record as the value of a Kafka message, without fields that have their default.

    The key of the message must be the stream's name in UTF-8.
    """
    return _encoder.encode(record)


def is_name(name: str) -> bool:
    """Whether `name` is a legal name of a stream."""
    return _NAME.fullmatch(name) is not None


def is_writer(name: str) -> bool:
    """Whether `name` is a legal name of a writer."""
    return name != ANY_WRITER and is_name(name)


def explain_bad_name(name: str) -> str:
    """Explain why `name` is not a legal name of a stream or writer."""
    begin = name[: MAX_NAME_LENGTH + 1]
    return (
        f"{begin!r} is not a legal name: use 1 to {MAX_NAME_LENGTH} characters, without white space, control characters"
        f" and invisible characters; `{ANY_WRITER}` alone is reserved"
    )


def read(value: bytes | None, key: bytes | None, topic: Topic) -> Record:
    """Decode and check one message.

    Raises:
        BadRecord: the record is not valid. If several reasons apply, the error has the first one in this order: the
            JSON, its fields (missing, then of the wrong type, then out of range), names, key, topic, `by` and `why`,
            the order of `prev` and `id`.
    """
    record = decode(value)
    is_any_writer = isinstance(record, Retire) and topic is Topic.CONTROL and record.writer == ANY_WRITER
    for field, name, is_legal in (
        ("stream", record.stream, is_name(record.stream)),
        ("writer", record.writer, is_any_writer or is_writer(record.writer)),
    ):
        if not is_legal:
            raise BadRecord(Reason.BAD_NAME, f"{field} {explain_bad_name(name)}")
    if isinstance(record, Marker) and record.epoch == CURRENT_EPOCH and topic is Topic.FACTS:
        record = msgspec.structs.replace(record, epoch=0)
    if key != record.stream.encode():
        raise BadRecord(Reason.KEY_MISMATCH, f"the key is {key!r} and the stream {record.stream!r}")
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
    """The `prev` of an RDATA with an ID. If the field is missing, the ID next to `id` towards 0.

    Raises:
        ValueError: the record is a batch row.
    """
    if isinstance(record.id, str):
        raise ValueError("a batch row has no ID")
    if record.prev is not UNSET:
        return record.prev
    return record.id - 1 if record.id > 0 else record.id + 1


def decode(value: bytes | None) -> Record:
    """Decode one message without checking its key, topic and names. Raises the `BadRecord` of `read`."""
    if value is None:
        raise BadRecord(Reason.NOT_JSON, "the message has no value")
    try:
        value.decode()  # msgspec does not check UTF-8 in values that it skips
        return _decoder.decode(value)
    except (ValueError, RecursionError) as error:
        raise diagnose(value, error) from None


def _check_topic(record: Record, topic: Topic) -> None:
    kind = kind_of(record).name
    if not isinstance(record, Marker):
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


_KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(Record)}
_FIELDS: Final = {kind: msgspec.structs.fields(kind) for kind in _KINDS.values()}
_INTEGER = re.compile(rb"-?[0-9]+")

_any = msgspec.json.Decoder(Raw)
_list = msgspec.json.Decoder(list[Raw])
_object = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str)
_id = msgspec.json.Decoder(Id)
_batch = msgspec.json.Decoder(Literal["batch"])
_TYPES: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "stream": _text,
    "writer": _text,
    "row": _any,
    "rows": msgspec.json.Decoder(list[list[Raw]]),
    **{field.name: msgspec.json.Decoder(field.type) for field in _FIELDS[Open][-3:]},
    "unseen": msgspec.json.Decoder(bool),
    "published": msgspec.json.Decoder(Id | None),
    "beyond": msgspec.json.Decoder(bool),
    "timeline": msgspec.json.Decoder(Timeline | None),
    "by": msgspec.json.Decoder(str | None),
    "why": msgspec.json.Decoder(str | None),
}


def diagnose(value: bytes, error: Exception) -> BadRecord:
    """Find the reason why `decode` rejected `value`. `error` is the error that msgspec or the UTF-8 decoder raised."""
    try:
        value.decode()
        _any.decode(value)
    except (ValueError, RecursionError) as problem:
        return BadRecord(Reason.NOT_JSON, str(problem))
    try:
        fields = {name: bytes(raw) for name, raw in _object.decode(value).items()}
    except msgspec.ValidationError as problem:
        return BadRecord(Reason.NOT_AN_OBJECT, str(problem))
    if "kind" not in fields:
        return BadRecord(Reason.MISSING_FIELD, "kind is missing")
    if not _accepts(_text, fields["kind"]):
        return BadRecord(Reason.WRONG_TYPE, "kind is not a string")
    kind = _KINDS.get(_text.decode(fields["kind"]))
    if kind is None:
        return BadRecord(Reason.UNKNOWN_KIND, f"kind {_excerpt(fields['kind'])} is none of {', '.join(_KINDS)}")
    for field in _FIELDS[kind]:
        if field.required and field.name not in fields:
            return BadRecord(Reason.MISSING_FIELD, f"{field.name} is missing")
    given = {field.name: fields[field.name] for field in _FIELDS[kind] if field.name in fields}
    for name, raw in given.items():
        if not _is_of_its_type(kind, name, raw):
            label, part = _faulty_part(name, raw)
            return BadRecord(Reason.WRONG_TYPE, f"{label} is {_excerpt(part)}")
    for name, raw in given.items():
        for label, number in _integers(name, raw):
            if not _accepts(_id, number):
                return BadRecord(Reason.OUT_OF_64_BITS, f"{label} is {_excerpt(number)}")
    if given.get("epoch", b"").startswith(b"-"):
        return BadRecord(Reason.NEGATIVE_EPOCH, f"epoch is {_excerpt(given['epoch'])}")
    return BadRecord(Reason.WRONG_TYPE, str(error))  # the field occurs twice, and only its first value is wrong


def _is_of_its_type(kind: type[Record], name: str, raw: bytes) -> bool:
    if name in _TYPES:
        return _accepts(_TYPES[name], raw)
    if name == "ids":
        return _accepts(_list, raw) and 0 < len(_list.decode(raw)) == len([*_integers(name, raw)])
    return _INTEGER.fullmatch(raw) is not None or (kind is Rdata and name == "id" and _accepts(_batch, raw))


def _faulty_part(name: str, raw: bytes) -> tuple[str, bytes]:
    """The label and JSON of the first list entry with the wrong type, or of the whole field."""
    if name in ("ids", "rows") and _accepts(_list, raw):
        for index, entry in enumerate(map(bytes, _list.decode(raw))):
            if not (_INTEGER.fullmatch(entry) if name == "ids" else _accepts(_list, entry)):
                return f"{name}[{index}]", entry
    return name, raw


def _integers(name: str, raw: bytes) -> Iterator[tuple[str, bytes]]:
    """The label and JSON of each integer in a field."""
    if name == "ids":
        for index, entry in enumerate(map(bytes, _list.decode(raw))):
            if _INTEGER.fullmatch(entry):
                yield f"ids[{index}]", entry
    elif _INTEGER.fullmatch(raw):
        yield name, raw


def _accepts(decoder: msgspec.json.Decoder[Any], raw: bytes) -> bool:
    try:
        decoder.decode(raw)
    except ValueError:
        return False
    return True


def _excerpt(raw: bytes) -> str:
    return raw[:80].decode(errors="replace")
