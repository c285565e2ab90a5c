"""Writes the forms for threads of modules that are written for asyncio. `make format` runs it.

The text is converted token by token, so comments and layout stay:

- `async` and `await` go; names and phrases are replaced by those of `WORDS`; `asyncio.to_thread(f, x)` is `f(x)`.
- A statement, or an `except` clause, whose first line ends with the comment `# async only` goes. A `try` that has no
  other clause is replaced by its body.
- A paragraph of a docstring that begins with `Cancellation:` goes.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READER = Path("tidemark/sinks/reader")
GENERATED = {
    READER / "async_positions.py": READER / "positions.py",
    READER / "async_reader.py": READER / "reader.py",
}
HEADER = "# Generated from {source} by `make format`: change that module and not this one.\n"
ONLY = "# async only"
WORDS = {
    "Any asyncio task of one event loop": "Any thread",
    "one asyncio task at a time": "one thread at a time",
    "one asyncio task": "one thread",
    "an async context manager": "a context manager",
    "An async context manager": "A context manager",
    "an async iterator": "an iterator",
    "another task": "another thread",
    "An async iterator": "An iterator",
    "`positions`, the version for threads, is generated from this module (`make format`).": (
        "The version for threads of `async_positions`."
    ),
    "`reader`, the version for threads, is generated from this module (`make format`).": (
        "The version for threads of `async_reader`."
    ),
    "tidemark.sinks.reader.async_positions": "tidemark.sinks.reader.positions",
    "redis.asyncio": "redis",
    "asyncio.Event": "threading.Event",
    "import asyncio": "import threading",
    "AsyncConnection": "Connection",
    "AsyncFollow": "Follow",
    "AsyncIterator": "Iterator",
    "AsyncPositions": "Positions",
    "AsyncReader": "Reader",
    "AsyncSessionConnection": "SessionConnection",
    "AsyncStep": "Step",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "async_transaction_factory": "transaction_factory",
    "AsyncTransaction": "Transaction",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "`anext`": "`next`",
    "async_await_entry": "await_entry",
    "async_pause": "pause",
    "async_read_keys": "read_keys",
    "open_async_session": "open_session",
}
_WORD = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(WORDS, key=len, reverse=True)))
_PARAGRAPH = re.compile(r"\n\n[ \t]*Cancellation:(?:[^\n]|\n(?=[ \t]*[^\s\"]))*")
_AWAITABLE = re.compile(r"Awaitable\[(\w+)\]")
_TO_THREAD = re.compile(r"asyncio\.to_thread\(([\w.]+)(?:, )?")


def sync_form(text: str, source: str) -> str:
    """The module for threads that stands for `text`, the module `source` for asyncio."""
    text = _without_keywords(_without_async_only(text))
    text = _TO_THREAD.sub(r"\1(", _AWAITABLE.sub(r"\1", _PARAGRAPH.sub("", text)))
    text = _WORD.sub(lambda word: WORDS[word[0]], text)
    docstring_end = text.index('"""', 3) + 3
    text = f"{text[:docstring_end]}\n\n{HEADER.format(source=source)}{text[docstring_end:]}"
    for command in (["check", "--fix", "--exit-zero", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(GENERATED[Path(source)]), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def _without_async_only(text: str) -> str:
    lines = text.splitlines(keepends=True)

    def is_only(node: ast.stmt | ast.ExceptHandler) -> bool:
        return lines[node.lineno - 1].rstrip().endswith(ONLY)

    for node in reversed([*_statements(ast.parse(text))]):
        if is_only(node):
            lines[node.lineno - 1 : node.end_lineno] = []
        elif isinstance(node, ast.Try) and not node.orelse and not node.finalbody and all(map(is_only, node.handlers)):
            first, last = node.lineno, node.body[-1].end_lineno
            indent = node.body[0].col_offset - node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [line[indent:] for line in lines[first:last]]
    return "".join(lines)


def _statements(tree: ast.AST) -> Iterator[ast.stmt | ast.ExceptHandler]:
    """In the order of the text, those within others behind them. Clauses of a `try` that goes are left to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.ExceptHandler) and isinstance(tree, ast.Try) and len(tree.handlers) > 1:
            yield node
        yield from _statements(node)


def _without_keywords(text: str) -> str:
    """Without the tokens `async` and `await`, each with the white space behind it."""
    lines = text.splitlines(keepends=True)
    for token in reversed([*tokenize.generate_tokens(io.StringIO(text).readline)]):
        if token.type == tokenize.NAME and token.string in {"async", "await"}:
            row, start = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:start] + line[token.end[1] :].lstrip(" ")
    return "".join(lines)


def main() -> None:
    for source, target in GENERATED.items():
        (ROOT / target).write_text(sync_form((ROOT / source).read_text(), str(source)))


if __name__ == "__main__":
    main()
