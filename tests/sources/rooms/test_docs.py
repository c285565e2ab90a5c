"""docs/explanation/rooms.md names tests that are there."""

import re
from pathlib import Path

from tests.sources.rooms import picture

ROOT = Path(__file__).parents[3]


def test_each_statement_has_its_test() -> None:
    """Every test that the page names, in a file of this tree."""
    named = {*re.findall(r"`(test_\w+)`", (ROOT / "docs/explanation/rooms.md").read_text())}
    folders = (ROOT / "tests/sources/rooms", ROOT / "tests/app/simulation")
    found = {
        name
        for folder in folders
        for path in folder.glob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named - found == set()
    assert len(named) > 10


def test_the_picture_is_that_of_the_rules() -> None:
    """`make docs` draws it anew."""
    assert picture.PICTURE.read_text() == picture.drawn()
