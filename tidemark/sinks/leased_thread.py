"""A thread that works beside the batches for as long as this pipeline holds the lease."""

import threading
from abc import ABC, abstractmethod
from typing import Self

from tidemark.common.errors import LeaseLost
from tidemark.sinks.postgres.lease import Lease


class LeasedThread(ABC):
    """A context manager: runs `work` until it is left, the lease is lost, or something comes that `work` does not deal
    with itself.

    `failure` is that, or what `work` leaves there: for the thread that supervises.
    """

    def __init__(self, name: str, lease: Lease) -> None:
        self._lease = lease
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()

    @abstractmethod
    def work(self) -> float:
        """Called again and again; gives the seconds until the next time."""

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._lease.check()
                self._closing.wait(self.work())
        except LeaseLost as error:
            self._lease.lose(error.now)
        except Exception as error:  # noqa: BLE001 - whoever supervises raises it
            self.failure = error
