"""The files below docs/reference/schemas, and what each of them holds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.contracts import asyncapi, cli_schemas, record_schemas
from tidemark.streaming.wire.records import Topic

FOLDER: Final = Path(__file__).parents[2] / "docs/reference/schemas"


def texts() -> dict[Path, str]:
    """Path to text of every generated file."""
    return {path: json.dumps(document, indent=2) + "\n" for path, document in _documents()}


def _documents() -> Iterator[tuple[Path, Any]]:
    for topic in Topic:
        yield FOLDER / f"{topic.value}-record.schema.json", record_schemas.document(topic)
    yield FOLDER / "asyncapi.json", asyncapi.document()
    for verb in cli_schemas.OUTPUTS:
        yield FOLDER / "cli" / f"{verb.replace(' ', '-')}.schema.json", cli_schemas.document(verb)


def write() -> None:
    """Write every file, and remove files that are no longer generated."""
    generated = texts()
    for path in FOLDER.rglob("*.json"):
        if path not in generated:
            path.unlink()
    for path, text in generated.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
