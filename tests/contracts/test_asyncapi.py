"""The AsyncAPI document is valid, and messages that the code sends conform to it."""

import json
import subprocess
import tarfile
import warnings
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.protocols import Validator

from tests.contracts.asyncapi import EVENTS, document
from tidemark.app.sidecar import answers, events
from tidemark.app.sidecar.answers import ProblemAnswer, StreamAnswer
from tidemark.app.sidecar.event_stream import EVENT_STREAM, encode_event
from tidemark.app.sidecar.watch import pipeline_answer
from tidemark.common.errors import BadCommand
from tidemark.sinks import dead_letters
from tidemark.sinks.positions_topic import PositionRecord
from tidemark.sinks.redis import client
from tidemark.streaming.wire.line_protocol import Command, PositionCommand, RdataCommand, RelayedCommand, parse

NOW = datetime(2026, 11, 26, tzinfo=UTC)
META_SCHEMA = "@asyncapi/specs@6.11.1"


@cache
def payload(channel: str, message: str) -> Validator:
    """What validates the payload of one message."""
    whole = document()
    schema = whole["channels"][channel]["messages"][message]["payload"]
    return Draft202012Validator({**schema, "components": whole["components"]})


def broken() -> list[dict[str, Any]]:
    """Documents with one mistake each."""
    misspelled, no_action, no_protocol = (deepcopy(document()) for _ in range(3))
    misspelled["channels"]["facts"]["adress"] = "x"
    no_action["operations"]["facts"]["action"] = "read"
    del no_protocol["servers"]["kafka"]["protocol"]
    return [misspelled, no_action, no_protocol]


def test_document_conforms_to_the_object_model() -> None:
    """AsyncAPI 3.0, as the package asyncapi3 models it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its fields shadow pydantic's
        from asyncapi3.models.asyncapi import AsyncAPI3
    AsyncAPI3.model_validate(document())
    for wrong in broken():
        with pytest.raises(ValueError, match="validation error"):
            AsyncAPI3.model_validate(wrong)


@pytest.mark.registry
def test_document_conforms_to_the_meta_schema(npm: None, tmp_path: Path) -> None:
    """AsyncAPI 3.0, as its authors publish the schema on npm."""
    subprocess.run(["npm", "pack", "--silent", META_SCHEMA], cwd=tmp_path, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tgz")
    with tarfile.open(packed) as archive:
        text = archive.extractfile("package/schemas/3.0.0-without-$id.json")
        assert text is not None
        validator = Draft7Validator(json.load(text))
    validator.validate(document())
    assert not any(validator.is_valid(wrong) for wrong in broken())


@pytest.fixture
def npm() -> None:
    """Asked for by name, so that the test is skipped if there is no npm."""


def test_every_reference_leads_somewhere() -> None:
    """`#/components/schemas/...` and its like."""

    def references(part: Any) -> list[str]:
        match part:
            case dict():
                below = [reference for value in part.values() for reference in references(value)]
                return [*below, *([part["$ref"]] if isinstance(part.get("$ref"), str) else [])]
            case list():
                return [reference for value in part for reference in references(value)]
        return []

    whole = document()
    found = references(whole)
    assert len(found) > 30
    for reference in found:
        target = whole
        for name in reference.removeprefix("#/").split("/"):
            target = target[name]


def test_every_schema_is_a_valid_json_schema() -> None:
    """AsyncAPI's schema objects are those of draft 7."""
    for schema in document()["components"]["schemas"].values():
        Draft7Validator.check_schema(schema)


def test_every_stream_of_events_is_described() -> None:
    """Each operation that answers with events has its channel, and each type of a move has its event."""
    assert {operation.path for operation in events.OPERATIONS if operation.media_type == EVENT_STREAM} == {*EVENTS}
    for operation in events.OPERATIONS:
        named = {word.strip("`,.") for word in operation.summary.split() if word.startswith("`")}
        assert named == {*EVENTS[operation.path]}


