"""Starts the stack as somebody would in the shell of a `Case`."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from tests.app.environments import Case, private
from tests.waiting import eventually
from tidemark.app.stack.postgres import postgres_program
from tidemark.common.environment import child_environment

TIDEMARK = (sys.executable, "-P", "-m", "tidemark")
SERVERS = ("KAFKA", "POSTGRES", "REDIS", "METRICS", "SIDECAR", "LINES")
# Bounds for a test that hangs. A start that hangs ends by itself, so a stack on a busy machine has the time it needs.
READY_SECONDS, END_SECONDS, COMMAND_SECONDS = 1500.0, 300.0, 600.0
APPEND = "select tidemark.create_stream('sales'); select tidemark.append('sales', '{}')"


@dataclass
class Shell:
    """One user's shell; `home` is that of the stack."""

    case: Case
    root: Path
    home: Path
    jars: Path

    @property
    def environment(self) -> dict[str, str]:
        ports = {f"TIDEMARK_UP_{server}_PORT": "0" for server in SERVERS}
        found = child_environment({**ports, "TMPDIR": str(self.root)}) | {"TIDEMARK_HOME": str(self.home)}
        found |= self.case.variables
        if self.case.user_home:
            found["HOME"] = str(self.root / self.case.user_home)
        if self.case.uid or self.case.user_home or "HOME" in self.case.variables:  # nobody says where
            del found["TIDEMARK_HOME"]
        return {name: text for name, text in found.items() if name not in self.case.unset}

    def run(self, *command: str, **more: str) -> str:
        """What a command prints; fails with what it says if it does not end with code 0."""
        done = subprocess.run(
            command,
            env=self.environment | more | ({"TIDEMARK_HOME": str(self.home)} if self.case.uid else {}),
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def up(self, *before: str) -> Iterator[subprocess.Popen[bytes]]:
        """A stack that is ready, by `BEFORE... tidemark up`; it ends with code 0."""
        command, told = [*before, *TIDEMARK, "up"], self.environment
        if self.case.noexec or self.case.uid:
            wrapped, more = private(self.case, self.home, self.jars)
            command, told = [*wrapped, *command], told | more
        output = self.root / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, env=told, cwd=self.root, stdout=file, stderr=file, umask=self.case.umask
            )
        try:
            ended = lambda: process.poll() is not None or "ready after" in output.read_text()  # noqa: E731
            eventually(ended, READY_SECONDS, output.read_text)
            assert process.poll() is None, output.read_text()
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(END_SECONDS)
        assert code == 0, output.read_text()

    def use(self) -> None:
        """What a newcomer does next: settings, a fact by psql, `tidemark status`."""
        sourced = f'. "$0" && "$1" -qc "{APPEND}" && env'
        said = self.run("sh", "-c", sourced, str(self.home / "stack.env"), postgres_program("psql"))
        assert "127.0.0.1" in next(line for line in said.splitlines() if line.startswith("no_proxy="))
        eventually(lambda: "sales" in self.status(), COMMAND_SECONDS, self.status)

    def status(self) -> str:
        """What `tidemark status` says in this shell."""
        return self.run(*TIDEMARK, "status")


@contextmanager
def shell(case: Case, jars: Path) -> Iterator[Shell]:
    """A shell with a home of its own, which is removed in the end."""
    root = Path(mkdtemp(prefix="tidemark-shell-", dir="/tmp"))
    root.chmod(0o755)
    try:
        user = case.uid or os.getuid()
        name = f"tidemark-{user}" if case.uid or "HOME" in case.variables else case.home
        home = root / (f"{case.user_home}/.cache/tidemark" if case.user_home else name)
        if directory := case.variables.get("SPARK_CONF_DIR"):
            defaults = "spark.eventLog.enabled true\nspark.eventLog.dir /none\n"
            Path(directory, "spark-defaults.conf").write_text(defaults)
        place = root / "elsewhere" if case.linked else home
        place.mkdir(parents=True)
        if case.linked:
            home.symlink_to(place)
        if not case.noexec:
            (home / "jars").symlink_to(jars)
        if case.uid:
            for path in (root, home):
                os.chown(path, case.uid, case.uid)
        yield Shell(case, root, home, jars)
    finally:
        shutil.rmtree(root, ignore_errors=True)
