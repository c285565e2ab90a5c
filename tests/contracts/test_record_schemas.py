"""The schemas of the records accept and refuse what the decoder accepts and refuses."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.contracts.record_schemas import NOT_EXPRESSED, document, schemas
from tests.streaming.test_records import BAD, GOOD, JOIN, NUMBERED, OPEN, RUN, SKIP, VOID
from tidemark.common.errors import BadRecord
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import MAX_ID, Topic

UNSCHEMED = {
    Reason.NOT_JSON: "text",
    Reason.ID_NOT_BEYOND_PREV: "ascending IDs",
    Reason.UNEVEN_RUN: "equal lengths",
    Reason.KEY_MISMATCH: "key",
}
"""Reasons for which the decoder may refuse what the schema accepts, each with its rule in the description."""

ROOT = Path(__file__).parents[2]
OPERATOR = {"by": "ann", "why": "disk lost"}
TIMELINE = {"database": "d/1", "start": "s2", "after": "s1"}
SEEDS: list[dict[str, Any]] = [
    NUMBERED,
    {**NUMBERED, "id": "batch"},
    VOID,
    {**VOID, "kind": "POSITION"},
    {**JOIN, "unseen": True, "published": 5, "timeline": TIMELINE},
    {**JOIN, "kind": "RETIRE"},
    OPEN,
    RUN,
    SKIP,
    {**JOIN, **OPERATOR, "beyond": True},
    {**JOIN, **OPERATOR, "kind": "RETIRE", "writer": "*"},
]
FIELDS = sorted({name for seed in SEEDS for name in seed})
IDS = st.one_of(st.integers(-9, 9), st.sampled_from([MAX_ID, -MAX_ID, MAX_ID + 1, -MAX_ID - 1]))
TEXTS = st.one_of(
    st.sampled_from(
        ["", "*", " ", "\t\u2003", "\x1c", "a b", "a\x00b", "a\u200b", "\ufeff", "w" * 255, "w" * 256, "batch"]
    ),
    st.sampled_from([*(f"a{chr(code)}" for code in (0x2028, 0x85, 0xA0, 0xFFF9, 0x1BCA0, 0xE0041, 0x1F600))]),
    st.text(max_size=4),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    IDS,
    TEXTS,
    st.lists(IDS, max_size=3),
    st.lists(TEXTS, max_size=11),
    st.lists(st.lists(IDS, max_size=2), max_size=3),
    st.sampled_from([TIMELINE, {"database": None, "start": "s"}, {"start": "s"}, {"database": 1, "start": "s"}, {}]),
    st.sampled_from([["x" * 500], ["x" * 501]]),
    st.sampled_from(["RDATA", "VOID", "POSITION", "JOIN", "RETIRE", "SKIP", "OPEN", "RUN", "ROW", "rdata"]),
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A record in which a few fields are replaced, added or left out."""
    record = dict(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(FIELDS))
        if draw(st.booleans()):
            record.pop(name, None)
        elif name in {"id", "prev", "published", "epoch"} and draw(st.booleans()):
            record[name] = draw(IDS)
        elif name in {"stream", "writer", "by", "why"} and draw(st.booleans()):
            record[name] = draw(TEXTS)
        else:
            record[name] = draw(VALUES)
    return record


@cache
def validator(topic: Topic) -> Draft202012Validator:
    return Draft202012Validator(document(topic))


def refusal(value: bytes, topic: Topic) -> BadRecord | None:
    """Why the decoder refuses this value under the key that it must have; None: it accepts it."""
    try:
        key = str(json.loads(value).get("stream", "")).encode()
    except (ValueError, AttributeError):
        key = b"events"
    try:
        records.read(value, key, topic)
    except BadRecord as bad:
        return bad
    return None


@pytest.mark.parametrize("topic", Topic)
def test_schemas_are_valid_json_schemas(topic: Topic) -> None:
    """The document conforms to the meta-schema of its draft."""
    Draft202012Validator.check_schema(document(topic))


def test_every_kind_has_a_schema() -> None:
    """Each kind is on the facts topic, on the control topic or on both."""
    tags = {str(kind.__struct_config__.tag) for kind in get_args(records.Record)}
    described = {topic: {name for name in schemas(topic) if name.isupper()} for topic in Topic}
    assert described[Topic.FACTS] | described[Topic.CONTROL] == tags
    assert described[Topic.FACTS] == tags - {"SKIP"}
    assert described[Topic.CONTROL] == {"JOIN", "RETIRE", "SKIP"}


@pytest.mark.parametrize("name", GOOD)
def test_schema_accepts_good_records(name: str) -> None:
    """The examples of the decoder's own tests, however they are laid out."""
    validator(Topic.FACTS).validate(json.loads(GOOD[name]))


@pytest.mark.parametrize("name", BAD)
def test_schema_refuses_bad_records(name: str) -> None:
    """Unless the reason is one that the description lists as not expressed."""
    value, reason = BAD[name]
    if reason in UNSCHEMED or value is None or name in {"id is 7.0", "id is 7e0", "an id of a run is 9.0"}:
        return
    if name in {"two kinds", "given twice, wrong at first"}:  # JSON Schema sees one of the two
        return
    decoded = json.loads(value, parse_int=lambda digits: int(digits[:4000]))  # Python parses no more than 4300 digits
    assert not validator(Topic.FACTS).is_valid(decoded)


@pytest.mark.parametrize("topic", Topic)
@given(record=mutated())
@example(record={**JOIN, "by": None, "why": None})
@example(record={**JOIN, **OPERATOR, "by": "\ufeff"})
@example(record={**JOIN, **OPERATOR, "why": "\x1c\u3000"})
@example(record={**NUMBERED, "id": 0, "prev": 0})
@example(record={**JOIN, "writer": "*"})
def test_schema_and_decoder_agree(topic: Topic, record: dict[str, Any]) -> None:
    """What the decoder accepts, the schema accepts. What the decoder refuses, the schema refuses, but for the rules
    that the description lists.
    """
    value = json.dumps(record).encode()
    bad = refusal(value, topic)
    accepted = validator(topic).is_valid(record)
    if bad is None:
        assert accepted
    elif accepted:
        assert bad.reason in UNSCHEMED, bad


@given(record=mutated())
def test_schema_accepts_what_the_encoder_writes(record: dict[str, Any]) -> None:
    """A record that was decoded and encoded again is valid, with its defaults left out."""
    for topic in Topic:
        try:
            decoded = records.read(json.dumps(record).encode(), str(record.get("stream")).encode(), topic)
        except BadRecord:
            continue
        validator(topic).validate(json.loads(records.encode(decoded)))


def test_description_lists_the_rules_that_are_not_expressed() -> None:
    """Each exception of the test above is in the text that users read."""
    assert {*UNSCHEMED.values(), "integer form"} == {*NOT_EXPRESSED}
    for topic in Topic:
        assert all(rule in document(topic)["description"] for rule in NOT_EXPRESSED.values())


def test_records_in_the_documentation_conform() -> None:
    """Every record that a page shows is one that a reader of the page may send."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = [
        text for page in pages for text in re.findall(r'\{"kind": ?"[A-Z]+".*?\}(?=$|[`\' ])', page.read_text(), re.M)
    ]
    assert len(shown) >= 5
    for text in shown:
        record = json.loads(text)
        validator(Topic.CONTROL if "by" in record else Topic.FACTS).validate(record)
