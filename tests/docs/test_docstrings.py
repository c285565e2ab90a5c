"""Docstrings name parameters, attributes and fields that exist, also after a rename."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tidemark

PACKAGE = Path(tidemark.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def attributes(node: ast.ClassDef) -> set[str]:
    """The names of fields, attributes, methods and constants that the class itself defines."""
    names: set[str] = set()
    for item in ast.walk(node):
        if isinstance(item, Function):
            names.add(item.name)
        elif isinstance(item, ast.Attribute | ast.Name) and isinstance(item.ctx, ast.Store):
            names.add(item.attr if isinstance(item, ast.Attribute) else item.id)
    return names


@cache
def attributes_by_class() -> dict[str, set[str]]:
    """Name of a class -> `attributes`. Left out: classes with a base of another package."""
    nodes = [node for module in MODULES for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases} for node in nodes}
    own: dict[str, set[str]] = {}
    for node in nodes:
        own.setdefault(node.name, set()).update(attributes(node))
    bare = {"Protocol", "Generic", "ABC", "NamedTuple", "Struct", "Exception"}
    known = {name for name in own if bases[name] <= own.keys() | bare}
    return {
        name: own[name].union(*(own[base] for base in bases[name] - bare), {"args"} if "NamedTuple" in bases else ())
        for name in known
    }


def documented(node: ast.ClassDef | Function, section: str) -> Iterator[str]:
    """The names before the colons in the section `section` of the docstring."""
    lines = (ast.get_docstring(node) or "").partition(f"\n{section}:\n")[2].splitlines()
    for line in lines:
        if line and not line.startswith("    "):
            return
        if found := re.match(r" {4}([a-z_]+(?:, [a-z_]+)*): ", line):
            yield from found[1].split(", ")


def parameters(node: Function) -> set[str]:
    given = node.args
    return {
        arg.arg
        for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        if arg is not None
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_documented_names_exist(module: Path) -> None:
    """`Args:` has parameters, `Attributes:` has attributes, and `Class.name` in backticks is an attribute of the
    class."""
    known = attributes_by_class()
    for node in ast.walk(tree(module)):
        if isinstance(node, Function):
            assert {*documented(node, "Args")} <= parameters(node), node.name
        elif isinstance(node, ast.ClassDef) and node.name in known:
            initial = [parameters(item) for item in node.body if isinstance(item, Function) and item.name == "__init__"]
            assert {*documented(node, "Args")} <= (initial[0] if initial else known[node.name]), node.name
            assert {*documented(node, "Attributes")} <= known[node.name], node.name
    for quoted in re.findall(r"`([^`\n]+)`", module.read_text()):
        for name, attribute in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", quoted):
            assert attribute in known.get(name, {attribute}), quoted
