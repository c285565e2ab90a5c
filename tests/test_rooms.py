"""What CONTRIBUTING.md says of modules and their names, held against the tree."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 300  # lines


def modules() -> Iterator[Path]:
    for room in ("app", "sinks", "sources", "streaming"):
        yield from (ROOT / room).rglob("*.py")


def test_no_module_has_two_ideas() -> None:
    """One that is longer than a person takes in at once is split."""
    assert [str(it) for it in modules() if len(it.read_text().splitlines()) > LONGEST] == []


def test_one_word_is_one_thing() -> None:
    """No two modules have a class of one name."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(module.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
