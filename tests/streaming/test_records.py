"""Records one by one: encoding, and the one reason for each kind of bad record."""

import json
from typing import Any

import msgspec
import pytest

from tidemark.common.errors import BadRecord
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import MAX_ID, Topic

NUMBERED = {"kind": "RDATA", "stream": "events", "writer": "w1", "epoch": 3, "prev": 4, "id": 7, "row": {}}
VOID = {"kind": "VOID", "stream": "events", "writer": "w1", "prev": 4, "id": 7}
JOIN = {"kind": "JOIN", "stream": "events", "writer": "w1", "epoch": 3, "id": 7}
OPEN = {"kind": "OPEN", "stream": "events", "writer": "w1", "epoch": 3, "transactions": ["pid 7"]}
RUN = {"kind": "RUN", "stream": "events", "writer": "w1", "epoch": 3, "prev": 4, "ids": [7, 9], "rows": [[{}], []]}
SKIP = {"kind": "SKIP", "stream": "events", "writer": "w1", "prev": 4, "id": 7, "by": "ann", "why": "disk lost"}


def raw(record: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**record, **changes}).encode()


def without(record: dict[str, Any], *names: str) -> bytes:
    return json.dumps({name: value for name, value in record.items() if name not in names}).encode()


def read(value: bytes | None, key: bytes | None = b"events", topic: Topic = Topic.FACTS) -> records.Record:
    return records.read(value, key, topic)


def reason(value: bytes | None, key: bytes | None = b"events", topic: Topic = Topic.FACTS) -> str:
    with pytest.raises(BadRecord) as caught:
        read(value, key, topic)
    return caught.value.reason


