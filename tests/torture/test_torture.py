"""The play of `tests/app/simulation/test_simulate.py` with all faults, for ten minutes: `make torture`."""

import click

from tests.app.simulation.test_simulate import require_right
from tests.fix_stack import Terminal
from tidemark.sources.simulator.script import Fault

SECONDS = 600


def test_nothing_is_missed_doubled_or_disordered_for_as_long_as_it_lasts(terminal: Terminal) -> None:
    """Whatever dies, goes back or is replaced, again and again."""
    click.echo(require_right(terminal, SECONDS, set(Fault)))
