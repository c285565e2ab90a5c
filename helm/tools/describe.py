"""The chart's `values.schema.json`, and the alerts and values in its README, which come from its files and from the
comments of `values.yaml`.

Run by `make chart-docs`; tests/helm/test_described.py refuses a difference. A comment stands right above its key; its
lines that begin with `@schema` are JSON, merged into what the default alone tells.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tidemark.app.connections import PREFIX
from tidemark.app.settings import Settings, variable_of

CHART = Path(__file__).parents[1] / "tidemark"
HEADING = "## Alerts\n"
ALERTS = ("alerts.yaml", "relay-alerts.yaml", "synapse-alerts.yaml")
_ANNOTATION = "@schema "
_LABEL = re.compile(r"{{ (?:\$labels\.)?\$?(\w+)[^}]*}}")
_TYPES = {
    "tag:yaml.org,2002:str": "string",
    "tag:yaml.org,2002:int": "integer",
    "tag:yaml.org,2002:bool": "boolean",
    "tag:yaml.org,2002:seq": "array",
    "tag:yaml.org,2002:map": "object",
}


@dataclass(frozen=True, slots=True)
class Value:
    """One key. `default` is as it is written; `below` holds the keys of an object that has some."""

    name: str
    kind: str
    default: str
    description: str
    annotations: dict[str, Any]
    below: tuple["Value", ...]

    def schema(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"type": self.kind}
        if self.below:
            shape |= _object(self.below)
        if self.description:
            shape["description"] = self.description
        return shape | self.annotations

    def rows(self, prefix: str = "") -> Iterator[str]:
        path = f"{prefix}{self.name}"
        if self.description or not self.below:
            shown = "" if self.below else f"`{self.default}`"
            yield f"| `{path}` | {shown} | {self.description.replace('|', '&#124;')} |"
        for value in self.below:
            yield from value.rows(f"{path}.")


def read(text: str) -> tuple[Value, ...]:
    """The keys of the document, in its order. Raises ValueError for a key without a type."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    return _mapping(root, text.splitlines())


def schema(values: tuple[Value, ...]) -> str:
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart tidemark",
        "type": "object",
        **_object(values),
    }
    # Helm adds these where the chart is among the dependencies of another.
    document["properties"] |= {"global": {"type": "object"}, "enabled": {"type": "boolean"}}
    return json.dumps(document, indent=2) + "\n"


def settings() -> str:
    """What the value `settings` may hold, but for what the chart sets itself."""
    names = (variable_of(name) for name in Settings.model_fields)
    return "".join(f"{name.removeprefix(PREFIX)}\n" for name in sorted(names) if name.startswith(PREFIX))


def alerts(files: Path) -> Iterator[str]:
    """A row for each: Prometheus's templates as the names of what they are filled with."""
    for name in ALERTS:
        document = yaml.safe_load((files / name).read_text())
        for group in document["groups"] if isinstance(document, dict) else document:
            for rule in group["rules"]:
                said = rule["annotations"]
                summary = _LABEL.sub(r"*\1*", said["summary"])
                yield f"| {rule['alert']} | {rule['labels']['severity']} | {summary} | `{said['command']}` |"


def readme(prose: str, values: tuple[Value, ...], told: Iterable[str]) -> str:
    """`prose` with everything from its heading `Alerts` on made anew; `told` are their rows."""
    above, heading, _ = prose.partition(HEADING)
    if not heading:
        raise ValueError(f"the README has no line {HEADING.strip()!r}")
    rows = [row for value in values for row in value.rows()]
    explained = "Each says what to do, and names a command to type first."
    table = ["| alert | severity | what is wrong | first |", "|---|---|---|---|", *told]
    return "\n".join(
        [
            above + heading,
            explained,
            "",
            *table,
            "",
            "## Values",
            "",
            "| value | default | |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _object(values: tuple[Value, ...]) -> dict[str, Any]:
    return {"properties": {value.name: value.schema() for value in values}, "additionalProperties": False}


def _mapping(node: yaml.MappingNode, lines: list[str]) -> tuple[Value, ...]:
    return tuple(_value(key, value, lines) for key, value in node.value)


def _value(key: yaml.ScalarNode, value: yaml.Node, lines: list[str]) -> Value:
    if value.tag not in _TYPES:
        raise ValueError(f"values.yaml, line {key.start_mark.line + 1}: {key.value} has no default with a type")
    description, annotations = _comment(key, lines)
    below = _mapping(value, lines) if isinstance(value, yaml.MappingNode) and not value.flow_style else ()
    written = lines[value.start_mark.line][value.start_mark.column :] if not below else ""
    return Value(key.value, _TYPES[value.tag], written, description, annotations, below)


def _comment(key: yaml.ScalarNode, lines: list[str]) -> tuple[str, dict[str, Any]]:
    first = key.start_mark.line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    words: list[str] = []
    annotations: dict[str, Any] = {}
    for line in lines[first : key.start_mark.line]:
        text = line.strip().removeprefix("#").strip()
        if text.startswith(_ANNOTATION):
            annotations |= json.loads(text.removeprefix(_ANNOTATION))
        else:
            words.append(text)
    return " ".join(words), annotations


def described(chart: Path) -> dict[Path, str]:
    """What each generated file should hold."""
    values = read((chart / "values.yaml").read_text())
    prose = chart / "README.md"
    return {
        chart / "values.schema.json": schema(values),
        chart / "files/settings.txt": settings(),
        prose: readme(prose.read_text(), values, alerts(chart / "files")),
    }


if __name__ == "__main__":
    for path, text in described(CHART).items():
        path.write_text(text)
