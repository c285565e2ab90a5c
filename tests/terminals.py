"""Runs a Python program on a terminal, and returns what the terminal shows."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping


def shown_on_a_terminal(
    program: str,
    *words: str,
    environment: Mapping[str, str] | None = None,
    on_output: Callable[[str], object] = lambda _: None,
) -> str:
    """Both outputs of the program, whose standard output and standard error are one terminal.

    Args:
        program: the text of a Python program.
        words: its arguments.
        environment: variables that are added.
        on_output: called with everything that is shown so far, after each new part.
    """
    ours, theirs = pty.openpty()
    variables = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    variables |= {"TERM": "xterm"} | dict(environment or {})
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux ends a terminal so
                break
            if not part:
                break
            shown += part
            on_output(shown.decode(errors="replace"))
        process.wait(60)
    os.close(ours)
    return shown.decode()
