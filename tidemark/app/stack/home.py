"""Where the local stack keeps its files, and who may use them: one directory, one stack at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemark.common.errors import Stop


class AlreadyRunning(Stop):
    """Another `tidemark up` holds this home; `pid` is its process."""

    def __init__(self, root: Path, pid: str) -> None:
        super().__init__(
            f"a stack is already running in {root} (pid {pid}): stop it with Ctrl-C or `kill {pid}`,"
            " or give this one its own TIDEMARK_HOME and ports"
        )
        self.root = root
        self.pid = pid


@dataclass(frozen=True, slots=True)
class Home:
    """The layout of TIDEMARK_HOME. Directories come into being when they are asked for."""

    root: Path

    def _directory(self, *parts: str) -> Path:
        path = self.root.joinpath(*parts)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def jars(self) -> Path:
        return self._directory("jars")

    def data(self, name: str) -> Path:
        return self._directory("data", name)

    def log(self, name: str) -> Path:
        return self._directory("log") / f"{name}.log"

    def pid(self, name: str) -> Path:
        return self._directory("run") / f"{name}.pid"

    @property
    def stack_env(self) -> Path:
        return self.root / "stack.env"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the home for this process; raises `AlreadyRunning`.

        The claim is a file lock, so it ends with the process however that dies; the number in the file is for people.
        """
        path = self.pid("up")
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise AlreadyRunning(self.root, file.read().strip()) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
            file.truncate(0)
