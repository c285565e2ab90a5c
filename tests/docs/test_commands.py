"""README and tutorials, typed word for word on a local stack: each command succeeds and prints what the page shows."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.fix_stack import Terminal
from tests.waiting import eventually
from tidemark.app.stack.postgres import postgres_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VISIBLE_SECONDS = 60.0
NOT_TYPED = re.compile(r"make (?:run|up)\b|.*pip install ")
"""The stack runs already, and Django is installed."""
LOOKS = re.compile(r"tidemark (?:status|gaps|explain)\b")


@dataclass(frozen=True)
class Block:
    """A code block of a page, with the paragraph before it."""

    language: str
    text: str
    before: str


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield Block(found[1], found[2], text[: found.start()].rstrip().rpartition("\n\n")[2])


def commands(block: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Each command behind `$ ` with the lines that it prints. A command goes on after a `|` at the end of its line."""
    for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = entry.splitlines()
        while lines[0].endswith("|"):
            lines[:2] = [f"{lines[0]} {lines[1].strip()}"]
        yield lines[0], lines[1:]


def alike(line: str) -> str:
    """A line without what differs from run to run: numbers, times, and the widths of columns."""
    line = re.sub(r"\d+(?: min| h)?", "0", line)
    return " ".join(line.split())


@dataclass
class Shell:
    """Types commands in a folder, with the settings of the stack."""

    terminal: Terminal
    folder: Path
    psql: "subprocess.Popen[str] | None" = field(default=None)

    def typed(self, command: str, patience: float = 60.0) -> str:
        """What a command prints. Fails with a command that fails."""
        if command.startswith("cd "):
            self.folder /= command[3:]
            return ""
        done = self._run(command, patience)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def shows(self, command: str, lines: Sequence[str]) -> None:
        """Type a command that only looks until it succeeds and prints these lines; any other one once."""
        if not LOOKS.search(command):
            self.typed(command)
            return
        wanted = {alike(line) for line in lines}
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
        path = f"{Path(postgres_program('psql')).parent}:{self.terminal.environment['PATH']}"
        return {**self.terminal.environment, **settings, "PATH": path, "PYTHONUNBUFFERED": "1"}

    def _words(self, command: str) -> str:
        program = re.sub(r"(?:\.\./)?\.venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/", command)
        return program.replace("~/.cache/tidemark/stack.env", shlex.quote(str(self.terminal.home.stack_env)))

    def _run(self, command: str, patience: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", self._words(command)],
            env=self._environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience,
            check=False,
        )

    def _started(self, command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-c", f"exec {self._words(command)}"],
            env=self._environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def shell(terminal: Terminal, tmp_path: Path) -> Iterator[Shell]:
    folder = tmp_path / "work"
    folder.mkdir()
    with terminal.up():
        shell = Shell(terminal, folder)
        yield shell
        shell.close()


def _typed_page(shell: Shell, page: str) -> None:
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
                shell.shows(_today(command), lines)


def _today(command: str) -> str:
    """A command whose times are those of this run."""
    now = datetime.now(UTC)
    return command.replace("10:00 10:30", f"{now - timedelta(hours=1):%Y-%m-%dT%H:%MZ} {now:%Y-%m-%dT%H:%M:%SZ}")


def test_the_first_tutorials(shell: Shell) -> None:
    """A first stream and reader, then a blocked stream, as one who begins types them."""
    _typed_page(shell, "docs/tutorials/first-stream.md")
    _typed_page(shell, "docs/tutorials/blocked-stream.md")


def test_the_readme(shell: Shell) -> None:
    """The first stream, the first reader."""
    _typed_page(shell, "README.md")
    (program,) = (block.text for block in blocks("README.md") if block.language == "python")
    assert len(program.splitlines()) <= 10
    (shell.folder / "books.py").write_text(program)
    shell.follow(".venv/bin/python books.py", ["{'id': 1, 'total': 40}"])


def test_the_tutorial_of_django(shell: Shell) -> None:
    """The project is made as the page says, sells two tickets and rolls one back; the reader counts 42."""
    places = {"models": "tickets/models.py", "0002_stream": "tickets/migrations/0002_stream.py"}
    commands_folder = "tickets/management/commands"
    for block in blocks("docs/tutorials/django.md"):
        if block.language == "python" and "settings.py" in block.before:
            settings = shell.folder / "shop/settings.py"
            before, _, databases = settings.read_text().partition("DATABASES = ")
            after = databases.partition("\n}\n")[2]
            text = f"import os\n{before}{block.text}{after}"
            settings.write_text(
                text.replace("'django.contrib.staticfiles',", "'django.contrib.staticfiles', 'tickets',")
            )
        elif block.language == "python":
            name = next((path for part, path in places.items() if part in block.before), None)
            target = shell.folder / (name or f"{commands_folder}/keep_revenue.py")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
        elif block.language == "console" and ">>>" in block.text:
            said = re.findall(r"^(?:>>>|\.\.\.) ?(.*)$", block.text, re.MULTILINE)
            imports = "from tickets.models import sell"
            statements = "\n".join([imports, *said])
            shell.typed(f"../.venv/bin/python manage.py shell -c {shlex.quote(statements)}")
        elif block.language == "console":
            for command, _ in commands(block.text):
                if not NOT_TYPED.match(command) and "keep_revenue" not in command:
                    shell.typed(command)

    def revenue_is_stored() -> None:
        eventually(lambda: shell.typed('psql -Atc "SELECT total FROM revenue"') == "42\n", VISIBLE_SECONDS)

    shell.follow("../.venv/bin/python manage.py keep_revenue", ["2 tickets, 42 in all"], revenue_is_stored)