BAD: dict[str, tuple[bytes | None, Reason]] = {
    "no value": (None, Reason.NOT_JSON),
    "empty": (b"", Reason.NOT_JSON),
    "blank": (b" \n", Reason.NOT_JSON),
    "cut off": (raw(VOID)[:-1], Reason.NOT_JSON),
    "two records": (raw(VOID) + raw(VOID), Reason.NOT_JSON),
    "two lines": (raw(VOID) + b"\n" + raw(VOID), Reason.NOT_JSON),
    "byte order mark": (b"\xef\xbb\xbf" + raw(VOID), Reason.NOT_JSON),
    "newline in a string": (raw(VOID, x="a|b").replace(b"|", b"\n"), Reason.NOT_JSON),
    "not UTF-8 in a name": (raw(VOID, writer="a|b").replace(b"|", b"\xff"), Reason.NOT_JSON),
    "not UTF-8 in the row": (raw(NUMBERED, row="a|b").replace(b"|", b"\xff"), Reason.NOT_JSON),
    "not UTF-8 in an unknown field": (raw(VOID, x={"y": "|"}).replace(b"|", b"\xc3"), Reason.NOT_JSON),
    "NaN": (raw(VOID, id=float("nan")), Reason.NOT_JSON),
    "half a surrogate pair": (raw(VOID, writer="\ud800"), Reason.NOT_JSON),
    "nested too deep": (raw(NUMBERED, row=1)[:-2] + b"[" * 100_000 + b"]" * 100_000 + b"}", Reason.NOT_JSON),
    "a list": (b"[" + raw(VOID) + b"]", Reason.NOT_AN_OBJECT),
    "a number": (b"12", Reason.NOT_AN_OBJECT),
    "null": (b"null", Reason.NOT_AN_OBJECT),
    "no kind": (without(VOID, "kind"), Reason.MISSING_FIELD),
    "nothing at all": (b"{}", Reason.MISSING_FIELD),
    "kind is a number": (raw(VOID, kind=1), Reason.WRONG_TYPE),
    "kind is null": (raw(VOID, kind=None), Reason.WRONG_TYPE),
    "unknown kind": (raw(VOID, kind="DELETE"), Reason.UNKNOWN_KIND),
    "kind in lower case": (raw(VOID, kind="void"), Reason.UNKNOWN_KIND),
    "two kinds": (raw(VOID)[:-1] + b',"kind":"POSITION"}', Reason.WRONG_TYPE),
    "no stream": (without(VOID, "stream"), Reason.MISSING_FIELD),
    "no writer": (without(JOIN, "writer"), Reason.MISSING_FIELD),
    "no id": (without(NUMBERED, "id"), Reason.MISSING_FIELD),
    "no row": (without(NUMBERED, "row"), Reason.MISSING_FIELD),
    "no prev": (without(VOID, "prev"), Reason.MISSING_FIELD),
    "no prev, backwards": (without({**VOID, "id": -7}, "prev"), Reason.MISSING_FIELD),
    "announcement without prev": (without({**VOID, "kind": "POSITION"}, "prev"), Reason.MISSING_FIELD),
    "missing before wrong": (raw({"kind": "VOID", "stream": 5, "id": 7}), Reason.MISSING_FIELD),
    "stream is a number": (raw(VOID, stream=5), Reason.WRONG_TYPE),
    "beyond is text": (raw(JOIN, beyond="yes"), Reason.WRONG_TYPE),
    "writer is null": (raw(VOID, writer=None), Reason.WRONG_TYPE),
    "epoch is text": (raw(VOID, epoch="3"), Reason.WRONG_TYPE),
    "id is text": (raw(NUMBERED, id="7"), Reason.WRONG_TYPE),
    "id is 7.0": (raw(NUMBERED, id=7.0), Reason.WRONG_TYPE),
    "id is 7e0": (raw(NUMBERED, id="|").replace(b'"|"', b"7e0"), Reason.WRONG_TYPE),
    "id is true": (raw(NUMBERED, id=True), Reason.WRONG_TYPE),
    "prev is null": (raw(NUMBERED, prev=None), Reason.WRONG_TYPE),
    "batch where only facts have rows": (raw(VOID, id="batch"), Reason.WRONG_TYPE),
    "unseen is a number": (raw(JOIN, unseen=1), Reason.WRONG_TYPE),
    "timeline is a number": (raw(JOIN, timeline=1), Reason.WRONG_TYPE),
    "published is text": (raw(JOIN, published="7"), Reason.WRONG_TYPE),
    "published on the other side of 0": (raw(JOIN, published=-9), Reason.MIXED_SIGN),
    "timeline has no start": (raw(JOIN, timeline={"database": "d/1"}), Reason.WRONG_TYPE),
    "no transactions": (without(OPEN, "transactions"), Reason.MISSING_FIELD),
    "transactions are text": (raw(OPEN, transactions="pid 7"), Reason.WRONG_TYPE),
    "a transaction is null": (raw(OPEN, transactions=[None]), Reason.WRONG_TYPE),
    "more transactions than anybody reads": (raw(OPEN, transactions=["pid 7"] * 11), Reason.WRONG_TYPE),
    "a transaction of 501 characters": (raw(OPEN, transactions=["x" * 501]), Reason.WRONG_TYPE),
    "by is a number": (raw(JOIN, by=1), Reason.WRONG_TYPE),
    "given twice, wrong at first": (raw(VOID, epoch="x")[:-1] + b',"epoch":1}', Reason.WRONG_TYPE),
    "id of 2^63": (raw(NUMBERED, id=2**63), Reason.OUT_OF_64_BITS),
    "id of -2^63": (raw(NUMBERED, prev=0, id=-(2**63)), Reason.OUT_OF_64_BITS),
    "prev of -2^63": (raw(NUMBERED, prev=-(2**63), id=-7), Reason.OUT_OF_64_BITS),
    "epoch of 2^63": (raw(NUMBERED, epoch=2**63), Reason.OUT_OF_64_BITS),
    "id of 5000 digits": (raw(NUMBERED, id="|").replace(b'"|"', b"9" * 5000), Reason.OUT_OF_64_BITS),
    "epoch of -1": (raw(NUMBERED, epoch=-1), Reason.NEGATIVE_EPOCH),
    "empty stream": (raw(VOID, stream=""), Reason.BAD_NAME),
    "empty writer": (raw(VOID, writer=""), Reason.BAD_NAME),
    "space in a name": (raw(VOID, writer="w 1"), Reason.BAD_NAME),
    "no-break space in a name": (raw(VOID, writer="w\u00a01"), Reason.BAD_NAME),
    "control character in a name": (raw(VOID, stream="a\u0007"), Reason.BAD_NAME),
    "zero-width space in a name": (raw(VOID, writer="w\u200b1"), Reason.BAD_NAME),
    "zero-width joiner in a name": (raw(VOID, stream="a\u200d"), Reason.BAD_NAME),
    "bidirectional override in a name": (raw(VOID, writer="w\u202e1"), Reason.BAD_NAME),
    "bidirectional isolate in a name": (raw(VOID, writer="\u2066w"), Reason.BAD_NAME),
    "tag character in a name": (raw(VOID, writer="w\U000e0041"), Reason.BAD_NAME),
    "256 characters": (raw(VOID, writer="w" * 256), Reason.BAD_NAME),
    "SKIP among the facts": (raw(SKIP), Reason.WRONG_TOPIC),
    "JOIN by somebody among the facts": (raw(JOIN, by="ann"), Reason.WRONG_TOPIC),
    "RETIRE for some reason among the facts": (raw(JOIN, kind="RETIRE", why="gone"), Reason.WRONG_TOPIC),
    "prev on the other side of 0": (raw(VOID, prev=-4), Reason.MIXED_SIGN),
    "id on the other side of 0": (raw(NUMBERED, id=-7), Reason.MIXED_SIGN),
    "id is prev": (raw(VOID, prev=7), Reason.ID_NOT_BEYOND_PREV),
    "id below prev": (raw(NUMBERED, prev=8), Reason.ID_NOT_BEYOND_PREV),
    "negative id above prev": (raw(NUMBERED, prev=-8, id=-7), Reason.ID_NOT_BEYOND_PREV),
    "id of 0": (raw(NUMBERED, prev=0, id=0), Reason.ID_NOT_BEYOND_PREV),
    "id of 0 without prev": (without({**NUMBERED, "id": 0}, "prev"), Reason.ID_NOT_BEYOND_PREV),
    "id of 0 below a prev": (raw(VOID, prev=-3, id=0), Reason.ID_NOT_BEYOND_PREV),
    "run without ids": (without(RUN, "ids"), Reason.MISSING_FIELD),
    "run without rows": (without(RUN, "rows"), Reason.MISSING_FIELD),
    "run without prev": (without(RUN, "prev"), Reason.MISSING_FIELD),
    "run of nothing": (raw(RUN, ids=[], rows=[]), Reason.WRONG_TYPE),
    "ids are one": (raw(RUN, ids=7), Reason.WRONG_TYPE),
    "an id of a run is text": (raw(RUN, ids=[7, "9"]), Reason.WRONG_TYPE),
    "an id of a run is a batch row's": (raw(RUN, ids=["batch", 9]), Reason.WRONG_TYPE),
    "an id of a run is 9.0": (raw(RUN, ids=[7, 9.0]), Reason.WRONG_TYPE),
    "an id of a run is 2^63": (raw(RUN, ids=[7, 2**63]), Reason.OUT_OF_64_BITS),
    "an id of a run is -2^63": (raw(RUN, prev=0, ids=[-(2**63)], rows=[[]]), Reason.OUT_OF_64_BITS),
    "rows of a run are no lists": (raw(RUN, rows=[{}, {}]), Reason.WRONG_TYPE),
    "rows of a run are null": (raw(RUN, rows=[None, []]), Reason.WRONG_TYPE),
    "more ids than rows": (raw(RUN, rows=[[]]), Reason.UNEVEN_RUN),
    "more rows than ids": (raw(RUN, ids=[7]), Reason.UNEVEN_RUN),
    "a run on the other side of 0": (raw(RUN, prev=-4), Reason.MIXED_SIGN),
    "a run across 0": (raw(RUN, ids=[7, -9]), Reason.MIXED_SIGN),
    "a run that goes back": (raw(RUN, ids=[7, 6]), Reason.ID_NOT_BEYOND_PREV),
    "a run that stands still": (raw(RUN, ids=[7, 7]), Reason.ID_NOT_BEYOND_PREV),
    "a run that begins behind its prev": (raw(RUN, prev=8), Reason.ID_NOT_BEYOND_PREV),
    "a run of 0": (raw(RUN, prev=0, ids=[0], rows=[[]]), Reason.ID_NOT_BEYOND_PREV),
}

