"""Log lines that clients cause: a few of each kind a minute are written, the others are counted.

A client can do the same wrong thing thousands of times a second, and each time must not be a line of the log.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

WINDOW = 60.0  # seconds
WRITTEN = 10  # lines of one kind in a window
SHOWN = 100  # characters of a client's text that are kept and logged

Level = Literal["info", "warning"]


def shortened(text: str) -> str:
    """The beginning of a client's text, and how long it was if that is not all."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


@dataclass(slots=True)
class _Kind:
    level: Level
    since: float
    written: int = 0
    counted: int = 0


class RepeatedLog:
    """For one thread. A kind is the text of an event, which must be a constant."""

    def __init__(self, log: Any, now: Callable[[], float] = time.monotonic) -> None:
        """`log` is a logger of structlog; `now` gives seconds of a clock that only goes forward."""
        self._log = log
        self._now = now
        self._kinds: dict[str, _Kind] = {}

    def write(self, level: Level, event: str, **fields: str) -> None:
        """Write the line, or count it if the window has had its lines. Texts among the fields are shortened."""
        self.flush()
        kind = self._kinds.setdefault(event, _Kind(level, self._now()))
        if kind.written >= WRITTEN:
            kind.counted += 1
            return
        kind.written += 1
        self._log.log(_NUMBERS[level], event, **{name: shortened(value) for name, value in fields.items()})

    def flush(self) -> None:
        """Write how many lines were left out in windows that are over. To be called now and then."""
        now = self._now()
        for event, kind in [*self._kinds.items()]:
            if now - kind.since >= WINDOW:
                del self._kinds[event]
                if kind.counted:
                    self._log.log(_NUMBERS[kind.level], event, left_out=kind.counted, seconds=round(now - kind.since))


_NUMBERS: dict[Level, int] = {"info": 20, "warning": 30}
