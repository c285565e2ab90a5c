"""Records in a file, one JSON object a line: what `tidemark tail --json` writes and `tidemark replay` reads.

`key` and `value` are text; of bytes that are none `key_base64` and `value_base64` hold them.
"""

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tidemark.app.printed import printable
from tidemark.app.verbs.explain import clock
from tidemark.common.errors import BadRecord
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.wire import records

LINE: Final = 200  # characters of a record


class RecordedLine(msgspec.Struct, omit_defaults=True):
    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Annotated[int, Meta(ge=0, lt=2**63 - 1)]
    time: Annotated[int, Meta(ge=-1, lt=2**53)]
    key: str | None = None
    value: str | None = None
    key_base64: str | None = None
    value_base64: str | None = None


_decoder: Final = msgspec.json.Decoder(RecordedLine)


def as_line(it: RecordedMessage) -> str:
    told: dict[str, Any] = {"topic": it.topic, "partition": it.partition, "offset": it.offset, "time": it.time}
    for name, data in (("key", it.key), ("value", it.value)):
        if data is None:
            continue
        try:
            told[name] = data.decode()
        except UnicodeDecodeError:
            told[f"{name}_base64"] = data
    return msgspec.json.encode(told).decode()


def from_lines(lines: Iterable[bytes], refuse: Callable[[str], Exception]) -> Iterator[RecordedMessage]:
    """Raises what `refuse` makes of a line that is none of these; empty ones are passed over."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            it = _decoder.decode(line)
            key, value = (
                None
                if text is None and coded is None
                else (text.encode() if text is not None else b64decode(coded or ""))
                for text, coded in ((it.key, it.key_base64), (it.value, it.value_base64))
            )
        except (ValueError, RecursionError) as problem:
            raise refuse(f"line {number} is no record as `tidemark tail --json` writes them: {problem}") from None
        yield RecordedMessage(it.topic, it.partition, it.offset, it.time, key, value)


def as_text(it: RecordedMessage) -> str:
    """In a line for people."""
    what = "no record"
    with suppress(BadRecord):
        record = records.decode(it.value)
        what = f"{records.kind_of(record).name} of {record.writer} in {record.stream}"
    value = (it.value or b"").decode(errors="replace")
    cut = "..." if len(value) > LINE else ""
    when = clock(datetime.fromtimestamp(max(it.time, 0) / 1000, UTC))
    return f"{when} {it.topic}/{it.partition} {it.offset} {printable(what)}: {printable(value[:LINE])}{cut}"