GOOD: dict[str, bytes] = {
    "numbered": raw(NUMBERED),
    "run": raw(RUN),
    "run of one": raw(RUN, ids=[7], rows=[[1]]),
    "run of facts with several rows": raw(RUN, rows=[[{}, "x", None], [[1], {"a": [2]}]]),
    "run of voids": raw(RUN, rows=[[], []]),
    "backward run": raw(RUN, prev=-4, ids=[-7, -9]),
    "run to the end": raw(RUN, ids=[7, MAX_ID]),
    "run with an id of no meaning": raw(RUN, id="x", row=7),
    "quickest start": b'{"kind":"RDATA","stream":"events","writer":"shop","id":1,"row":{}}',
    "batch row": raw(NUMBERED, id="batch"),
    "negative": raw(NUMBERED, prev=0, id=-3),
    "largest": raw(NUMBERED, prev=0, id=MAX_ID),
    "smallest": without({**NUMBERED, "id": -MAX_ID}, "prev"),
    "void": raw(VOID),
    "announcement": raw(VOID, kind="POSITION"),
    "row is null": raw(NUMBERED, row=None),
    "row is a list": raw(NUMBERED, row=[1, {"a": [None, 1e300]}, "x"]),
    "row is text": raw(NUMBERED, row="a\nb \u00e9"),
    "row is a number no float holds": raw(NUMBERED, row="|").replace(b'"|"', b"1e999"),
    "no prev": without(NUMBERED, "prev"),
    "no prev, backwards": without({**NUMBERED, "id": -7}, "prev"),
    "join with a prev": raw(JOIN, prev=1),
    "join before anything": raw(JOIN, id=0),
    "join backwards": raw(JOIN, id=-7, unseen=True),
    "join with a timeline": raw(JOIN, timeline={"database": "d/1", "start": "s2", "after": "s1"}),
    "join below what was published": raw(JOIN, id=0, published=-9),
    "open transactions": raw(OPEN),
    "no transaction is open any more": raw(OPEN, transactions=[], id="x"),
    "retire": raw(JOIN, kind="RETIRE"),
    "unknown fields": raw(VOID, x=[1, 2], row=3, unseen="no", id2=4),
    "fields of another kind, of a wrong type": raw(NUMBERED, by=5, unseen="x"),
    "kind last": json.dumps(dict(reversed(NUMBERED.items()))).encode(),
    "white space and lines between": json.dumps(NUMBERED, indent=2).encode(),
    "white space around": b" \n" + raw(VOID) + b"\r\n\t",
    "255 characters": raw(VOID, writer="w" * 255),
    "not ASCII": raw(VOID, writer="schreiber-\u00fc"),
    "not ASCII, not escaped": raw(VOID, writer="|").replace(b"|", "\u00fc".encode()),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_has_one_exact_reason(name: str) -> None:
    """Rule 5: every kind of bad record is refused with its own reason, and with words for a person."""
    value, expected = BAD[name]
    assert reason(value) == expected


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"ids": [*range(5, 205), "9"], "rows": []}, 'ids[200] is "9"'),
        ({"ids": [7, 8.0], "rows": []}, "ids[1] is 8.0"),
        ({"rows": [[], {}]}, "rows[1] is {}"),
        ({"ids": [7, 2**63]}, f"ids[1] is {2**63}"),
        ({"ids": [7, 6]}, "ids[1] 6 is not beyond prev 7"),
        ({"ids": []}, "ids is []"),
    ],
)
def test_a_bad_run_says_which_of_its_facts_is_bad(fields: dict[str, Any], detail: str) -> None:
    """One among hundreds would not be found."""
    with pytest.raises(BadRecord) as refused:
        read(raw(RUN, **fields))
    assert refused.value.detail == detail


