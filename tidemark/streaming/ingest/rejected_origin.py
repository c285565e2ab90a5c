"""What a refused record says of itself: whose fact it may be, as far as anybody can read it. Pure.

Where a record that may be a fact is turned away, what its writer settles next may hold that fact
(docs/decisions/0013-turned-away.md). `claims` says of whom that is to be remembered.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw

from tidemark.streaming.wire.records import MAX_ID, Kind, Topic, is_name, is_writer
from tidemark.streaming.wire.runs import EVERYTHING, TurnedAway

_NOTHING: Final = Raw(b"null")


class _AnyRecord(msgspec.Struct):
    """The fields of any record, each as it stands."""

    kind: Raw = _NOTHING
    stream: Raw = _NOTHING
    writer: Raw = _NOTHING
    epoch: Raw = _NOTHING
    id: Raw = _NOTHING
    ids: Raw = _NOTHING
    by: Raw = _NOTHING


_object: Final = msgspec.json.Decoder(_AnyRecord)
_text: Final = msgspec.json.Decoder(str)
_number: Final = msgspec.json.Decoder(int)
_numbers: Final = msgspec.json.Decoder(list[int])

_EDGES: Final = {Kind.RDATA.name, Kind.VOID.name, Kind.POSITION.name}


def claims(value: bytes, key: bytes, topic: Topic, offset: int) -> Iterator[TurnedAway]:
    """Whose fact a refused record may be: that of the stream that it names, and of the one that its key names.

    None where it is certain to be no fact: a SKIP, a RETIRE, an OPEN, or a JOIN that an operator signed. A writer's own
    JOIN is none either, but that writer may have reserved IDs since.
    """
    try:
        found = _object.decode(value)
    except (ValueError, RecursionError):
        found = _AnyRecord()
    kind = _string(found.kind)
    by_operator = found.by is not _NOTHING or (topic is Topic.CONTROL and found.epoch is _NOTHING)
    if kind in (Kind.SKIP.name, Kind.RETIRE.name, Kind.OPEN.name) or (kind == Kind.JOIN.name and by_operator):
        return
    stream, keyed = _string(found.stream), _utf8(key)
    if is_name(stream):
        writer, epoch = _string(found.writer), 0 if found.epoch is _NOTHING else _integer(found.epoch)
        if is_writer(writer) and epoch is not None and 0 <= epoch <= MAX_ID:
            yield TurnedAway(stream, writer, epoch, _reach(kind, found), offset)
        else:
            yield TurnedAway(stream, None, 0, EVERYTHING, offset)
    if keyed != stream and is_name(keyed):
        yield TurnedAway(keyed, None, 0, EVERYTHING, offset, only_known=is_name(stream))


def _reach(kind: str, found: _AnyRecord) -> int:
    """Up to where the fact may be."""
    if kind == Kind.JOIN.name:
        return 0
    number = 0
    if kind == Kind.RUN.name:
        with suppress(ValueError):
            number = max(map(abs, _numbers.decode(found.ids)), default=0)
    elif kind in _EDGES:
        number = abs(_integer(found.id) or 0)
    return number if 0 < number <= MAX_ID else EVERYTHING


def _string(raw: Raw) -> str:
    """Empty, which is no name, where it is no string."""
    try:
        return _text.decode(raw)
    except ValueError:
        return ""


def _integer(raw: Raw) -> int | None:
    try:
        return _number.decode(raw)
    except ValueError:
        return None


def _utf8(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return ""
