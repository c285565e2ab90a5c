"""The rules of CONTRIBUTING.md for modules and names, checked over the whole package."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.shadows import ROOMS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tidemark"
MAX_LINES = 600
MAX_MODULES = 20
MAX_IMPORT_PATH = 12
MIN_LINES = 80
"""A shorter module belongs to its importer, if it has only one."""

# What is left of each rule. The lists and numbers may only become shorter and smaller.
SMALL_MODULES = {"tidemark.errors"}  # the public name of our errors

TRUTH_VALUE = re.compile(r"_?(is|has|was|can)_")
BOOL = re.compile(r"\b(bool|TypeGuard|TypeIs)\b")
RETIRED_PARTS = {
    "told": 0,
    "tell": 1,
    "said": 0,
    "heard": 0,
    "owes": 0,
    "owed": 0,
    "beats": 2,
    "stands": 0,
    "standing": 0,
    "holder": 2,
    "apart": 0,
    "letters": 6,
    "looks": 0,
    "doubt": 0,
    "doubtful": 0,
    "crowd": 0,
    "company": 0,
    "befall": 0,
    "kept": 14,
    "held": 6,
    "everybody": 0,
    "nobody": 0,
    "living": 0,
    "nowhere": 0,
    "anew": 0,
}
"""How often a word may be a part of an identifier: words that docs/design.md, section 1, has a better one for."""

RETIRED_NAMES = {
    "it": 0,
    "each": 1,
    "found": 6,
    "of": 0,
    "here": 0,
    "there": 0,
    "those": 0,
    "place": 50,
    "places": 17,
    "that": 0,
    "what": 6,
    "who": 0,
    "whoever": 0,
    "whatever": 0,
    "them": 0,
    "one": 2,
    "many": 0,
}
"""How often a word may be all of a variable's name: words that do not name the content."""


def modules() -> Iterator[Path]:
    yield from PACKAGE.rglob("*.py")


def dotted(path: Path) -> str:
    """The name by which a module is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    yield node
    skipped = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from nodes_that_run(child)


@cache
def imports() -> dict[str, set[str]]:
    """For each module of the package those that it imports, also inside functions."""
    names = {dotted(path): path for path in modules()}
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted: set[str] = set()
        for node in nodes_that_run(parsed(path)):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {member if member in names else str(node.module) for member in members}
        imported[name] = (wanted & names.keys()) - {name}
    return imported


def defined_names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Identifiers where they are defined, and whether each is a variable's."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, True
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                yield name, False
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, False


def words(name: str) -> list[str]:
    """The parts of an identifier: `DEAD_LETTERS` and `DeadLetters` are `dead` and `letters`."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def test_no_module_is_too_long() -> None:
    """A longer one has two ideas."""
    assert [str(path) for path in modules() if lines_of(path) > MAX_LINES] == []


def test_no_folder_has_too_many_modules() -> None:
    """A folder has one role."""
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules() if path.name != "__init__.py")
    too_full = {folder: count for folder, count in counts.items() if count > MAX_MODULES}
    assert too_full == {}


def test_no_small_module_has_only_one_importer() -> None:
    """Its content belongs to the importer. A package's `__init__` does not count."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, imported in imports().items():
        for other in imported:
            importers[other].add(name)
    small = {
        name
        for path in modules()
        if path.name != "__init__.py" and lines_of(path) < MIN_LINES and len(importers[name := dotted(path)]) == 1
    }
    assert small - SMALL_MODULES == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count."""
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {error.args[1]}")


def test_the_imports_of_the_core_are_not_deep() -> None:
    """Whoever follows them from Spark's query to the values passes at most twelve modules."""
    streaming = {name: imported for name, imported in imports().items() if name.startswith("tidemark.streaming")}
    depths: dict[str, int] = {}
    for name in TopologicalSorter(streaming).static_order():
        depths[name] = 1 + max((depths[other] for other in streaming.get(name, ()) if other in streaming), default=0)
    assert max(depths.values()) <= MAX_IMPORT_PATH


def test_retired_words_are_not_in_identifiers() -> None:
    """The field's word for each is in docs/design.md, section 1."""
    parts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for path in modules():
        for name, is_variable in defined_names(parsed(path)):
            found = words(name)
            parts.update(word for word in set(found) if word != "letters" or "dead" not in found)
            if is_variable and len(found) == 1:
                names[found[0]] += 1
    assert {word: parts[word] for word, ceiling in RETIRED_PARTS.items() if parts[word] > ceiling} == {}
    assert {word: names[word] for word, ceiling in RETIRED_NAMES.items() if names[word] > ceiling} == {}


def test_is_and_has_name_truth_values() -> None:
    """A function whose name says that it answers yes or no returns a bool."""
    answers = {
        f"{path.relative_to(ROOT)}: {node.name}": ast.unparse(node.returns or ast.Constant(None))
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and TRUTH_VALUE.match(node.name)
    }
    assert {name: kind for name, kind in answers.items() if not BOOL.search(kind)} == {}


def test_one_word_is_one_thing() -> None:
    """No two modules have a class of one name."""
    paths: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                paths[node.name].append(str(path.relative_to(ROOT)))
    assert {name: defining for name, defining in paths.items() if len(defining) > 1} == {}


def test_nothing_is_imported_through_the_links_at_the_top() -> None:
    """`app`, `sinks`, `sources` and `streaming` lead into the package; an import through them loads a module twice."""
    links = {path.name: path.readlink() for path in ROOT.iterdir() if path.is_symlink() and path.name in ROOMS}
    assert links == {name: Path("tidemark", name) for name in ROOMS}
    through = re.compile(rf"^\s*(?:from|import)\s+(?:.*,\s*)?(?:{'|'.join(ROOMS)})\b", re.MULTILINE)
    for path in (*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "helm").rglob("*.py")):
        text = path.read_text()
        if not through.search(text):
            continue  # most files: parsing all takes seconds
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {*ROOMS}, path
