"""The pictures of the live page show commands that exist, with the options that they show; and README's badges."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from tidemark.app import cli

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
SHOWN: dict[str, list[str]] = json.loads((PICTURES / "commands.json").read_text())


@pytest.mark.parametrize("picture", SHOWN)
def test_commands_in_pictures_exist(picture: str) -> None:
    """A command that is renamed has the pictures taken anew: `make pictures`."""
    assert (PICTURES / picture).exists()
    for text in SHOWN[picture]:
        program, *words = shlex.split(text)
        if program != "tidemark":
            continue  # a statement for the writer's database
        command: click.Command | None = cli.main
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
        assert command is not None, text
        with command.make_context(text, words):
            pass


def test_every_picture_of_the_page_is_known() -> None:
    """Those that `make pictures` takes of the live page."""
    assert {path.name for path in PICTURES.glob("page-*.png")} == set(SHOWN)


def test_the_readme_has_badges_of_licence_python_and_ci() -> None:
    """Each is a file of the repository, and links what it is about."""
    line = (ROOT / "README.md").read_text().splitlines()[2]
    badges = dict(re.findall(r"\[!\[[^]]*\]\(([^)]*)\)\]\(([^)]*)\)", line))
    assert badges == {
        "docs/pictures/licence.svg": "LICENSE",
        "docs/pictures/python.svg": "pyproject.toml",
        "docs/pictures/ci.svg": ".github/workflows/ci.yml",
    }
    assert all((ROOT / path).exists() for badge in badges.items() for path in badge)
