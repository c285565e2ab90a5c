"""Why the decoder refused a value, found out step by step. Pure."""

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import Raw

from tidemark.common.errors import BadRecord
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Record

_KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(Record)}
_FIELDS: Final = {kind: msgspec.structs.fields(kind) for kind in _KINDS.values()}
_INTEGER = re.compile(rb"-?[0-9]+")

_any = msgspec.json.Decoder(Raw)
_list = msgspec.json.Decoder(list[Raw])
_object = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str)
_id = msgspec.json.Decoder(records.Id)
_batch = msgspec.json.Decoder(Literal["batch"])
_TYPES: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "stream": _text,
    "writer": _text,
    "row": _any,
    "rows": msgspec.json.Decoder(list[list[Raw]]),
    "transactions": msgspec.json.Decoder(_FIELDS[records.Open][-1].type),
    "unseen": msgspec.json.Decoder(bool),
    "told": msgspec.json.Decoder(records.Id | None),
    "beyond": msgspec.json.Decoder(bool),
    "timeline": msgspec.json.Decoder(records.Timeline | None),
    "by": msgspec.json.Decoder(str | None),
    "why": msgspec.json.Decoder(str | None),
}


def diagnosis(value: bytes, error: Exception) -> BadRecord:
    """The one reason why `records.decode` refused `value`, by which it raised `error`."""
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
    if not _takes(_text, fields["kind"]):
        return BadRecord(Reason.WRONG_TYPE, "kind is not a string")
    kind = _KINDS.get(_text.decode(fields["kind"]))
    if kind is None:
        return BadRecord(Reason.UNKNOWN_KIND, f"kind {_shown(fields['kind'])} is none of {', '.join(_KINDS)}")
    for field in _FIELDS[kind]:
        if field.required and field.name not in fields:
            return BadRecord(Reason.MISSING_FIELD, f"{field.name} is missing")
    given = {field.name: fields[field.name] for field in _FIELDS[kind] if field.name in fields}
    for name, raw in given.items():
        if not _is_of_its_type(kind, name, raw):
            place, part = _at_fault(name, raw)
            return BadRecord(Reason.WRONG_TYPE, f"{place} is {_shown(part)}")
    for name, raw in given.items():
        for place, number in _integers(name, raw):
            if not _takes(_id, number):
                return BadRecord(Reason.OUT_OF_64_BITS, f"{place} is {_shown(number)}")
    if given.get("epoch", b"").startswith(b"-"):
        return BadRecord(Reason.NEGATIVE_EPOCH, f"epoch is {_shown(given['epoch'])}")
    return BadRecord(Reason.WRONG_TYPE, str(error))  # a field given twice, wrong the first time


def _is_of_its_type(kind: type[records.Record], name: str, raw: bytes) -> bool:
    if name in _TYPES:
        return _takes(_TYPES[name], raw)
    if name == "ids":
        return _takes(_list, raw) and 0 < len(_list.decode(raw)) == len([*_integers(name, raw)])
    return _INTEGER.fullmatch(raw) is not None or (kind is records.Rdata and name == "id" and _takes(_batch, raw))


def _at_fault(name: str, raw: bytes) -> tuple[str, bytes]:
    """The first entry of a RUN's list that is of the wrong type, or the field as it is; with what it is called."""
    if name in ("ids", "rows") and _takes(_list, raw):
        for index, entry in enumerate(map(bytes, _list.decode(raw))):
            if not (_INTEGER.fullmatch(entry) if name == "ids" else _takes(_list, entry)):
                return f"{name}[{index}]", entry
    return name, raw


def _integers(name: str, raw: bytes) -> Iterator[tuple[str, bytes]]:
    """The integers in a field, each with what it is called."""
    if name == "ids":
        for index, entry in enumerate(map(bytes, _list.decode(raw))):
            if _INTEGER.fullmatch(entry):
                yield f"ids[{index}]", entry
    elif _INTEGER.fullmatch(raw):
        yield name, raw


def _takes(decoder: msgspec.json.Decoder[Any], raw: bytes) -> bool:
    try:
        decoder.decode(raw)
    except ValueError:
        return False
    return True


def _shown(raw: bytes) -> str:
    return raw[:80].decode(errors="replace")
