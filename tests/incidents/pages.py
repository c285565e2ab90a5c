"""The pages of docs/how-to/runbooks with worked incidents: each shows the output of a run, command by command.

A console block of such a page is a list of entries. An entry begins with a line `$ command`, or `alert: name`, and what
follows up to the next one was printed. The prose around the blocks is written by hand.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs/how-to/runbooks"
_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^(?:\$|alert:) .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """`prompt` is the command as it was typed, or the alert."""

    prompt: str
    printed: str

    def __str__(self) -> str:
        return f"{self.prompt}\n{self.printed}".rstrip() + "\n"


def told(page: str) -> list[str]:
    """The prompts of a page, with a 0 for each number: those differ from run to run."""
    return [_alike(entry) for block in _BLOCK.findall(page) for entry in _prompts(block)]


def shown(page: str) -> list[tuple[str, str]]:
    """Each prompt of a page, with what is printed below it."""
    found = []
    for block in _BLOCK.findall(page):
        prompts = [*_prompts(block)]
        found += [*zip(prompts, _ENTRY.split(block)[1:], strict=True)]
    return found


def differs(page: str, entries: Sequence[Entry]) -> str:
    """Where the page shows other commands than were typed; empty where it does not."""
    wanted, typed = told(page), [_alike(entry.prompt) for entry in entries]
    printed = "\n".join(map(str, entries))
    return "" if wanted == typed else f"the page shows {wanted}\nthe test typed {typed}\n{printed}"


def made_anew(page: str, entries: Sequence[Entry]) -> str:
    """The page with what was printed this time. Its prompts must be those of `entries`; one that has none yet gets all
    of them at its end."""
    if not told(page):
        return page.rstrip() + "\n\n```console\n" + "".join(map(str, entries)) + "```\n"
    assert not (wrong := differs(page, entries)), wrong
    following = iter(entries)
    return _BLOCK.sub(lambda block: "".join(str(next(following)) for _ in _prompts(block[0])), page)


def _prompts(block: str) -> Iterator[str]:
    return (found[0].rstrip("\n") for found in _ENTRY.finditer(block))


def _alike(prompt: str) -> str:
    return re.sub(r"\d+", "0", prompt)
