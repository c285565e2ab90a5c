"""How many requests are held open at once: waits and event streams."""

from collections.abc import Iterator
from contextlib import contextmanager

from tidemark.app.read_side import metrics
from tidemark.app.sidecar.problems import Busy


class Limiter:
    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0

    @contextmanager
    def one(self, operation: str) -> Iterator[None]:
        """Raises `Busy` where as many are open as may be."""
        if self._open >= self._most:
            raise Busy(f"{self._open} requests are held open already; ask another sidecar, or try again")
        self._open += 1
        try:
            with metrics.HELD.labels(operation).track_inprogress():
                yield
        finally:
            self._open -= 1
