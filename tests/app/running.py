"""A pipeline process, seen as an operator sees it: by its log, its metrics and its exit code. It dies for real."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import psutil

from tests.waiting import eventually
from tidemark.app.stack.processes import LOOPBACK

PATIENCE = 180.0  # seconds; what takes this long on a busy machine will not come


@dataclass
class Running:
    """A pipeline process. Its children (the JVM and Spark's Python workers) are its own business, but for `leave`."""

    process: psutil.Popen
    log_file: Path
    metrics_port: int
    _family: set[psutil.Process] = field(default_factory=set)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text()

    def says(self, text: str, seconds: float = PATIENCE, times: int = 1) -> str:
        """Wait until `text` stands in so many lines of the log; gives the last of them."""

        def found() -> str | None:
            lines = [line for line in self.log().splitlines() if text in line]
            assert len(lines) >= times or self.process.poll() is None, (
                f"it ended and never said {text!r}:\n{self.log()}"
            )
            return lines[-1] if len(lines) >= times else None

        return eventually(found, seconds, lambda: f"{text!r} in the log:\n{self.log()}")

    def metric(self, name: str) -> float | None:
        """A metric without labels; None while nothing is served."""
        try:
            with urlopen(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=20) as response:
                page: str = response.read().decode()
        except OSError:
            return None
        return next((float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} ")), None)

    def ready(self) -> "Running":
        """Wait until it reads and publishes."""

        def found() -> bool:
            assert self.process.poll() is None, f"it ended with code {self.process.returncode}:\n{self.log()}"
            self._look_after()
            return self.metric("tidemark_pipeline_ready") == 1.0

        eventually(found, PATIENCE, lambda: f"ready; its log:\n{self.log()}")
        return self

    def ends(self, seconds: float = PATIENCE) -> int:
        """Wait for the end of the process; its exit code, negative for a signal."""

        def found() -> bool:
            self._look_after()
            return self.process.poll() is not None

        eventually(found, seconds, lambda: f"the end of the process; its log:\n{self.log()}")
        return int(self.process.returncode)

    def terminate(self) -> None:
        """SIGTERM; it must end with code 0 within the ten seconds that an orchestrator gives, for which it has a clock
        of its own; a busy machine adds some."""
        self.process.terminate()
        assert self.ends(20.0) == 0, self.log()

    def kill(self) -> None:
        """SIGKILL to the driver alone, as the kernel does when memory runs out: its JVM has to notice by itself."""
        self._look_after()
        self.process.kill()
        self.process.wait()

    def stopped(self) -> bool:
        """Whether SIGSTOP holds the driver."""
        return bool(self.process.status() == psutil.STATUS_STOPPED)

    def alone(self) -> bool:
        """Whether none of its children is left."""
        return not any(self._alive())

    def leave(self) -> None:
        """End whatever is left of it."""
        self._look_after()
        for process in (self.process, *self._alive()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _look_after(self) -> None:
        if self.process.poll() is None:
            self._family.update(self.process.children(recursive=True))

    def _alive(self) -> Iterator[psutil.Process]:
        for process in self._family:
            with suppress(psutil.NoSuchProcess):  # it ends just then
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
