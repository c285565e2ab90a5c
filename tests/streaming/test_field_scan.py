"""What compiled code takes from records, against `records.read`, and how few it leaves of those that programs write."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming.test_records import BAD, GOOD, NUMBERED, RUN, VOID, raw
from tidemark.streaming.ingest import field_scan, kernels
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.record_batch import Edges, MissingWriterEpoch, RecordBatch, WriterEpochs
from tidemark.streaming.wire.records import ROW, Topic, read

ODD = [*(value or b"" for value, _ in BAD.values()), *GOOD.values()]
Record = tuple[bytes | None, bytes | None]


def fetched(records: Sequence[Record]) -> RecordBatch:
    keys, values = zip(*records, strict=True)
    numbers = np.arange(100, 100 + len(records))
    return RecordBatch.of(keys, values, numbers, numbers + 1000)


def decoded(records: Sequence[Record], few: int) -> tuple[list[tuple[Any, ...]], dict[Any, Any], list[Any], list[Any]]:
    """The edges with the names of their writer epochs, what was rejected, the markers, and what is held back."""
    decoder = Decoder(Topic.FACTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "MIN_COMPILED_BYTES", few)
        decoder.add(fetched(records))
    writer_epochs, ranks = decoder.writer_epochs.ranked()
    edges = decoder.edges()
    rows = zip(*(column.tolist() for column in edges._replace(writer_epochs=ranks[edges.writer_epochs])), strict=True)
    named = [
        (writer_epochs[rank], kind, [] if kind == ROW else edge, offset, time)
        for rank, kind, *edge, offset, time in rows
    ]
    return named, dict(decoder.rejected_offsets), decoder.markers, decoder.possible_facts


def scanned(records: Sequence[Record]) -> tuple[Edges, WriterEpochs, list[int]]:
    """What compiled code takes, and the places of those that it leaves."""
    decoder = Decoder(Topic.FACTS)
    left = decoder._scan(fetched(records))
    return decoder.edges(), decoder.writer_epochs, [*left]


# -- text that is nearly a record

names = st.sampled_from(
    ["events", "caches", "é", "€", "𝄞", "w", "*", "a b", "", "x" * 255, "x" * 256, "\x7f", "\u2028"]
)
numbers = st.one_of(
    st.integers(-3, 9), st.sampled_from([10**18 - 1, 10**18, 2**63 - 1, -(2**63) + 1, 2**63, 2**64, 10**30])
)
LONG = st.text('ab "\\\x1f\x7fé', min_size=12, max_size=40)
TEXTS = ["\ud83d\ude00", "\ud83d", "\udc00\ud83d", "😀", "\ud7ff\ue000", "\\u0000", "\\ud83d"]
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.sampled_from(TEXTS)
    | LONG
    | st.text(max_size=5)
    | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ODDITIES: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from(["RDATA", "VOID", "POSITION", "RUN", "JOIN", "OPEN", "rdata", 1]),
    "stream": names,
    "writer": names,
    "epoch": numbers | values,
    "prev": numbers | values,
    "id": numbers | st.just("batch") | values,
    "ids": st.lists(st.integers(-4, 9), max_size=4) | st.lists(numbers, max_size=2) | values,
    "row": values,
    "rows": st.lists(st.lists(values, max_size=3), max_size=4) | values,
    "other": values,
    "kindly": values,
}


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """A good record, or one with an oddity or two."""
    sign, prev, wide = draw(st.sampled_from([1, 1, -1])), draw(st.integers(0, 9)), draw(st.integers(1, 3))
    record: dict[str, Any] = {
        "kind": draw(st.sampled_from(["RDATA", "VOID", "POSITION", "RUN"])),
        "stream": "events",
        "writer": "w",
    }
    record |= {"epoch": draw(st.integers(0, 2)), "prev": sign * prev}
    if record["kind"] == "RUN":
        record["ids"] = [sign * (prev + at) for at in range(1, wide + 1)]
        record["rows"] = draw(st.lists(st.lists(values, max_size=2), min_size=wide, max_size=wide))
    else:
        record["id"] = sign * (prev + wide)
    if record["kind"] == "RDATA":
        record["row"] = draw(values)
    for name in draw(st.lists(st.sampled_from([*ODDITIES]), max_size=2)):
        if draw(st.integers(0, 3)):
            record[name] = draw(ODDITIES[name])
        else:
            record.pop(name, None)
    return record


EDITS = b'{}[]",:\\ \n\t0123456789-+.eEtrufalsn\x00\x1f\x7f\x80\xbf\xc3\xe2\xed\xf0\xff'


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Records in any layout, right and wrong; of some a byte or two were changed, lost or repeated."""
    record = draw(fields())
    order = draw(st.just(list(record)) | st.permutations(list(record)))
    text = json.dumps(
        {name: record[name] for name in order},
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])),
    )
    found = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        found[at : at + draw(st.integers(0, 2))] = bytes(
            draw(st.lists(st.sampled_from(EDITS) | st.integers(0, 255), max_size=2))
        )
    if draw(st.integers(0, 9)) == 0:  # a field twice
        found[-1:] = b"," + found[1:]
    return bytes(found)


