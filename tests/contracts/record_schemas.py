"""JSON Schema of the records on the facts topic and on the control topic, made from `streaming.wire.records`.

Fields, types and bounds come from the structs that decode a record. Rules between two fields come from here, as far as
JSON Schema can express them; `test_record_schemas.py` compares the result with `records.read` in both directions.
"""

import inspect
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final, get_args

import msgspec

from tidemark.streaming.wire.records import CURRENT_EPOCH, OverridableRecord, Record, Retire, Skip, Topic

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
REFERENCE: Final = "#/$defs/"

Schema = dict[str, Any]

NOT_EXPRESSED: Final = {
    "integer form": "An integer is written as an integer: the decoder refuses `7.0` and `7e0`.",
    "ascending IDs": "`id` is farther from 0 than `prev`. The IDs of a RUN ascend in the same way, from `prev` on.",
    "equal lengths": "`ids` and `rows` of a RUN have the same length.",
    "key": "The key of the Kafka message is the name of the stream in UTF-8.",
    "text": "The value is one JSON text in UTF-8, without a byte order mark and without half a surrogate pair. If a"
    " field is repeated, each occurrence has the right type.",
}
"""Rules of `records.read` that JSON Schema cannot express. Each schema's description lists them."""


def document(topic: Topic) -> Schema:
    """The schema of one record's value on this topic."""
    kinds = schemas(topic)
    names = [name for name, schema in kinds.items() if "kind" in schema["properties"]]
    rules = "\n".join(f"- {rule}" for rule in NOT_EXPRESSED.values())
    return {
        "$schema": DRAFT,
        "$id": f"urn:tidemark:schema:{topic.value}-record",
        "title": f"Record on the {topic.value} topic",
        "description": "The value of one Kafka message. The decoder ignores fields that a kind does not have.\n\n"
        f"The decoder also checks these rules, which JSON Schema cannot express:\n\n{rules}",
        "oneOf": [{"$ref": REFERENCE + name} for name in names],
        "$defs": kinds,
    }


def schemas(topic: Topic, reference: str = REFERENCE) -> dict[str, Schema]:
    """The schema of each kind that this topic admits, by kind; and those of objects in its fields."""
    types = [kind for kind in get_args(Record) if _admits(topic, kind)]
    _, components = msgspec.json.schema_components(types, ref_template=reference + "{name}")
    kinds = {kind.__name__: _of_kind(topic, kind, components.pop(kind.__name__)) for kind in types}
    named = {str(kind.__struct_config__.tag): kinds[kind.__name__] for kind in types}
    return {name: _cleaned(schema) for name, schema in (named | components).items()}


def _admits(topic: Topic, kind: type[msgspec.Struct]) -> bool:
    return kind is not Skip if topic is Topic.FACTS else kind in get_args(OverridableRecord)


def _of_kind(topic: Topic, kind: type[msgspec.Struct], schema: Schema) -> Schema:
    fields: dict[str, Schema] = schema["properties"]
    fields["kind"] = {"const": str(kind.__struct_config__.tag)}
    if topic is Topic.CONTROL:
        schema["required"] = [*schema["required"], "by", "why"]
        fields["by"] = fields["why"] = _said()
        if kind is Retire:
            fields["writer"] = fields["stream"]  # "*" too: all writers that never joined
    elif kind in get_args(OverridableRecord):
        fields["by"] = fields["why"] = {"type": "null", "default": None}
    if fields["epoch"].get("default") == CURRENT_EPOCH:
        if topic is Topic.CONTROL:
            del fields["epoch"]["default"]  # the epoch that the writer has at that moment
        else:
            fields["epoch"]["default"] = 0
    if rules := [*_rules(fields)]:
        schema["allOf"] = rules
    return schema


def _rules(fields: Mapping[str, Schema]) -> Iterator[Schema]:
    """What `records.read` requires of two fields together. Keywords for numbers ignore other types, such as "batch"."""
    if "ids" in fields:
        yield _one_side({"prev": 0, "ids": 1})
    elif "prev" in fields:
        yield _one_side({"prev": 0, "id": 1})
    if "published" in fields:
        yield _one_side({"published": 0, "id": 0})


def _one_side(least: Mapping[str, int]) -> Schema:
    """All of these IDs have one sign. `least` is the smallest magnitude of each."""
    sides = ({"minimum": 1}, {"maximum": -1})
    return {
        "anyOf": [
            {
                "properties": {
                    name: {"items": bound} if name == "ids" else bound
                    for name, smallest in least.items()
                    for bound in [{keyword: sign * smallest for keyword, sign in side.items()}]
                }
            }
            for side in sides
        ]
    }


def _said() -> Schema:
    """Text that is not blank, without NUL."""
    return {"type": "string", "pattern": f"[^{_blanks()}]", "not": {"pattern": r"\x00"}}


def _blanks() -> str:
    """What `str.strip` removes, as the inside of a character class. `\\s` differs between dialects of patterns."""
    blanks = [code for code in range(0x10000) if chr(code).isspace()]
    ranges = []
    for _, group in groupby(enumerate(blanks), lambda pair: pair[1] - pair[0]):
        codes = [code for _, code in group]
        ranges.append(f"\\u{codes[0]:04x}-\\u{codes[-1]:04x}" if len(codes) > 1 else f"\\u{codes[0]:04x}")
    return "".join(ranges)


def _cleaned(schema: Schema) -> Schema:
    """With its docstring as one paragraph per paragraph, whatever the indentation of the source."""
    return schema | ({"description": inspect.cleandoc(schema["description"])} if "description" in schema else {})
