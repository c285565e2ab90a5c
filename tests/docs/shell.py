"""The code blocks of a page, and a shell on the local stack in which a test types their commands."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.fix_stack import Terminal
from tests.waiting import eventually
from tidemark.app.stack.postgres import postgres_program
from tidemark.app.stack.processes import redis_program

ROOT = Path(__file__).parents[2]
VISIBLE_SECONDS = 180.0
"""A bound for a test that hangs, on a machine with other tests."""
NOT_TYPED = re.compile(r"make (?:run|up)\b|.*pip install ")
"""The stack runs already, and packages are installed."""
LOOKS = re.compile(
    r"tidemark (?:status|gaps|top|explain|trace|verify|(?:readers|overrides|late|dead-letters) list)\b|redis-cli "
)


@dataclass(frozen=True)
class Block:
    """A code block of a page, with the paragraph before it."""

    language: str
    text: str
    before: str


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, without the indentation of the list to which a block belongs."""
    text = (ROOT / page).read_text()
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        lines = re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
        yield Block(found[2], lines, text[: found.start()].rstrip().rpartition("\n\n")[2])


def commands(block: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Each command behind `$ ` with the lines that it prints. A command goes on after a `|` at the end of its line."""
    for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = entry.splitlines()
        while lines[0].endswith("|"):
            lines[:2] = [f"{lines[0]} {lines[1].strip()}"]
        yield lines[0], lines[1:]


def alike(line: str) -> str:
    """A line without what differs from run to run: numbers, times, whether a batch read one record or several (`7..9`),
    and the widths of columns."""
    line = re.sub(r"\d+(?: s| min| h)?\b|\d+", "0", line).replace("0..0", "0")
    return " ".join(line.split())


@dataclass
class Shell:
    """Types commands in a folder, with the settings of the stack."""

    terminal: Terminal
    folder: Path
    programs: Sequence[Path] = ()
    """Directories that come first on the PATH, such as that of an activated virtual environment."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Ports and other numbers of this stack, by those that pages name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names that pages print, by those of this stack."""
    psql: "subprocess.Popen[str] | None" = field(default=None)

    def typed(self, command: str, patience: float = VISIBLE_SECONDS) -> str:
        """What a command prints. Fails with a command that fails."""
        if command.startswith("cd "):
            self.folder /= command[3:]
            return ""
        done = self._run(command, patience)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def shows(self, command: str, lines: Sequence[str], patience: float = VISIBLE_SECONDS) -> None:
        """Type a command that only looks until it succeeds and prints these lines; any other one once."""
        wanted = {alike(line) for line in lines}
        if not LOOKS.search(command):
            once = self.typed(command, patience)
            assert wanted <= {alike(line) for line in once.splitlines()}, f"{command}\n{wanted}\n{once}"
            return
        printed: list[str] = []

        def all_printed() -> bool:
            done = self._run(command, VISIBLE_SECONDS)
            printed[:] = [alike(line) for line in done.stdout.splitlines()]
            return done.returncode == 0 and wanted <= set(printed)

        eventually(all_printed, VISIBLE_SECONDS, lambda: f"{command}\n{wanted}\n{printed}")

    def follow(self, command: str, lines: Sequence[str], then: Callable[[], None] = lambda: None) -> None:
        """Run a program that does not end until it has printed these lines, and `then` has returned."""
        with self._started(command) as process:
            assert process.stdout is not None
            try:
                for line in lines:
                    assert process.stdout.readline().rstrip("\n") == line
                then()
            finally:
                process.terminate()

    @contextmanager
    def running(self, command: str, begun: str, **changes: str) -> Iterator[Callable[[], str]]:
        """A program that does not end, once it has printed what `begun` matches; gives what it has printed so far."""
        output = self.folder / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", self._words(command)],
                env=self._environment | changes,
                cwd=self.folder,
                stdin=subprocess.PIPE,  # which stays open, as a terminal does
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            ended_or_begun = lambda: process.poll() is not None or re.search(begun, output.read_text())  # noqa: E731
            eventually(ended_or_begun, VISIBLE_SECONDS, lambda: f"{command}\n{output.read_text()}")
            assert process.poll() is None, f"{command}\n{output.read_text()}"
            yield output.read_text
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=VISIBLE_SECONDS)

    def in_psql(self, block: str) -> None:
        """Type statements behind the prompt in one session, which stays open."""
        if self.psql is None:
            command = [postgres_program("psql"), "-q", "-v", "ON_ERROR_STOP=1"]
            self.psql = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.psql.stdin is not None
        assert self.psql.stdout is not None
        for statement in re.findall(r"^\w+=\*?# (.*)$", block, re.MULTILINE):
            self.psql.stdin.write(f"{statement}\n")
        self.psql.stdin.write("\\echo typed\n")
        self.psql.stdin.flush()
        while self.psql.stdout.readline() != "typed\n":
            assert self.psql.poll() is None

    def close(self) -> None:
        if self.psql is not None:
            self.psql.communicate(timeout=30)

    @property
    def _environment(self) -> dict[str, str]:
        settings = {name: str(value) for name, value in self.terminal.stack_env.items()}
        servers = [Path(program).parent for program in (postgres_program("psql"), redis_program("redis-cli"))]
        path = ":".join([*map(str, [*self.programs, *servers]), self.terminal.environment["PATH"]])
        # redis-cli prints as it does on a terminal, and curl fails with an answer that is an error.
        return {
            **self.terminal.environment,
            **settings,
            "PATH": path,
            "PYTHONUNBUFFERED": "1",
            "FAKETTY": "1",
            "CURL_HOME": str(self.folder),
        }

    def _words(self, command: str) -> str:
        program = re.sub(r"(?:\.\./)?\.venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/", command)
        program = program.replace("~/.cache/tidemark/stack.env", shlex.quote(str(self.terminal.home.stack_env)))
        return re.sub(r"\b\d{4,}\b", lambda found: self.numbers.get(found[0], found[0]), program)

    def _run(self, command: str, patience: float) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "-c", self._words(command)],
            env=self._environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience,
            check=False,
        )
        for name, shown in self.names.items():
            done.stdout = done.stdout.replace(name, shown)
        return done

    def _started(self, command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-c", f"exec {self._words(command)}"],
            env=self._environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
        )


def typed_page(shell: Shell, page: str) -> None:
    """Everything of a page but programs that do not end, and those that only the text tells to run."""
    for block in blocks(page):
        if block.language == "python" and (name := re.search(r"`([\w.]+\.py)`", block.before)):
            (shell.folder / name[1]).write_text(block.text)
        if block.language == "psql":
            shell.in_psql(block.text)
        if block.language != "console":
            continue
        for command, lines in commands(block.text):
            if NOT_TYPED.match(command):
                continue
            if command.endswith("books.py"):
                shell.follow(command, lines)
            else:
                shell.shows(today(command), lines)


def today(command: str) -> str:
    """A command whose times are those of this run."""
    now = datetime.now(UTC)
    times = f"--between {now - timedelta(hours=1):%Y-%m-%dT%H:%MZ} {now:%Y-%m-%dT%H:%M:%SZ}"
    return re.sub(r"--between \d\d:\d\d \d\d:\d\d", times, command)
