"""The generated pages say what the code says."""

import re

import pytest

import tidemark
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


def test_each_parameter_of_the_http_api_has_a_meaning() -> None:
    """Without a description a parameter would be explained by its own name."""
    rows = re.findall(
        r"^\| `([\w-]+)` \| (?:path|query|header) \| \w+ \| (.*) \|$", PAGES["http-api.md"](), re.MULTILINE
    )
    assert len(rows) > 10
    assert [name for name, meaning in rows if meaning in {"", name}] == []


def test_the_page_of_the_python_api_has_every_public_name() -> None:
    """But for `Event`, the union of the events; `ZERO`, a token; and `errors`, whose classes it has."""
    page = (FOLDER / "python-api.md").read_text()
    shown = set(re.findall(r"^::: tidemark\.(\w+)$", page, re.MULTILINE))
    assert shown == set(tidemark.__all__) - {"Event", "ZERO", "errors"}
