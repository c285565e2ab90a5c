"""What CONTRIBUTING.md says of modules and their names, held against the tree."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.shadows import ROOMS

ROOT = Path(__file__).parents[1]
LONGEST = 600  # lines


def modules() -> Iterator[Path]:
    yield from (ROOT / "tidemark").rglob("*.py")


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


def test_nothing_is_imported_through_the_links_at_the_top() -> None:
    """`app`, `sinks`, `sources` and `streaming` lead into the package; an import through them loads a module twice."""
    links = {path.name: path.readlink() for path in ROOT.iterdir() if path.is_symlink() and path.name in ROOMS}
    assert links == {name: Path("tidemark", name) for name in ROOMS}
    for path in (*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "helm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {*ROOMS}, path
