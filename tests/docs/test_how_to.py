"""Every command of the how-to pages exists: it is parsed as bash does, and by the program that it calls. Commands that
need only the local stack are typed there word for word.

test_every_block.py says where the blocks of the other pages are typed. `NOT_TYPED` and `ELSEWHERE` say what the other
commands need that a test does not have.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.sql import Literal

from tests.docs.shell import ROOT, VISIBLE_SECONDS, Block, Shell, alike, blocks, commands, today, typed_page
from tests.docs.untyped import untyped
from tests.helm.tools import CHART
from tests.waiting import eventually
from tidemark.app.cli import EXAMPLES, main
from tidemark.app.stack.processes import free_port

PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("how-to", "explanation", "reference")
    for path in (ROOT / "docs" / folder).rglob("*.md")
)
ELSEWHERE = {
    "docker": "pushes to a registry",
    "git": "tags and pushes a release",
    "gpg": "needs the key of a release",
    "helm": "changes a cluster",
    "kafka-configs": "needs the tools of Kafka and a topic of the reader's own",
    "kubectl": "needs a cluster",
    "pip": "installs from the package index",
    "python": "runs at the build of an image",
}
"""Programs whose commands are not run by a test of these pages, and why."""
LOCAL = {"tidemark", "check-jsonschema", "echo", "curl", "redis-cli", "nc", "psql", "make", "export", "cat", "."}
"""Programs that are on the machine of whoever runs the stack."""
SHELLS = {"console", "sh", "bash"}
TYPED_PAGES = (
    "how-to/read-from-redis",
    "reference/protocol",
    "how-to/write-facts",
    "how-to/read-facts",
    "how-to/read-in-any-language",
    "how-to/read-over-http",
    "how-to/deploy",
    "how-to/secrets",
    "how-to/settle-by-hand",
    "how-to/run-spark",
    "how-to/run-relay",
)
"""Each begins with what the pages before it left, and the first one with the stream of the first tutorial."""
NOT_TYPED = {
    r"pip install ": "the package is installed",
    r"export TIDEMARK_(KAFKA_BOOTSTRAP_SERVERS|REDIS_URL)=|export TIDEMARK_POSTGRES_DSN='": "names another server",
    r"export TIDEMARK_\w+_PASSWORD_FILE=": "names a file that holds the password of another server",
    r".* ?(https://|tidemark listen )positions\.example": "names another server",
}
"""Commands of `TYPED_PAGES`, as patterns, that are not typed, and why."""


@dataclass(frozen=True)
class Endless:
    """A program that does not end. It has begun when its output matches `begun`, and then prints what the page shows
    while `meanwhile` is executed, if need be again."""

    begun: str
    meanwhile: Sequence[str] = ()
    elsewhere: bool = False
    """Whether the stack runs one already, so that this one needs other ports, as on another host."""


CONNECTED = "import psycopg\nconnection = psycopg.connect()\n{}\nconnection.commit()\n"
"""Around an example that has a connection."""
SALE = "SELECT tidemark.append('sales', '{\"total\": 12}')"
NO_SALE = "BEGIN; SELECT tidemark.append('sales', '{}'); ROLLBACK"
SALE_OF_SHOP, NO_SALE_OF_SHOP = (statement.replace("append(", "append_as('shop', ") for statement in (SALE, NO_SALE))
ENDLESS = {
    "tidemark pipeline": Endless("Waiting for the lease", elsewhere=True),
    "tidemark sidecar": Endless("The sidecar listens", elsewhere=True),
    "tidemark relay --metrics": Endless("Another process has the locks of this relay", elsewhere=True),
    "tidemark listen": Endless("sales"),
    "(echo REPLICATE; cat) | nc": Endless(
        "POSITION sales", [SALE, NO_SALE, NO_SALE, NO_SALE, SALE_OF_SHOP, NO_SALE_OF_SHOP]
    ),
    "curl -N": Endless("event: snapshot"),
}
"""By the beginning of the command."""
GIVEN = {
    "how-to/read-in-any-language": "ALTER TABLE orders ADD customer text, ADD instance text DEFAULT 'tidemark'",
    "how-to/deploy": "CREATE ROLE relay",
}
"""What a page takes as given, beside the stack."""
LONG_SECONDS = 900.0
MOVED_SECONDS = 5.0
"""How long a fact is awaited before another one is written: lines have rows only if those were read in time."""


def shell_commands(page: str) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "console":
            yield from (command for command, _ in commands(block.text))
        elif block.language in SHELLS:
            yield from re.sub(r"\\\n\s*", "", block.text).splitlines()


def programs(command: str) -> Iterator[Sequence[str]]:
    """The programs that a line calls, each with its arguments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    tokens = iter([*lexer, ";"])
    for word in tokens:
        if ">" in word and not word.strip("<>&"):
            next(tokens)  # a file
        elif not re.fullmatch(r"[();<>|&]+", word):
            words.append(word)
        elif words:
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words:
                yield words
            words = []


