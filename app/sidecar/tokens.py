"""Who may ask: bearer tokens from a file, one a line, read again when it changes.

Several, so that they can be rotated: add the new one, move the clients, remove the old one.
"""

import hmac
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from tidemark.streaming.errors import BadSetting

log = structlog.get_logger(__name__)

LOOK_EVERY = 1.0  # seconds


class Tokens:
    """For one thread. Raises `BadSetting` where the file cannot be read at the start; later, the last tokens stay.

    Blank lines and those that begin with # are left out. A file without a token lets nobody in.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._looked = now()
        self._complained = False
        try:
            self._version = self._stat()
            self._tokens = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting("TIDEMARK_SIDECAR_TOKENS", f"cannot read {path}: {error}") from None

    def allow(self, authorization: str | None) -> bool:
        """Whether the value of the header `Authorization` names one of the tokens."""
        self._refresh()
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        found = [hmac.compare_digest(given.strip().encode(), token) for token in self._tokens]  # all: no timing
        return any(found)

    def _refresh(self) -> None:
        if self._now() - self._looked < LOOK_EVERY:
            return
        self._looked = self._now()
        try:
            version = self._stat()
            if version != self._version:
                self._tokens, self._version = self._read(), version
                log.info("Read the bearer tokens again", tokens=len(self._tokens))
            self._complained = False
        except (OSError, UnicodeDecodeError) as error:
            if not self._complained:
                log.warning("Could not read the bearer tokens again; the last ones stay", problem=str(error))
            self._complained = True

    def _stat(self) -> tuple[int, int, int]:
        found = self._path.stat()  # through links: that is how container platforms swap files
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[bytes]:
        lines = (line.strip() for line in self._path.read_text().splitlines())
        return [line.encode() for line in lines if line and not line.startswith("#")]
