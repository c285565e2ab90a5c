"""`tidemark` as a person runs it: processes of its own, signals, and whatever they print."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.shadows import shadowed
from tests.waiting import eventually
from tidemark.app.settings import read_stack_env
from tidemark.app.stack.home import Home
from tidemark.common.environment import child_environment

_TIDEMARK = (sys.executable, "-P", "-m", "tidemark")  # as the installed command, which does not look around itself
READY_SECONDS = 300.0  # with other tests on the same cores


class Terminal:
    """Runs `tidemark` with a home of its own, in which the jars are there already, and free ports."""

    def __init__(self, root: Path, jars: Path) -> None:
        self.home = Home(root)
        if not (root / "jars").exists():
            (root / "jars").symlink_to(jars)
        self.output = root / "output"
        self.folder = shadowed(root / "folder")
        servers = ("KAFKA", "POSTGRES", "REDIS", "METRICS", "SIDECAR", "LINES")
        ports = {f"TIDEMARK_UP_{server}_PORT": "0" for server in servers}
        self.environment = child_environment({"TIDEMARK_HOME": str(root), **ports})

    def run(
        self, *words: str, stdin: bytes = b"", patience: float = 60.0, **changes: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*_TIDEMARK, *words],
            input=stdin,
            env=self.environment | changes,
            capture_output=True,
            cwd=self.folder,
            timeout=patience,
            check=False,
        )

    def run_aloud(self, *words: str, patience: float) -> subprocess.CompletedProcess[bytes]:
        """`run` for what takes long: also prints each line at once, of both outputs together."""
        lines: list[bytes] = []
        command = [*_TIDEMARK, *words]
        with subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder
        ) as process:
            timer = threading.Timer(patience, process.kill)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
                lines.append(line)
            timer.cancel()
        return subprocess.CompletedProcess(command, process.returncode, b"".join(lines), b"")

    @contextmanager
    def up(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """A stack that is ready; ended with Ctrl-C where the test did not do it itself."""
        command = [*_TIDEMARK, "up", *words]
        with self.output.open("wb") as output:
            process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output, cwd=self.folder)
        try:
            ready = "ready after"
            eventually(lambda: process.poll() is not None or self.said(ready), READY_SECONDS, self.output.read_text)
            assert process.poll() is None, self.output.read_text()
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)

    def said(self, text: str) -> bool:
        return text in self.output.read_text()

    @property
    def stack_env(self) -> dict[str, str]:
        return read_stack_env(self.home.stack_env)

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(str(self.stack_env["TIDEMARK_REDIS_URL"]), decode_responses=True)


@pytest.fixture
def terminal(tmp_path: Path, jars: Path, warm_jvm: None) -> Terminal:
    return Terminal(tmp_path, jars)