def _sent() -> list[tuple[str, bytes]]:
    """A channel, and an event that is sent on it."""
    move: dict[str, Any] = {
        "stream": "orders",
        "writer": "shop",
        "epoch": 1,
        "prev": 3,
        "id": 4,
        "facts": 1,
        "batch": 7,
        "time": NOW,
    }
    stream = StreamAnswer(
        stream="orders",
        state="recovering",
        linear=None,
        vector={},
        token=None,
        epochs=None,
        retired=None,
        pending=None,
        blockers=None,
        linear_lag=None,
        last_seen=None,
        open_transactions=None,
        source=None,
        age_seconds=None,
        details_age_seconds=None,
    )
    return [
        ("events", encode_event(stream, "snapshot")),
        (
            "events",
            encode_event(answers.AdvanceAnswer(**move, evidence_prev=3, empty=0, unseen=0, skipped=0, linear=4)),
        ),
        ("events", encode_event(answers.RereadAnswer(stream="orders", writer=None, prev=3, id=4, besides=["web"]))),
        ("events", encode_event(answers.LateAnswer(**move, number=1, why="final"))),
        ("events", encode_event(answers.MissingLateCompletionsAnswer(stream="orders", after=1, number=2))),
        ("events", encode_event(answers.LinearMoveAnswer(stream="orders", linear=-4))),
        ("watch", encode_event(pipeline_answer(None, ["Postgres is away"], NOW))),
    ]


@pytest.mark.parametrize(("channel", "event"), _sent(), ids=str)
def test_events_conform(channel: str, event: bytes) -> None:
    """Each event's name is a message of the channel, and its data conforms to the payload of that message."""
    first, second = event.decode().splitlines()[:2]
    validator = payload(channel, first.removeprefix("event: "))
    data = json.loads(second.removeprefix("data: "))
    validator.validate(data)
    assert not validator.is_valid({name: value for name, value in data.items() if name not in {"stream", "time"}})
    problem = ProblemAnswer(type="urn:tidemark:problem:busy", title="Busy", status=429, detail="x")
    assert not validator.is_valid({"type": problem.type, "title": problem.title})


NAMES = st.one_of(
    st.sampled_from(["orders", "}x", "a b", "", "a\u200b", "*", "w" * 255, "w" * 256]), st.text(max_size=5)
)


@given(stream=NAMES, writer=NAMES, prev=st.integers(-(10**20), 10**20), id=st.integers(-(10**20), 10**20))
@example(stream="a b", writer="0", prev=0, id=0)
def test_lines_on_channels_conform(stream: str, writer: str, prev: int, id: int) -> None:
    """What is parsed as POSITION or RDATA matches the pattern; nothing else matches."""
    lines = (PositionCommand(stream, writer, prev, id), RdataCommand(stream, writer, id, "{}"))
    for message, command in zip(("position", "rdata"), lines, strict=True):
        parsed, is_valid = _parsed(str(command)), payload("lines", message).is_valid(str(command))
        assert is_valid == isinstance(parsed, type(command))
        if " " not in stream + writer:  # a name with a space can make the line of another command
            assert is_valid == (parsed == command)


@pytest.mark.parametrize(
    "line",
    ["USER_SYNC a @u:x start 1", "USER_SYNC a", "FEDERATION_ACK x -3", "FEDERATION_ACK x", "CANCEL_TASK ", "X y"],
)
def test_relayed_commands_conform(line: str) -> None:
    """The pattern is that of the parser."""
    assert payload("sidecars", "relayed").is_valid(line) == isinstance(_parsed(line), RelayedCommand)


def _parsed(line: str) -> Command | None:
    try:
        return parse(line.encode(errors="surrogatepass"))
    except BadCommand:
        return None


def test_addresses_are_those_of_the_code() -> None:
    """With the parameters filled in, a channel's address is the name that the code makes."""
    channels = document()["channels"]
    example = channels["positions"]["parameters"]["tag"]["examples"][0]
    assert channels["positions"]["address"].format(tag=example) == client.channel("orders")
    assert channels["sidecars"]["address"].format(name="blue") == client.lines_channel("blue")
    assert channels["facts"]["address"] == "tidemark.facts"


def test_headers_of_dead_letters_conform() -> None:
    """The headers that `sinks.dead_letters` adds."""
    schema = document()["channels"]["deadLetters"]["messages"]["deadLetter"]["headers"]
    written = {
        name: value.decode() for name, value in dead_letters._tidemark_headers("bad_name", "tidemark.facts", 3, 17)
    }
    validator = Draft202012Validator(schema)
    validator.validate(written)
    validator.validate({**written, "detail": "x" * dead_letters.MAX_DETAIL_LENGTH, "gone": "removed by retention"})
    assert not validator.is_valid({**written, "reason": "because"})


def test_records_of_the_positions_topic_conform() -> None:
    """Each field has the name of the field in the sidecar's answer for a stream."""
    record = PositionRecord("orders", 7, {"web": 9}, "m7~web.9")
    payload("positionsTopic", "streamPosition").validate(json.loads(msgspec.json.encode(record)))
    answered = {field.name: field for field in msgspec.structs.fields(StreamAnswer)}
    assert set(record.__struct_fields__) <= answered.keys()
