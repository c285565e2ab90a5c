"""Programs that a test runs in a Python of their own, because they look at all of the process."""

import os
import subprocess
import sys


def printed(program: str, *arguments: str, **told: str) -> list[str]:
    """The words that it printed; `told` is set in its environment. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=True, timeout=240)
    return done.stdout.split()
