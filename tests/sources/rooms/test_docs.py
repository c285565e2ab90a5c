"""docs/explanation/rooms.md names existing tests, and its picture is up to date."""

import re
from pathlib import Path

from tests.sources.rooms import picture

ROOT = Path(__file__).parents[3]


def test_the_page_names_existing_tests() -> None:
    """Every test that the page names exists in one of two folders."""
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


def test_the_picture_is_up_to_date() -> None:
    """`make docs` draws the picture again."""
    assert picture.PICTURE.read_text() == picture.draw()
