"""Names and phrases that Tidemark no longer uses are in no page, in no file of the chart, and not on the live page."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_prose import ROOT

ALERTS = (
    "TidemarkBehindPolicy",
    "TidemarkBoundNear",
    "TidemarkBridgeDeaf",
    "TidemarkBridgeHearsNobody",
    "TidemarkBridgeWaits",
    "TidemarkChainBroken",
    "TidemarkForced",
    "TidemarkHangs",
    "TidemarkLag",
    "TidemarkLineStill",
    "TidemarkNotPublishing",
    "TidemarkReadBeyondEnd",
    "TidemarkServerAway",
    "TidemarkSidecarWithoutServer",
    "TidemarkStandsStill",
    "TidemarkStreamsNotShown",
    "TidemarkTransactionBlocks",
    "TidemarkTwoOwners",
    "TidemarkWriterBehind",
)
SETTINGS = ("TIDEMARK_GAP_SECONDS", "STORIES_WRITE", "TORTURE_SECONDS", "TORTURE_SEED")
TARGETS = ("make append-torture", "make rooms-torture", "make stories", "make torture", "make worlds")
FOLDERS = ("tests/stories", "tests/torture", "tests/worlds")

PHRASES = (
    # words
    r"(?:is|are|was|were|be|been) (?:told|held|owed|let go|put off)",
    r"befall\w*|befell",
    r"lets? go|puts? off|owes?|owed",
    r"not told yet",
    r"stands? still|the line stands?",
    r"who(?:m|se)?ever",
    r"woken at night",
    # the live page and the command line
    r"asking the sidecar",
    r">ids behind",
    r"let the line of",
    r"nobody can be asked",
    r"that is your word alone",
    r"which has told nothing",
    # sentences
    r"a writer is nothing but its name",
    r"beyond what is allocated an act is refused",
    r"gives? way",
    r"goes? round|waiting is life",
    r"how far may a reader safely read",
    r"i am gone",
    r"is for nobody",
    r"no clock is asked",
    r"nothing will ever be written with it",
    r"once in effect",
    r"persisters",
    r"pipelines do not add up",
    r"tidemark is dear",
    r"torture",
    r"what an operator may force",
    r"what befalls whom",
    r"what they fetch of older history",
    r"with what a python service would have to write",
)
"""Regular expressions of phrases, for text in lower case with single spaces. docs/design.md has the vocabulary."""

MARKS = re.compile(r"^\s*(?:#|//|\*|\{\{/\*)+ ?", re.MULTILINE)


OLD_NAMES = ROOT / "docs/reference/old-names.md"


def texts() -> Iterator[tuple[Path, str]]:
    """Pages except the table of old names, the chart and the live page. The schemas repeat docstrings."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile", ROOT / "mkdocs.yml"]:
        if path != OLD_NAMES:
            yield path, path.read_text()
    for folder in ("helm/tidemark", "tidemark/app/sidecar/page/files"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".css", ".html", ".js", ".json", ".md", ".py", ".tpl", ".txt", ".yaml"}:
                yield path, path.read_text()


TEXTS = {str(path.relative_to(ROOT)): text for path, text in texts()}


def test_texts_are_found() -> None:
    """Of each kind one."""
    assert {"README.md", "docs/design.md", "helm/tidemark/files/alerts.yaml", "Makefile"} <= TEXTS.keys()
    assert "tidemark/app/sidecar/page/files/index.html" in TEXTS


@pytest.mark.parametrize("name", [*ALERTS, *SETTINGS, *TARGETS, *FOLDERS])
def test_a_retired_name_is_on_no_page(name: str) -> None:
    """As a word, also in an anchor."""
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.IGNORECASE)
    assert [path for path, text in TEXTS.items() if word.search(text)] == []


def test_old_names_are_on_no_other_page() -> None:
    """The table has every setting, metric and command that was renamed or removed. The changelog names its page."""
    old = re.findall(r"^\| `([^`]+)` \|", OLD_NAMES.read_text(), re.MULTILINE)
    assert "(docs/reference/old-names.md)" in (ROOT / "CHANGELOG.md").read_text()
    assert len(old) > 40
    word = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, old))})(?:_total)?(?![\w-])")
    assert [(path, match[0]) for path, text in TEXTS.items() for match in word.finditer(text)] == []


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_retired_phrase_is_on_no_page(phrase: str) -> None:
    """Line ends and signs of comments do not count."""
    pattern = re.compile(rf"(?<![\w-])(?:{phrase})(?![\w-])")
    plain = {path: " ".join(MARKS.sub("", text).lower().split()) for path, text in TEXTS.items()}
    assert [(path, match[0]) for path, text in plain.items() for match in pattern.finditer(text)] == []