@pytest.mark.parametrize("name", GOOD)
def test_an_unusual_record_is_read(name: str) -> None:
    """What JSON and the contract allow is taken, however unusual it looks."""
    read(GOOD[name])


@pytest.mark.parametrize("key", [None, b"", b"Events", b"events ", b"\xff"])
def test_the_key_must_be_the_stream(key: bytes | None) -> None:
    """A record under another key may lie in a partition that is not its stream's."""
    assert reason(raw(VOID), key) == Reason.KEY_MISMATCH


@pytest.mark.parametrize("record", [SKIP, {**SKIP, "kind": "JOIN"}, {**SKIP, "kind": "RETIRE"}])
@pytest.mark.parametrize("name", ["by", "why"])
def test_an_operator_must_say_who_and_why(record: dict[str, Any], name: str) -> None:
    """Rule 1: what is forced without evidence is an audited act; nobody and nothing are no answers."""
    assert isinstance(read(raw(record), topic=Topic.CONTROL), records.Skip | records.Join | records.Retire)
    assert reason(without(record, name), topic=Topic.CONTROL) == Reason.MISSING_FIELD
    assert reason(raw(record, **{name: ""}), topic=Topic.CONTROL) == Reason.MISSING_FIELD
    assert reason(raw(record, **{name: " \u00a0"}), topic=Topic.CONTROL) == Reason.MISSING_FIELD
    assert reason(raw(record, **{name: None}), topic=Topic.CONTROL) == Reason.MISSING_FIELD


