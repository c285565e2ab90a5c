"""Every command of the how-to pages exists: it is parsed as bash does, and by the program that it calls.

`make stories` runs the runbooks with a cause (`docs/how-to/runbooks`), and test_commands.py runs what needs only the
local stack. The other commands need what a test does not have: `ELSEWHERE` says for each program what that is.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from tests.docs.test_commands import ROOT, blocks, commands
from tests.helm.tools import CHART
from tidemark.app.cli import main

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/how-to").rglob("*.md"))
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
LOCAL = {"tidemark", "echo", "curl", "redis-cli", "nc", "psql", "make", "export", "cat"}
"""Programs that are on the machine of whoever runs the stack."""
SHELLS = {"console", "sh", "bash"}


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
