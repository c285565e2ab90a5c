"""The generated pages say what the code says."""

import pytest

from tests.docs import drawings
from tests.docs.reference import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    """`make docs` writes it."""
    assert (FOLDER / name).read_text() == PAGES[name]()


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_up_to_date(name: str) -> None:
    """`make docs` draws it."""
    assert (drawings.FOLDER / name).read_text() == drawings.DRAWINGS[name]()