@pytest.mark.parametrize("kind", ["JOIN", "RETIRE", "SKIP"])
@pytest.mark.parametrize("field", ["by", "why"])
def test_no_text_that_postgres_cannot_store_is_taken(kind: str, field: str) -> None:
    """The audit table has them; a newline, or any other character, is as good there as anywhere."""
    assert reason(raw({**SKIP, "kind": kind}, **{field: "x\0y"}), topic=Topic.CONTROL) == Reason.BAD_TEXT
    assert read(raw({**SKIP, "kind": kind}, **{field: "x\n\x01\u2028\U0001f600y"}), topic=Topic.CONTROL)
    for name in ("stream", "writer"):
        nul = raw({**SKIP, "kind": kind}, **{name: "x\0y"})
        assert reason(nul, key=b"x\0y" if name == "stream" else b"events", topic=Topic.CONTROL) == Reason.BAD_NAME


@pytest.mark.parametrize("kind", ["JOIN", "RETIRE", "SKIP"])
def test_only_an_operators_record_without_an_epoch_means_the_writer_as_it_lives(kind: str) -> None:
    """On the facts topic it is epoch 0, as ever; and nobody can send the number that stands for it."""
    assert read(raw({**SKIP, "kind": kind}), topic=Topic.CONTROL).epoch == records.CURRENT_EPOCH
    assert reason(raw(SKIP, epoch=records.CURRENT_EPOCH), topic=Topic.CONTROL) == Reason.NEGATIVE_EPOCH
    if kind != "SKIP":
        assert read(without({**SKIP, "kind": kind}, "by", "why")).epoch == 0


@pytest.mark.parametrize("record", [NUMBERED, VOID, {**VOID, "kind": "POSITION"}])
def test_evidence_does_not_come_through_the_control_topic(record: dict[str, Any]) -> None:
    """The control topic has no order against the facts, so completions there are refused."""
    assert reason(raw(record, by="ann", why="x"), topic=Topic.CONTROL) == Reason.WRONG_TOPIC


def test_prev_of_a_fact_defaults_to_the_neighbour_towards_zero() -> None:
    """A single writer without a chain of its own need not send `prev`."""
    facts = [records.Rdata(stream="events", writer="w", id=id, row=records.encode_row({})) for id in (1, 7, -1, -7)]
    assert [records.effective_prev(fact) for fact in facts] == [0, 6, 0, -6]


@pytest.mark.parametrize(
    "record",
    [
        records.Rdata(stream="events", writer="w", epoch=2, prev=3, id=9, row=records.encode_row({"a": [1, None]})),
        records.Rdata(stream="events", writer="w", id="batch", row=records.encode_row(None)),
        records.Void(stream="events", writer="w", prev=-3, id=-9),
        records.Position(stream="events", writer="w", epoch=1, prev=0, id=MAX_ID),
        records.Join(stream="events", writer="w", epoch=1, id=0, unseen=True),
        records.Retire(stream="events", writer="w", epoch=0, id=4),
    ],
)
def test_what_is_encoded_is_read_back(record: records.Record) -> None:
    """Encoding and reading are inverse."""
    value = records.encode(record)
    again = read(value)
    assert msgspec.json.encode(again) == value
    assert type(again) is type(record)


def test_defaults_are_not_sent() -> None:
    """A record is as short as the contract allows, `kind` first."""
    record = records.Join(stream="events", writer="w", id=0)
    assert records.encode(record) == b'{"kind":"JOIN","stream":"events","writer":"w","id":0}'