def listed(page: str) -> list[str]:
    return [command for command in shell_commands(page) if command.strip()]


CALLS = {page: found for page in PAGES if (found := listed(page))}


def calls_of(program: str) -> list[Sequence[str]]:
    return [
        words for found in CALLS.values() for command in found for words in programs(command) if words[0] == program
    ]


def test_every_page_is_looked_at() -> None:
    """A change of the format of the pages must not hide their commands."""
    assert sum(map(len, CALLS.values())) > 100
    assert {Path(page).stem for page in CALLS} >= {"deploy", "kubernetes", "write-facts", "skip", "readers"}


@pytest.mark.parametrize("page", CALLS)
def test_commands_are_those_of_bash(page: str) -> None:
    """`bash -n`, and each program is known to be there, or listed with the reason why no test runs it."""
    text = "\n".join(CALLS[page])
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert {words[0] for command in CALLS[page] for words in programs(command)} <= LOCAL | ELSEWHERE.keys()


@pytest.mark.parametrize("page", CALLS)
def test_verbs_take_these_options(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of `tidemark` accepts verb, arguments and options."""
    monkeypatch.chdir(tmp_path)
    for name in ("recorded", "ca.pem"):
        (tmp_path / name).touch()
    for command in CALLS[page]:
        for words in programs(command):
            if words[0] == "tidemark":
                try:
                    parse(words[1:])
                except click.UsageError as error:
                    pytest.fail(f"{command}: {error.format_message()}")


def test_examples_of_the_help_are_commands() -> None:
    """The parser of `tidemark` accepts each."""
    examples = re.findall(r"^  tidemark (.*?)  ", EXAMPLES, re.MULTILINE)
    assert len(examples) > 3
    for example in examples:
        parse(example.split())


def parse(arguments: Sequence[str]) -> None:
    """Parse as `tidemark` does, and run nothing."""
    found: click.Command = main
    context = found.make_context("tidemark", [*arguments])
    while isinstance(found, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, command, rest = found.resolve_command(context, rest)
        assert command is not None
        found, context = command, command.make_context(name, rest, parent=context)


def test_a_wrong_option_is_found() -> None:
    """The test would see a verb or an option that is gone."""
    for wrong in (
        "skip orders shop",
        "readers seek mailer orders m5000 --dry",
        "statuses",
        "relay migrate --streams x",
    ):
        with pytest.raises(click.UsageError):
            parse(wrong.split())


def test_targets_of_make_exist() -> None:
    """Only their names: what a target does is the subject of other tests."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        words[1] for found in CALLS.values() for command in found for words in programs(command) if words[0] == "make"
    }
    assert named
    assert named <= targets


