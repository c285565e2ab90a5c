"""The file `stack.env` of the local stack: its settings, for a shell to source and for commands in other terminals."""

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tidemark.app.connections import PREFIX
from tidemark.common.environment import default_home, is_own

_FOR_SHELLS = "# For the shell alone: what it inherited would lead psql and curl elsewhere."


def stack_env() -> Path:
    """The path of the file, which is there only while a stack runs."""
    return Path(os.environ.get(f"{PREFIX}HOME") or default_home()) / "stack.env"


def read_stack_env(path: Path | None = None) -> dict[str, str]:
    """The exported variables of `path`, without it of the stack in TIDEMARK_HOME; empty if there is no file that this
    user may read and trust."""
    path = path or stack_env()
    words: list[list[str]] = []
    with suppress(OSError, ValueError):
        text = path.read_text() if is_own(path.parent) else ""
        words = [shlex.split(line) for line in text.partition(_FOR_SHELLS)[0].splitlines()]
    pairs = [line[1].partition("=") for line in words if len(line) == 2 and line[0] == "export"]
    return {name: value for name, _, value in pairs}


def write_stack_env(path: Path, variables: Mapping[str, str], unset: list[str]) -> None:
    """Write the file, for the eyes of its owner: it holds the password of Postgres.

    Args:
        path: the file.
        variables: what to export.
        unset: variables that a shell must not have beside these.
    """
    path.touch(mode=0o600)
    lines = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    lines += [_FOR_SHELLS, f"unset {' '.join(unset)}"]
    lines += [f'export {name}="${{{name}:+${name},}}127.0.0.1,localhost"' for name in ("no_proxy", "NO_PROXY")]
    path.write_text("\n".join(lines) + "\n")
