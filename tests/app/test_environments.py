"""The local stack in what people have in their shells, many things at once."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.app.environments import Case, can_mount, variables
from tests.app.fix_environments import shell

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def test_a_stack_in_the_worst_of_shells_is_ready_twice_and_outlives_its_terminal(jars: Path, tmp_path: Path) -> None:
    """Variables for other servers, a proxy that is dead, a locale without accents, a home with some, and umask 077.

    What is ignored is said once. psql and `tidemark status` find the stack from the same shell. The second start finds
    the data of the first.
    """
    misleading = variables(tmp_path)
    worst = Case({**misleading, "LC_ALL": "C"}, home="José's домой, 家", umask=0o077, linked=True)
    with shell(worst, jars) as user:
        with user.up("nohup") as process:
            said = (user.root / "output").read_text()
            [ignored] = [line for line in said.splitlines() if line.startswith("ignored these variables, because")]
            assert ignored.partition(": ")[2].split(", ") == sorted(misleading)
            process.send_signal(signal.SIGHUP)
            user.use()
            time.sleep(1)
            assert process.poll() is None
        with user.up():
            assert "sales" in user.status()


@pytest.mark.skipif(not can_mount(), reason="needs root, and mounts of one's own")
def test_a_user_whom_nobody_knows_has_a_stack_where_nothing_may_be_executed(jars: Path) -> None:
    """A random user ID without a home directory, and files on a file system that runs no programs."""
    unknown = Case(nameless=True, unset=["HOME"])
    with shell(replace(unknown, noexec=True), jars) as user, user.up():
        assert "starting sidecar" in (user.root / "output").read_text()
