"""Each code block of each page is typed by a test of this folder or of tests/incidents, or is listed with a reason."""

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.docs import test_how_to, test_runbooks, test_simulate
from tests.docs.shell import ROOT, Block, blocks
from tests.docs.untyped import UNTYPED, untyped
from tests.incidents.test_pages import INCIDENTS

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md"))
)
COMMANDS, PROGRAMS = {"console", "sql"}, {"python"}
TYPED: Mapping[str, set[str]] = {
    "README.md": COMMANDS | PROGRAMS,
    "docs/tutorials/first-stream.md": COMMANDS | PROGRAMS,
    "docs/tutorials/blocked-stream.md": {"console", "psql"},
    "docs/tutorials/django.md": COMMANDS | PROGRAMS,
    **{f"docs/{page}.md": COMMANDS | PROGRAMS for page in test_how_to.TYPED_PAGES},
    **{f"docs/{page}.md": COMMANDS for page in test_runbooks.PAGES},
    **{page: {"console"} for page in test_simulate.PAGES},
    **{f"docs/how-to/runbooks/{page}": {"console"} for page in INCIDENTS},
}
"""The languages of the blocks that a test types, by page."""
FRAGMENTS: Mapping[tuple[str, str], str] = {
    ("docs/how-to/read-facts.md", "with Reader("): "has `positions` of the program at the top of the page",
    ("docs/how-to/synapse.md", "regular = Table("): "has `positions` of the program at the top of the page",
}
"""Blocks with a reader that are no programs of their own: page, first words, and the reason."""
CLIENTS = {"Reader", "AsyncReader", "Positions", "AsyncPositions"}


def all_blocks() -> Iterator[tuple[str, Block]]:
    for page in PAGES:
        for block in blocks(page):
            yield page, block


def test_blocks_are_found() -> None:
    """A change of the format of the pages must not hide their blocks."""
    fences = sum(len(re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)) for page in PAGES)
    assert len([*all_blocks()]) == fences / 2 > 150


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_typed_or_listed(page: str) -> None:
    """Either a test types it, or `UNTYPED` says why none does."""
    for block in blocks(page):
        is_typed = block.language in TYPED.get(page, ())
        assert is_typed or untyped(page, block), f"neither typed nor listed, in {page}:\n{block.text}"


def test_no_entry_is_superfluous() -> None:
    """Each entry of the lists fits a block, and the tests that a reason names are there."""
    for pattern, reason in UNTYPED.items():
        assert any(re.match(pattern, f"{page} {block.language} {block.text}") for page, block in all_blocks()), pattern
        for named in re.findall(r"[\w/]+\.py", reason):
            assert (ROOT / named).exists() or (ROOT / "tests/docs" / named).exists(), named
    for page, languages in TYPED.items():
        assert any(block.language in languages for block in blocks(page)), page


def clients(program: ast.Module) -> Iterator[bool]:
    """For each reader or client of positions, whether it is made inside `with exit_on_error()`.

    A coroutine is inside if the program runs one there with `asyncio.run`.
    """
    guards = [
        statement
        for statement in ast.walk(program)
        if isinstance(statement, ast.With) and _called(statement.items[0].context_expr) == "exit_on_error"
    ]
    guarded = {id(node) for guard in guards for node in ast.walk(guard)}
    runs_guarded = any(_called(node) == "run" for guard in guards for node in ast.walk(guard))
    coroutines = [node for node in ast.walk(program) if isinstance(node, ast.AsyncFunctionDef)]
    if runs_guarded:
        guarded |= {id(node) for coroutine in coroutines for node in ast.walk(coroutine)}
    yield from (id(node) in guarded for node in ast.walk(program) if _called(node) in CLIENTS)


def _called(node: ast.AST) -> str | None:
    """The name of what is called, without that of its module."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def test_programs_that_read_end_with_one_line_if_something_is_wrong() -> None:
    """Each program with a reader or a client of positions makes it inside `exit_on_error()`; fragments are listed."""
    found = 0
    listed = set(FRAGMENTS)
    for page, block in all_blocks():
        if block.language != "python":
            continue
        inside = [*clients(ast.parse(block.text))]
        found += len(inside)
        fragment = next((key for key in FRAGMENTS if key[0] == page and block.text.startswith(key[1])), None)
        listed.discard(fragment or ("", ""))
        assert fragment or all(inside), f"a reader outside of exit_on_error(), in {page}:\n{block.text}"
    assert found >= 10
    assert not listed, "no such fragments"
