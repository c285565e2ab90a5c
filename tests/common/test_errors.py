"""The short form of an error, with which a program ends."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from tidemark.common.errors import LeaseLost
from tidemark.errors import BadToken, Refused, Retry, TidemarkError, Unavailable, exit_on_error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("Postgres", "db/shop", "no such\ntable", "check its name"), 2),
        (Unavailable("Redis", "r:1", "away"), 1),
        (BadToken("m", "no ID"), 1),
    ],
)
def test_program_ends_with_a_line_and_a_hint(
    capsys: pytest.CaptureFixture[str], error: TidemarkError, code: int
) -> None:
    """On standard error, with the exit codes of the command line; the short form is the same text."""
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise error
    line, hint = capsys.readouterr().err.splitlines()
    assert ended.value.code == code
    assert f"{line}\n{hint}" == f"error: {error.short}"
    assert hint == f"Hint: {type(error).hint}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LeaseLost(1, 2), "the lease was taken over: this process has token 1, the newest token is 2"),
        (LeaseLost(1, 2, was_given_up=True), "the lease was taken over: this process has token 1"),
        (LeaseLost(1, 1, was_given_up=True), "this process gave up the lease with token 1"),
        (LeaseLost(1, 1), "Postgres no longer has the lease with token 1"),
        (LeaseLost(1, 0), "Postgres no longer has the lease with token 1"),
    ],
)
def test_lost_lease_names_its_cause(error: LeaseLost, text: str) -> None:
    """Only a higher token is a takeover."""
    assert str(error).startswith(text)


def test_ctrl_c_ends_the_program_without_a_message() -> None:
    """With the code that shells report for SIGINT; also while `asyncio.run` runs."""
    program = (
        "import asyncio, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from tidemark.errors import exit_on_error\n"
        "with exit_on_error():\n"
        "    print('begun', flush=True)\n"
        "    asyncio.run(asyncio.sleep(60)) if sys.argv[1] == 'asyncio' else time.sleep(60)\n"
    )
    for kind in ("threads", "asyncio"):
        process = subprocess.Popen(
            [sys.executable, "-c", program, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            time.sleep(0.2)  # asyncio.run handles signals
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 130


def test_errors_of_others_pass() -> None:
    """A fault of the program is no fault of its user's world, and keeps its traceback; also in a group."""
    with pytest.raises(KeyError), exit_on_error():
        raise KeyError("id")
    with pytest.raises(BaseExceptionGroup), exit_on_error():
        raise BaseExceptionGroup("two", [KeyError("id"), Retry()])


def test_task_group_ends_the_program_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A group of nothing but errors of Tidemark is told by its first."""

    async def fail() -> None:
        raise Unavailable("Redis", "r:1", "away")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    with pytest.raises(SystemExit) as ended, exit_on_error():
        asyncio.run(main())
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: Redis at r:1 is unavailable: ")


def test_no_traceback_is_printed() -> None:
    """Of the program as a person runs it, also where one error came of another."""
    program = (
        "from tidemark.errors import Refused, exit_on_error\n"
        "with exit_on_error():\n"
        "    try:\n"
        "        raise ValueError('inner')\n"
        "    except ValueError as error:\n"
        "        raise Refused('Postgres', 'db', 'no', 'check it') from error\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "Traceback" not in done.stderr
