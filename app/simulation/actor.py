"""A process of a play as its director has it: started, killed, stopped, told to end. Knows nothing of what it plays."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

Kind = Literal["writer", "reader"]


class Actor:
    """Started at once. Its output goes to the end of `log`. It ends by itself when the director dies."""

    def __init__(self, kind: Kind, role: bytes, log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tidemark.app.simulation", kind, role.decode()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )

    @property
    def ended(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.terminate()

    def retire(self) -> None:
        """For a writer: stop, and never come back under this name."""
        self._process.send_signal(signal.SIGUSR1)

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True
