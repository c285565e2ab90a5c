"""The commands of the benchmarks, which nothing else loads."""

import pytest
from click.testing import CliRunner

from tests.bench.__main__ import main


@pytest.mark.parametrize("name", sorted(main.commands))
def test_each_says_what_it_takes(name: str) -> None:
    """So that a plan whose fields have other names now is seen before somebody wants to measure."""
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
