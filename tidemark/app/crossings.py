"""Log lines for what crosses a threshold: one when it does, one when it is over, none in between.

The thresholds are those of the alerts: how long a line may stand below its head (`behind_seconds` of the stream's
policy, else `HELD_AFTER`), and how full a bound may get. What crosses together with many others is one line with them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import structlog

from tidemark.app.board import Board

log = structlog.get_logger(__name__)

SINGLE: Final = 10  # lines of one kind and one look; with more they are one
Fields = dict[str, Any]


@dataclass(slots=True)
class Crossings:
    """One thread. `look` compares with the look before; a process that starts tells what it finds."""

    board: Board
    _over: dict[str, dict[str, Fields]] = field(default_factory=dict)

    def look(self) -> None:
        self._compare("A line waits", "A line goes on", self.board.waiting())
        self._compare("A bound is near", "A bound is far again", self.board.near())

    def _compare(self, over: str, under: str, found: dict[str, Fields]) -> None:
        before = self._over.get(over, {})
        self._over[over] = found
        _tell(log.warning, over, [it for name, it in found.items() if name not in before])
        _tell(log.info, under, [_named(it) for name, it in before.items() if name not in found])


def _named(it: Fields) -> Fields:
    """Without what was true when it crossed."""
    return {name: it[name] for name in ("stream", "bound") if name in it}


def _tell(say: Callable[..., object], what: str, found: list[Fields]) -> None:
    found.sort(key=itemgetter("stream"))
    if len(found) > SINGLE:
        say(what, count=len(found), streams=[it["stream"] for it in found[:SINGLE]])
        return
    for it in found:
        say(what, **it)
