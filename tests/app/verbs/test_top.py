"""`tidemark top` on real servers."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from subprocess import DEVNULL

import pytest
from click.testing import CliRunner

from tests.app.sidecar.given import At, moved
from tests.sinks.reader.given import Pipeline
from tidemark.app.cli import main
from tidemark.app.verbs.status import fit_terminal
from tidemark.common.environment import child_environment


def test_each_look_shows_what_is_held_before_what_stands(pipeline: Pipeline, dsn: str) -> None:
    """As `gaps` and `status` tell it; for programs a line each. Of a stream that is
    not there it is no answer that nothing is held."""
    pipeline.publish(moved("s", 7, w=At(0, 7, pending=9)))
    settings = {"TIDEMARK_POSTGRES_DSN": dsn}
    shown = CliRunner().invoke(main, ["top", "--times=1"], env=settings)
    assert shown.exit_code == 0
    assert shown.output.index("s: w: ID 8 open") < shown.output.index("STREAM")
    told = CliRunner().invoke(main, ["top", "--times=2", "--every=0.2", "--json"], env=settings)
    looks = [json.loads(line) for line in told.output.splitlines()]
    assert [(it["streams"][0]["linear"], it["gaps"][0]["top"]) for it in looks] == [(7, 8), (7, 8)]
    mistyped = CliRunner().invoke(main, ["top", "S", "--times=1"], env=settings)
    assert (mistyped.exit_code, "there is no stream S" in mistyped.output) == (1, True)


def test_a_narrow_terminal_is_not_scrolled() -> None:
    """What is held stands first, and long lines take several rows of it."""
    lines = ["x" * 41, "", "x" * 40, "x"]
    assert fit_terminal(lines, 40, 6) == lines
    assert fit_terminal(lines, 40, 5) == lines[:3]
    assert (fit_terminal(lines, 40, 3), fit_terminal(lines, 40, 2)) == (lines[:1], [])
    assert fit_terminal(lines, 80, 3) == lines[:2]


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_a_terminal_that_cannot_be_cleared_is_not_told_to(pipeline: Pipeline, dsn: str, terminal: str) -> None:
    """No escape sequence stands on one that shows them as they are; the look itself is there on any."""
    pipeline.publish(moved("s", 7, w=At(0, 7, pending=9)))
    ours, theirs = pty.openpty()
    environment = child_environment({"TIDEMARK_POSTGRES_DSN": dsn}) | {"TERM": terminal}
    command = [sys.executable, "-m", "tidemark.app.cli", "top", "--times=1"]
    subprocess.run(command, env=environment, stdin=DEVNULL, stdout=theirs, timeout=60, check=True)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # nobody writes to it any more
        while more := os.read(ours, 65536):
            said += more
    os.close(ours)
    assert b"s: w: ID 8 open" in said
    assert (b"\x1b" in said) == (terminal == "xterm")
