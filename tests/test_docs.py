"""What the pages say of each other and of the code is there, and what the code cites of the pages."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

from tidemark.app.cli import main
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire.records import Record

ROOT = Path(__file__).parents[1]
ROOMS = ("app", "sinks", "sources", "streaming", "tests")
DESIGN = (ROOT / "docs/design.md").read_text()
KINDS = {".py", ".sql", ".lua", ".md", ".yaml", ".yml", ".toml", ".tpl", ".js", ".css", ".html", ".xml", ".properties"}


def _texts() -> Iterator[tuple[Path, str]]:
    """Every file that people write, by its path in the repository."""
    folders = [ROOT / name for name in ("tidemark", "tests", "docs", "helm", ".ci")]
    found = [
        *(path for path in ROOT.iterdir() if not path.is_symlink()),
        *(path for folder in folders for path in folder.rglob("*")),
    ]
    for path in sorted(found):
        if path.is_file() and (path.suffix in KINDS or path.name in {"Makefile", "Dockerfile", "run"}):
            yield path.relative_to(ROOT), path.read_text()


TEXTS = dict(_texts())
PAGES = {path: text for path, text in TEXTS.items() if path.suffix == ".md"}


def _prose(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


def _anchors(page: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _sections(page: str) -> set[str]:
    return set(re.findall(r"^#+ (\d+[a-z]?)\. ", page, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file of the repository, and its fragment a heading there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(PAGES[page])):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if fragment:
            assert fragment in _anchors(path.read_text()), target


def test_pages_that_are_cited_exist() -> None:
    """Whatever names a page of docs/ names one that is there."""
    for path, text in TEXTS.items():
        for cited in re.findall(r"(?<![\w/])docs/[\w/-]+\.(?:md|png)", text):
            assert (ROOT / cited).exists(), f"{path}: {cited}"


def test_sections_that_are_cited_exist() -> None:
    """`docs/design.md 3` is a numbered heading of that page, and so are the others of `docs/design.md 1, 2 and 3`."""
    numbers = r"(\d+[a-z]?(?:(?:,| and|,? to) (?=\d)\d+[a-z]?)*)"
    cited = 0
    for path, text in TEXTS.items():
        flat = re.sub(r"\s+(?:#|--|\*)? *", " ", text)  # a citation may be broken over two lines
        for page, named in re.findall(rf"(docs/[\w/-]+\.md) {numbers}\b(?! \w+/)", flat):
            cited += 1
            for number in re.findall(r"\d+[a-z]?", named):
                assert number in _sections((ROOT / page).read_text()), f"{path}: {page} {named}"
    assert cited > 40


def test_rules_that_are_cited_exist() -> None:
    """There are ten rules, numbered in their order; the docstrings of tests name them."""
    rules = re.findall(r"^### Rule (\d+): ", DESIGN, re.MULTILINE)
    assert rules == [str(number) for number in range(1, 11)]
    for path, text in TEXTS.items():
        for named in re.findall(r"\b[Rr]ules? (\d+(?:(?:,| and| to) \d+)*)", text):
            assert set(re.findall(r"\d+", named)) <= set(rules), f"{path}: rule {named}"


def test_files_that_pages_name_exist() -> None:
    """`streaming/core/stream.py` in backticks is a file or a folder."""
    for page, text in PAGES.items():
        if page.parts[:2] == ("docs", "decisions") or page.name == "CHANGELOG.md":
            continue  # they tell of their time
        for named in re.findall(rf"`((?:{'|'.join(ROOMS)}|helm|docs)/[\w./-]*)`", text):
            assert (ROOT / named).exists(), f"{page}: {named}"


def test_decisions_are_listed_in_their_order() -> None:
    """docs/explanation/decisions.md has every decision with its own title."""
    index = (ROOT / "docs/explanation/decisions.md").read_text()
    for path in sorted((ROOT / "docs/decisions").iterdir()):
        number, title = path.read_text().splitlines()[0].removeprefix("# ").split(". ", 1)
        assert f"{number}. [{title}](../decisions/{path.name})" in index


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs.yml names every page of docs/."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    for path in (ROOT / "docs").rglob("*.md"):
        assert str(path.relative_to(ROOT / "docs")) in navigation, path


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    """Whoever finds it in a header of a dead letter finds it in the design."""
    assert f"`{reason}`" in DESIGN


def test_every_kind_of_record_is_explained() -> None:
    """The design has a row for each."""
    for kind in get_args(Record):
        assert f"| `{kind.__struct_config__.tag}` |" in DESIGN


@pytest.mark.parametrize("folder", ["sinks/postgres/migrations", "sources/relay/migrations"])
def test_every_table_is_explained(folder: str) -> None:
    """What a migration makes, the design names."""
    for path in (ROOT / folder).glob("*.sql"):
        for table in re.findall(r"create table tidemark\.(\w+)", path.read_text()):
            assert re.search(rf"`(tidemark\.)?{table}`", DESIGN), table


def test_every_command_is_in_the_documentation() -> None:
    """A verb that no page shows is known to nobody."""
    pages = "\n".join(text for path, text in PAGES.items() if path.name != "CHANGELOG.md")
    for words in _commands(main):
        assert f"tidemark {words}" in pages, words


def _commands(group: click.Group, before: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def test_nothing_is_cited_that_the_repository_does_not_hold() -> None:
    """A page in capitals is one of ours, and a section is cited with the path of its page."""
    ours = {path.name for path in PAGES}
    for path, text in TEXTS.items():
        assert set(re.findall(r"\b[A-Z]{4,}\.md\b", text)) <= ours, path
        assert not re.search(r"\bDESIGN \d", text), path


def test_texts_name_our_distribution() -> None:
    """It is `tidemark-streams`: `tidemark` on PyPI is another project."""
    wrong = re.compile(r"pip install ['\"]?tidemark(?!-streams)\b|(?<![\w./-])tidemark" + r"\[[a-z]")
    assert [str(path) for path, text in TEXTS.items() if wrong.search(text)] == []
