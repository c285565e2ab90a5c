"""The simulations of `tests/app/simulation/test_simulate.py` with all faults, for ten minutes each.

Run `make chaos` or `make chaos-rooms`. Options: SECONDS=, and for `make chaos` SEED=.
"""

import os

import click

from tests.app.simulation.test_simulate import require_injected, require_right, require_rooms_right
from tests.fix_stack import Terminal
from tidemark.app.simulation.rooms import RoomsWorkload
from tidemark.app.simulation.script import Fault

SECONDS = int(os.environ.get("CHAOS_SECONDS") or 600)
SEED = os.environ.get("CHAOS_SEED") or None


def test_no_fact_is_missed_duplicated_or_out_of_order(terminal: Terminal) -> None:
    """`make chaos`: processes and servers are killed, restored and replaced repeatedly."""
    with terminal.up():
        require_right(terminal, SECONDS, set(Fault), SEED, aloud=True)


def test_rooms_are_correct(terminal: Terminal) -> None:
    """`make chaos-rooms`: processes and servers are killed, restored and replaced repeatedly."""
    with terminal.up():
        output = require_rooms_right(terminal, SECONDS, RoomsWorkload.faults)
        require_injected(output, RoomsWorkload.faults)
        click.echo(output)