keys = st.sampled_from([*[b"events"] * 9, "é".encode(), b"", None])


@settings(max_examples=examples(800))
@given(st.lists(st.tuples(keys, texts()), min_size=1))
def test_compiled_code_says_of_any_bytes_what_reading_one_by_one_says(records: list[Record]) -> None:
    assert decoded(records, 0) == decoded(records, 2**62)


@pytest.mark.parametrize("value", ODD)
def test_every_part_of_an_odd_record_is_what_it_is_one_by_one(value: bytes) -> None:
    """Cut off anywhere, alone and before another record, whose bytes are no part of it."""
    cuts = sorted({*range(min(len(value), 300)), len(value)})
    records: list[Record] = [(b"events", part) for at in cuts for part in (value[:at], raw(VOID))]
    assert decoded(records, 0) == decoded(records, 2**62)


@settings(max_examples=examples(400))
@given(st.binary(max_size=12) | values.map(lambda value: json.dumps(value).encode()))
@example(b'"\\uD83D\\udE00"')
@example(b'"\\ud83d\\ud83d"')
@example(b'"\\ude00"')
@example(b'"\\ud83d')
@example(b"[1,]")
@example(b"1e")
@example(b"-1.5E+30")
@example(b"[" * 70 + b"]" * 70)
def test_what_is_passed_over_is_json(text: bytes) -> None:
    data = np.frombuffer(text, np.uint8)
    end = kernels.skip_value(data, 0, len(data))
    assert end <= len(text)
    if end >= 0:
        msgspec.json.decode(text[:end].decode(), type=msgspec.Raw)


@pytest.mark.parametrize("good", [NUMBERED, VOID, {**VOID, "kind": "POSITION"}, RUN], ids=lambda it: it["kind"])
def test_it_knows_every_field_that_facts_have(good: dict[str, Any]) -> None:
    """One that it does not know, because it is new, would be passed over whatever it holds."""
    named = {*type(read(raw(good), b"events", Topic.FACTS)).__struct_fields__, "kind"} - {"row"}
    assert {name for name in named if scanned([(b"events", raw({**good, name: {}}))])[2] == [0]} == named
    assert scanned([(b"events", raw(good))])[2] == []


# -- what programs write is not left


LAYOUTS: list[dict[str, Any]] = [{"separators": (",", ":")}, {}, {"indent": 2}, {"ensure_ascii": False}]


