"""A client of Redis for threads that is made when it is first used, with its errors told apart by who must act."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tidemark.sinks.redis_address import RedisAddress, close
from tidemark.sinks.redis_problems import FOREIGN, Remedies, explained


class RedisSession:
    """Any thread may use it, several at a time. Raises `BadSetting` at once where the address is none."""

    def __init__(self, address: RedisAddress, remedies: Remedies, timeout: float) -> None:
        self.where = address.where
        self._address = address
        self._remedies = remedies
        self._timeout = timeout
        self._lock = threading.Lock()
        # That of a Cluster asks for its nodes as it is made.
        self._client: Any = None if address.clustered else address.client(timeout)

    @contextmanager
    def use(self) -> Iterator[Any]:
        """The client. Turns what redis-py raises into `Unavailable` (do it again) and `Refused`."""
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._address.client(self._timeout)
            yield self._client
        except FOREIGN as error:
            raise explained(error, self.where, self._remedies) from error

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                close(self._client)
