"""The files below docs/reference/schemas are what the code says."""

from tests.contracts.files import FOLDER, texts


def test_contracts_are_those_of_the_code() -> None:
    """If this fails, run `make docs`."""
    generated = texts()
    assert set(FOLDER.rglob("*.json")) == {*generated}
    for path, text in generated.items():
        assert path.read_text() == text, path


def test_every_contract_is_in_the_index() -> None:
    """The page of the folder links each file."""
    page = (FOLDER / "README.md").read_text()
    for path in texts():
        assert f"({path.relative_to(FOLDER)})" in page, path
