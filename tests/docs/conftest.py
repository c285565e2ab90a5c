"""A shell on a stack of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.shell import Shell
from tests.fix_stack import Terminal


@pytest.fixture
def shell(terminal: Terminal, tmp_path: Path) -> Iterator[Shell]:
    folder = tmp_path / "work"
    folder.mkdir()
    with terminal.up():
        shell = Shell(terminal, folder)
        yield shell
        shell.close()


@pytest.fixture
def nc() -> None:
    """Netcat, with which pages show the line protocol."""