def test_values_of_helm_exist() -> None:
    """Each `--set` names a value of the chart."""
    rows = (line for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| `"))
    values = {row.split("`")[1] for row in rows}
    calls = [
        words for found in CALLS.values() for command in found for words in programs(command) if words[0] == "helm"
    ]
    given = {words[at + 1].partition("=")[0] for words in calls for at, word in enumerate(words) if word == "--set"}
    assert given
    assert given <= values


def named(page: str) -> str:
    return f"docs/{page}.md"


def test_each_command_that_is_not_typed_is_there() -> None:
    """No entry of the lists is superfluous."""
    found = [command for page in TYPED_PAGES for command in shell_commands(named(page))]
    for pattern in NOT_TYPED:
        assert any(re.match(pattern, command) for command in found), pattern
    for beginning in ENDLESS:
        assert any(command.startswith(beginning) for command in found), beginning


class Database:
    """Executes the statements of a page as the owner of the stack's database."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def execute(self, block: str) -> None:
        """Statement by statement. Each word that a `take` has returned is replaced by its value, row by row."""
        with psycopg.connect(
            self._dsn, autocommit=True, row_factory=dict_row, cursor_factory=psycopg.RawCursor
        ) as connection:
            rows: list[dict[str, object]] = [{}]
            for statement in re.sub(r"--.*", "", block).split(";"):
                if not statement.strip():
                    continue
                is_take = "tidemark_reader.take" in statement
                parameters = ["{}", "{}"] if "$2" in statement else None
                for row in [{}] if is_take else rows:
                    cursor = connection.execute(_filled(statement, row, connection), parameters)
                if is_take:
                    rows = cursor.fetchall()
                    names = [row["writer"] for row in rows if row.get("writer")]
                    rows = [row | {"named": names} for row in rows]
                    assert rows, f"nothing is new: {statement}"


def _filled(statement: str, row: dict[str, object], connection: psycopg.Connection[dict[str, object]]) -> bytes:
    values = {name: Literal(value).as_string(connection) for name, value in row.items()}
    filled = re.sub(r"\b(?:low|high|late|writer|named)\b", lambda word: values.get(word[0], word[0]), statement)
    return filled.encode()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("nc")
def test_the_pages_typed_word_for_word(shell: Shell) -> None:
    """Each command succeeds and prints what its page shows, with one stack for all pages."""
    typed_page(shell, "docs/tutorials/first-stream.md")
    settings = shell.terminal.stack_env
    shell.programs = [Path(sys.executable).parent]
    lines = settings["TIDEMARK_LINES_LISTEN"].rpartition(":")[2]
    shell.numbers = {
        "16379": settings["TIDEMARK_REDIS_URL"].rpartition(":")[2].partition("/")[0],
        "19481": lines,
        "9484": str(free_port()),
    }
    (shell.folder / ".curlrc").write_text("fail\nshow-error\nsilent\n")
    for page in TYPED_PAGES:
        if page in GIVEN:
            Database(settings["TIDEMARK_POSTGRES_DSN"]).execute(GIVEN[page])
        for block in blocks(named(page)):
            typed(shell, page, block)


def typed(shell: Shell, page: str, block: Block) -> None:
    database = Database(shell.terminal.stack_env["TIDEMARK_POSTGRES_DSN"])
    if untyped(named(page), block):
        pass
    elif block.language == "python" and "SHOP_DSN" in block.text:
        keeps_books(shell, block.text)
    elif block.language == "python":
        (shell.folder / "example.py").write_text(CONNECTED.format(block.text))
        shell.typed("python example.py")
    elif block.language == "sql" and "\\watch" in block.text:
        (shell.folder / "billing.sql").write_text(block.text)
        with shell.running("psql -v ON_ERROR_STOP=1 -f billing.sql", "INSERT 0"):
            pass
    elif block.language == "sql":
        database.execute(block.text)
    else:
        assert block.language == "console", f"{page} has a block that no test types: {block.text}"
        for command, lines in commands(block.text):
            if any(re.match(pattern, command) for pattern in NOT_TYPED):
                continue
            print(f"{page}: {command}", flush=True)  # noqa: T201
            endless = next((found for beginning, found in ENDLESS.items() if command.startswith(beginning)), None)
            if endless is None:
                shell.shows(today(command), lines, LONG_SECONDS)
            else:
                runs(shell, database, command, endless, lines)


def keeps_books(shell: Shell, program: str) -> None:
    """Run the service until it has booked an order."""
    dsn = shell.terminal.stack_env["TIDEMARK_POSTGRES_DSN"]
    (shell.folder / "service.py").write_text(program)

    def has_booked() -> bool:
        return shell.typed('psql -Atc "SELECT count(*) FROM booked"') != "0\n"

    with shell.running("python service.py", "", SHOP_DSN=dsn, BOOKS_DSN=dsn):
        eventually(lambda: shell.typed("psql -Atc \"SELECT to_regclass('booked')\"") == "booked\n")
        eventually(has_booked)


def runs(shell: Shell, database: Database, command: str, endless: Endless, lines: Sequence[str]) -> None:
    """A program that does not end begins, and prints what the page shows."""
    names = ("TIDEMARK_METRICS_PORT", "TIDEMARK_SIDECAR_PORT") if endless.elsewhere else ()
    ports = {name: str(free_port()) for name in names}
    if endless.elsewhere:
        ports |= {"TIDEMARK_LINES_LISTEN": f"127.0.0.1:{free_port()}", "TIDEMARK_CHECKPOINT": str(shell.folder / "own")}
    wanted = {alike(line) for line in lines}

    def all_printed() -> bool:
        for statement in endless.meanwhile:
            database.execute(statement)
        with suppress(pytest.fail.Exception):
            eventually(lambda: wanted <= {alike(line) for line in printed().splitlines()}, MOVED_SECONDS)
            return True
        return False

    with shell.running(command, endless.begun, **ports) as printed:
        eventually(all_printed, VISIBLE_SECONDS, lambda: f"{command}\n{printed()}")
