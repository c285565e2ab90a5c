"""Content of files that is loaded again when a file changes: secrets and certificates rotate while a process runs."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tidemark.common.errors import BadSetting
from tidemark.common.log import get_logger

log = get_logger(__name__)

CHECK_EVERY = 1.0  # seconds

T = TypeVar("T")

_Version = tuple[int, int, int] | None


class FileWatcher(Generic[T]):
    """What `load` makes of some files. For one thread.

    Raises `BadSetting` from `load` when it is made. Later, the last content stays in use while `load` fails, and the
    first failure is logged.

    Args:
        what: what the files hold, for the log.
        files: the files whose change is noticed. Links are followed: container platforms swap files by links.
        load: reads the files. Raises `BadSetting`.
        now: a clock that only goes forward, in seconds.
    """

    def __init__(
        self, what: str, files: Sequence[Path], load: Callable[[], T], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._files = files
        self._load = load
        self._now = now
        self._checked_at = now()
        self._has_failed = False
        self._versions = self._current_versions()
        self._content = load()

    def content(self) -> T:
        """The content now. Looks at the files at most once a second."""
        if self._now() - self._checked_at >= CHECK_EVERY:
            self._checked_at = self._now()
            self._check()
        return self._content

    def _check(self) -> None:
        versions = self._current_versions()
        if versions == self._versions:
            self._has_failed = False
            return
        try:
            self._content, self._versions = self._load(), versions
        except BadSetting as problem:  # also between the change of one file and that of the other
            if not self._has_failed:
                log.warning(f"Could not reload {self._what}; the last content stays in use", problem=str(problem))
            self._has_failed = True
        else:
            self._has_failed = False
            log.info(f"Reloaded {self._what}", files=[str(file) for file in self._files])

    def _current_versions(self) -> list[_Version]:
        return [_version(file) for file in self._files]


def _version(file: Path) -> _Version:
    """None: there is no such file, or it may not be looked at."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
