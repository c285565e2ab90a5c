"""Every verb with `--json` has a schema. `tests/fix_cli_output.py` compares what the tests of the verbs print."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any

import click
import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from tests.contracts import record_schemas
from tests.contracts.cli_schemas import OUTPUTS, document
from tidemark.app.cli import main
from tidemark.app.diagnosis.open_ranges import OpenRange
from tidemark.app.lines.client import to_json
from tidemark.app.output import json_text
from tidemark.app.verbs import dead_letters, gaps, kafka_records
from tidemark.sinks.dead_letters import DeadLetter
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.wire.line_protocol import parse
from tidemark.streaming.wire.records import Topic


@cache
def strict_validator(verb: str) -> Validator:
    """Also refuses fields that the schema does not name, which a later version may add."""
    control = DRAFT202012.create_resource(record_schemas.document(Topic.CONTROL))
    registry = control @ Registry()
    return Draft202012Validator(_strict(document(verb)), registry=registry)


def _strict(schema: Any) -> Any:
    match schema:
        case dict():
            below = {name: _strict(part) for name, part in schema.items()}
            return below | ({"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {})
        case list():
            return [_strict(part) for part in schema]
    return schema


def _verbs(group: click.Group, before: str = "") -> Iterator[str]:
    """Words of each verb that has the option --json."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _verbs(command, f"{before}{name} ")
        elif any("--json" in option.opts for option in command.params):
            yield f"{before}{name}"


def test_every_verb_with_json_has_a_schema() -> None:
    """And no other."""
    assert sorted(_verbs(main)) == sorted(OUTPUTS)


@pytest.mark.parametrize("verb", OUTPUTS)
def test_schema_is_a_valid_json_schema(verb: str) -> None:
    """The document conforms to the meta-schema of its draft, and refuses what is no output."""
    Draft202012Validator.check_schema(document(verb))
    assert not strict_validator(verb).is_valid({})
    assert not strict_validator(verb).is_valid([])


@pytest.mark.parametrize(
    "line",
    [
        b"SERVER tidemark",
        b"PING 1795284817778",
        b"NAME ann",
        b"ERROR server stopping",
        b"REPLICATE",
        b"POSITION orders shop 3 4",
        b'RDATA orders shop 4 {"total":12}',
        b"RDATA orders shop batch null",
        b"USER_SYNC w1 @u:x start 17",
    ],
)
def test_lines_of_listen_conform(line: bytes) -> None:
    """Each command of the line protocol, as `tidemark listen --json` prints it."""
    command = parse(line)
    assert command is not None
    strict_validator("listen").validate(json.loads(to_json(command)))


def test_gaps_conform() -> None:
    """A gap with all that is known, and a writer that never joined."""
    seen = datetime(2026, 11, 26, tzinfo=UTC)
    gap = OpenRange("orders", "shop", 1, 3, 4, seen, 2, 1, seen, ["pid 7"], "open transaction", "wait", "")
    unknown = OpenRange("orders", "web", 1, None, None, None, 0, 0, None, [], "unknown")
    strict_validator("gaps").validate(json.loads(gaps.to_json([gap, unknown])))


@pytest.mark.parametrize("value", [b"{}", None, b"\xff"])
def test_dead_letters_conform(value: bytes | None) -> None:
    """Text, no value, and bytes that are no text."""
    origin = ("tidemark.facts", 2, 40)
    letter = DeadLetter(0, 7, 1000, "bad_name", origin, "", "", b"orders", value, (("trace", b"\x00\xff"),))
    printed = dead_letters.json_fields(letter, {origin: 3})
    strict_validator("dead-letters show").validate(json.loads(json_text(printed)))
    strict_validator("dead-letters list").validate(json.loads(json_text({"dead_letters": [printed]})))


@pytest.mark.parametrize("value", [b"{}", None, b"\xff"])
def test_lines_of_tail_conform(value: bytes | None) -> None:
    """Text, no value, and bytes that are no text."""
    message = RecordedMessage("tidemark.facts", 0, 17, 1795284817778, b"orders", value)
    strict_validator("tail").validate(json.loads(kafka_records.to_line(message)))


def test_output_of_verbs_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture of `tests/fix_cli_output.py` fails a test in which a verb prints what its schema does not have."""
    command = main.get_command(click.Context(main), "bundle")
    assert command is not None
    monkeypatch.setattr(command, "callback", lambda **_: click.echo('{"file": "x", "parts": [], "problems": 1}'))
    with pytest.raises(ValidationError, match="1 is not of type 'object'"):
        CliRunner().invoke(main, ["bundle", "--json"])
