"""The language of the documentation: short sentences, short pages, and for whom each page is."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.site_hooks import OUTSIDE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS = {"README.md": 900, "CHANGELOG.md": 600}
PAGE_WORDS = 1500
ALL_WORDS = 35_000
GENERATED = {
    "cli",
    "glossary",
    "http-api",
    "metrics",
    "records",
    "redis-keys",
    "settings",
    "sql-functions",
    "benchmarks",
}
WHOLE = {DOCS / "design.md"}
"""Pages that keep their length: the rules and contracts, which code cites."""

PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.stem not in GENERATED]
EXTRA = [ROOT / path for path in OUTSIDE if path not in MOST_WORDS and path != "helm/tidemark/README.md"]
"""Pages of the site that lie outside docs/. The chart's README is generated."""
GUIDES = [
    ROOT / "README.md",
    *(path for path in PAGES if path.parent.name in {"tutorials", "how-to"} or path.parent.name == "runbooks"),
]
MEAN, LONGEST = 16, 30
"""Words of a sentence."""


def prose(page: str) -> str:
    """A page without code blocks, raw HTML and pictures."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|</?\w[^>]*>", "", text, flags=re.DOTALL)
    return re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)


def words(text: str) -> Sequence[str]:
    """What a person reads as a word: link targets and signs are none. A span of code is one."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.findall(r"[^\W_][\w'.,:/%-]*", text)


def sentences(page: str) -> Sequence[str]:
    """Of paragraphs and lists. Tables and headings have none; a list item without a full stop counts as one."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", prose(page)):
        lines = [line for line in block.splitlines() if not re.match(r"\s*(\||#)", line)]
        for item in re.split(r"^\s*(?:[-*]|\d+\.) ", "\n".join(lines), flags=re.MULTILINE):
            text = re.sub(r"\]\([^)]*\)", "]", " ".join(item.split()))
            text = re.sub(r"`[^`]*`", "code", text).replace("**", "")
            found += [part for part in re.split(r"(?<=[.!?])[)\"]? (?=[\[(\"A-Z0-9c])", text) if words(part)]
    return found


@pytest.mark.parametrize(
    "page", [ROOT / name for name in MOST_WORDS] + PAGES + EXTRA, ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_page_is_short(page: Path) -> None:
    """Code blocks do not count."""
    most = MOST_WORDS.get(str(page.relative_to(ROOT)), PAGE_WORDS)
    assert page in WHOLE or len(words(prose(page.read_text()))) <= most


@pytest.mark.parametrize("name", MOST_WORDS)
def test_readme_and_changelog_are_short_by_any_count(name: str) -> None:
    """As `wc -w` counts, code and link targets included."""
    assert len((ROOT / name).read_text().split()) <= MOST_WORDS[name]


def test_the_readme_has_five_figures() -> None:
    """In its table."""
    text = (ROOT / "README.md").read_text()
    _, _, figures = text.partition("## Figures\n")
    rows = [line for line in figures.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 5


def test_the_documentation_is_short() -> None:
    """All pages that people write, and the README."""
    pages = [ROOT / "README.md", *PAGES]
    assert sum(len(words(prose(page.read_text()))) for page in pages) <= ALL_WORDS


@pytest.mark.parametrize("page", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_long(page: Path) -> None:
    """At most 30 words."""
    assert [sentence for sentence in sentences(page.read_text()) if len(words(sentence)) > LONGEST] == []


def test_sentences_are_short() -> None:
    """README, tutorials and how-to: at most 16 words on average."""
    lengths = [len(words(sentence)) for page in GUIDES for sentence in sentences(page.read_text())]
    assert sum(lengths) / len(lengths) <= MEAN


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_says_for_whom_it_is(page: Path) -> None:
    """Its first line after the title. Decisions and the design have one audience: contributors."""
    if page.parent.name == "decisions" or page in WHOLE:
        return
    first = next(line for line in prose(page.read_text()).splitlines()[1:] if line.strip())
    assert re.search(
        r"\b[Ff]or [\w' ]*(?:engineer|developer|operator|everyone|contributor|program|script|bug report|maintainer)",
        first,
    )
