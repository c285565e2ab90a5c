"""files/wait_for_secrets.py: the first program of a hook's container."""

import subprocess
import sys
from pathlib import Path

from tests.helm.tools import CHART

SCRIPT = (CHART / "files/wait_for_secrets.py").read_text()


def start(seconds: str, *expected: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, *expected, "--", sys.executable, "-c", "print('started')"]
    return subprocess.Popen(
        command, env={"SECRETS_SECONDS": seconds}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_program_starts_when_the_files_are_there(tmp_path: Path) -> None:
    """The rest of the command line is the program."""
    (tmp_path / "password").touch()
    out, _ = start("0", f"{tmp_path}/password=no password").communicate(timeout=30)
    assert out == "started\n"


def test_a_file_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    """An operator may create the Secret while the hook runs."""
    process = start("30", f"{tmp_path}/password=no password")
    (tmp_path / "password").touch()
    out, _ = process.communicate(timeout=30)
    assert out == "started\n"


def test_every_missing_file_is_named(tmp_path: Path) -> None:
    """The program does not start, and the exit code ends the Job."""
    process = start("0", f"{tmp_path}/a=no a: create it", f"{tmp_path}/b=no b: create it")
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out, errors) == (1, "", "no a: create it\nno b: create it\n")
