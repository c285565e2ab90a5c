"""Where a reader stands, as one word of text that it gives back to go on. Opaque to clients. Pure."""

import binascii
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from tidemark.app.behind import StreamId
from tidemark.app.sidecar.problems import BadRequest
from tidemark.common.errors import BadToken
from tidemark.sinks.postgres.changes import DurableMark
from tidemark.sinks.reader.events import Place
from tidemark.sinks.reader.token import Token

MAX_CURSOR_BYTES = 1 << 20  # bytes that a cursor may unpack to: a hostile one must not fill the memory


class _EncodedPlace(msgspec.Struct, array_like=True, frozen=True):
    linear: StreamId
    positions: dict[str, StreamId]
    late: StreamId


_MARK = re.compile(r"t([0-9]{1,19})\.([0-9]{1,15})", re.ASCII)
_DECODER = msgspec.msgpack.Decoder(dict[str, _EncodedPlace])


def encode_places(places: Mapping[str, Place]) -> str:
    plain = {stream: _EncodedPlace(it.linear, dict(it.positions), it.late) for stream, it in places.items()}
    return "p" + urlsafe_b64encode(zlib.compress(msgspec.msgpack.encode(plain))).decode().rstrip("=")


def decode_places(text: str) -> dict[str, Place]:
    """Raises `BadRequest`."""
    try:
        if not text.startswith("p"):
            raise ValueError("it does not begin with p")
        packed = urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4))
        stored = _DECODER.decode(_decompressed(packed))
    except (ValueError, binascii.Error, zlib.error, msgspec.MsgspecError):
        raise BadRequest(f"{text[:80]!r} is none that this interface gave out") from None
    return {stream: Place(it.linear, it.positions, it.late) for stream, it in stored.items()}


def encode_mark(mark: DurableMark) -> str:
    return f"t{mark.lease}.{mark.time}"


def decode_event_id(text: str) -> dict[str, Place] | DurableMark:
    """What an event's ID says: a place in each stream, or a mark. Raises `BadRequest`."""
    if text.startswith("t"):
        found = _MARK.fullmatch(text)
        if found is None or any(int(it) >= 1 << 63 for it in found.groups()):
            raise BadRequest(f"{text[:80]!r} is none that this interface gave out")
        return DurableMark(int(found[1]), int(found[2]))
    return decode_places(text)


def decode_since(stream: str, text: str) -> Place | Token:
    """What `since=` says: a token, or the `next` of a page. Raises `BadRequest`."""
    if text.startswith("p"):
        place = decode_places(text).get(stream)
        if place is None:
            raise BadRequest(f"that cursor is not of stream {stream}")
        return place
    return decode_token(text)


def decode_token(text: str) -> Token:
    """Raises `BadRequest`."""
    try:
        return Token.parse(text)
    except BadToken as problem:
        raise BadRequest(str(problem)) from None


def _decompressed(packed: bytes) -> Any:
    stream = zlib.decompressobj()
    data = stream.decompress(packed, MAX_CURSOR_BYTES)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError("too long, or cut off")
    return data
