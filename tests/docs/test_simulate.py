"""The pages that run a simulation, typed word for word on a local stack."""

import re
import sys
from pathlib import Path

import pytest

from tests.docs.shell import ROOT, Shell, blocks, commands
from tidemark.app.simulation.script import Fault

PAGES = ("docs/explanation/rooms.md", "docs/how-to/inject-faults.md")
CATCH_UP_SECONDS = 900.0
"""More than the minute of a page, its begin and its end take."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_simulations(shell: Shell) -> None:
    """Each ends with exit code 0 on one stack: whatever dies, no reader misses a fact."""
    shell.programs = [Path(sys.executable).parent]
    for page in PAGES:
        for command in (command for block in blocks(page) for command, _ in commands(block.text)):
            printed = shell.typed(command, CATCH_UP_SECONDS)
            assert "the simulation is over" in printed, printed
            print(f"{command}\n{printed}", flush=True)  # noqa: T201


def test_each_fault_has_its_line() -> None:
    """The table of the page names each fault once."""
    (table,) = re.findall(r"^\| `--faults` .*?\n\n", (ROOT / PAGES[1]).read_text(), re.DOTALL | re.MULTILINE)
    named = [name for row in table.strip().splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(Fault)