def written(count: int = 500) -> Iterator[Record]:
    """As several encoders write records: compact, with spaces, indented, in another order, not ASCII, escaped."""
    row = {
        "event_id": '$é/+ "quoted"\n',
        "depth": 12,
        "ts": 1.5,
        "ok": [True, False, None, -2.5e-07, {}, []],
        "𝄞": "😀",
    }
    for at in range(count):
        record = [{**NUMBERED, "row": row}, VOID, {**RUN, "rows": [[row, 7], []]}, {**VOID, "kind": "POSITION"}][at % 4]
        record = {**record, "stream": f"events-{at % 7}", "writer": f"wörker-{at % 3}", "trace": {"id": "x"}}
        if at % 5 == 0:
            record = dict(reversed(record.items()))
        layout = LAYOUTS[at // 4 % 4]
        text = json.dumps(record, **layout)
        if "wörker" not in text:
            text = text.replace("w\\u00f6rker", "wörker")
        yield f"events-{at % 7}".encode(), text.encode()


def test_nothing_is_left_of_what_programs_write() -> None:
    edges, writer_epochs, left = scanned([*written()])
    assert left == []
    assert (edges.size, len(writer_epochs.ranked()[0])) == (500 // 4 * 6, 7 * 3 * 2)


def test_any_number_of_writer_epochs_find_room() -> None:
    """More than the first table holds, with names longer than its room, legal and not, and each met again."""
    streams = [*(f"s{at}" for at in range(3000)), *(f"{'é' * 100}{at}" for at in range(200)), "a b", "", "x" * 256]
    records: list[Record] = [
        (stream.encode(), raw({**VOID, "stream": stream, "epoch": at % 3}).replace(b"\\u00e9", "é".encode()))
        for at, stream in enumerate(streams)
    ]
    edges, writer_epochs, left = scanned([*records, *records])
    every, ranks = writer_epochs.ranked()
    names = [every[rank][0] for rank in ranks[edges.writer_epochs].tolist()]
    assert names == streams[:-3] * 2
    assert left == [at + of for of in (0, len(streams)) for at in range(3200, 3203)]


def test_a_table_that_is_warmed_says_what_it_said_before() -> None:
    """As it is from the second part on, where it is large, and its records are not few beside it."""
    streams = [f"s{at}" for at in range(1200)]
    part = fetched([(stream.encode(), raw({**VOID, "stream": stream})) for stream in streams])
    decoder = Decoder(Topic.FACTS)
    assert decoder._scan(part) == decoder._scan(part) == []
    every, ranks = decoder.writer_epochs.ranked()
    numbers = decoder.edges().writer_epochs  # by their offsets, which both parts share
    assert [every[rank][0] for rank in ranks[numbers].tolist()] == [name for name in streams for _ in range(2)]


def test_writer_epochs_that_share_a_hash_are_told_apart() -> None:
    """Those that are like the wanted one but for a name or the epoch stand where a scan looks first, with its hash."""
    known, records = WriterEpochs(), fetched([(b"events", raw(VOID))])
    full = known.table._replace(names=np.empty(0, np.uint8))
    met = field_scan.scan(records, 0, full, Edges.allocate(100), 0, np.empty(1, np.int64), 0).missing
    for stream, writer, epoch in [("caches", "w1", 0), ("events", "w2", 0), ("events", "w1", 1), ("event", "sw1", 0)]:
        names = np.frombuffer((stream + writer).encode(), np.uint8)
        known.add(MissingWriterEpoch(0, len(stream), len(stream), len(names), epoch, met.hash), names)
    edges = Edges.allocate(100)
    assert field_scan.scan(records, 0, known.table, edges, 0, np.empty(1, np.int64), 0).edge_count == 1
    assert known.table.all()[edges.writer_epochs[0]] == ("events", "w1", 0) == known.table.all()[-1]


def test_every_bit_of_the_seed_counts_for_the_low_bits_of_a_hash() -> None:
    """Else who guesses some of its bits sends names that all share a hash, and a scan of them ends in hours."""
    known, records = WriterEpochs(), fetched([(b"events", raw(VOID))])

    def hashed(seed: int) -> int:
        table = known.table._replace(names=np.empty(0, np.uint8), seed=seed)
        return field_scan.scan(records, 0, table, Edges.allocate(100), 0, np.empty(1, np.int64), 0).missing.hash

    seed = known.table.seed
    low = [(hashed(seed) ^ hashed(seed ^ 1 << bit)) & 0xFFFFFFFF for bit in range(62)]
    assert 0 not in low


def test_names_that_differ_in_high_bits_share_no_hash_whatever_the_seed() -> None:
    """What is taken eight bytes at a time has high bits that a single multiplication leaves where they were."""
    known = WriterEpochs()

    def hashed(stream: str, seed: int) -> int:
        records = fetched([(stream.encode(), raw({**VOID, "stream": stream}))])
        table = known.table._replace(names=np.empty(0, np.uint8), seed=seed)
        return field_scan.scan(records, 0, table, Edges.allocate(100), 0, np.empty(1, np.int64), 0).missing.hash

    pairs = [(8 * "a" + 8 * "a", "aaaaaaa!aaa!aaa!"), (8 * "a", "aaaaaaa!"), (16 * "a", 15 * "a" + "!")]
    for seed in range(0, 1 << 62, 1 << 56):
        assert all(hashed(one, seed) != hashed(other, seed) for one, other in pairs)


def test_room_follows_what_records_say_and_not_their_length() -> None:
    """A broker hands over megabytes at once: rows of any length, and names that are none."""
    long = "x" * 200_000
    rows = [(b"events", raw({**NUMBERED, "row": long}))] * 40
    names = [(f"{long}{at}".encode(), raw({**VOID, "stream": f"{long}{at}"})) for at in range(20)]
    writers = [(b"events", raw({**VOID, "writer": f"{long}{at}"})) for at in range(20)]
    decoder = Decoder(Topic.FACTS)
    left = decoder._scan(fetched([*rows, *names, *writers]))
    assert left == [*range(40, 80)]
    assert decoder._scanned_edges.size < 2 * len(long)
    assert len(decoder.writer_epochs.table.names) < len(long)


def test_names_are_taken_to_their_last_byte() -> None:
    """As long as they may be, and one character more."""
    records: list[Record] = []
    for letter in "xé€𝄞":
        for length in (254, 255, 256):
            name = letter * length
            text = raw({**VOID, "stream": name, "writer": name})
            records.append((name.encode(), json.dumps(json.loads(text), ensure_ascii=False).encode()))
    assert scanned(records)[2] == [2, 5, 8, 11]
    assert decoded(records, 0) == decoded(records, 2**62)


def test_it_is_compiled_once() -> None:
    """Whatever arrays come: for others it would be compiled anew, which takes seconds."""
    few: list[list[Record]] = [[(None, None)], [(b"", b"")], [*written(3)]]
    for some in few:
        scanned(some)
    compiled: Any = field_scan.scan
    assert len(compiled.signatures) == 1
