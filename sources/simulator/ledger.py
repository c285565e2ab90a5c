"""What of a play must outlive its process: sequences and epochs, in a small JSON file, written before they are used.

Like a sequence in Postgres it keeps IDs in advance: a play that was killed skips up to `AHEAD` of them and gives none
twice. The file is replaced whole, so a kill leaves the old or the new one. It is not synced: a machine that loses its
power may also lose records of Kafka.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sources.simulator.cast import StreamMark
from streaming.errors import Stop

AHEAD = 10_000


class LedgerInUse(Stop):
    """Another simulator plays from this file: two would give the same IDs twice."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"another simulator is playing from {path}: stop it, or choose other streams with --prefix NAME"
        )
        self.path = path


class LedgerUnreadable(Stop):
    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} is not a simulator's ledger ({problem}): remove it and choose other streams with --prefix NAME"
        )
        self.path = path


class Ledger:
    """Use it through `opened`. One process at a time, one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = self._read()

    def past(self) -> Mapping[str, StreamMark]:
        return self._kept

    def cover(self, marks: Mapping[str, StreamMark]) -> None:
        """Call it before the records of a step are sent; writes only where the file does not cover `marks` yet."""
        if not all(_covers(self._kept.get(name), mark) for name, mark in marks.items()):
            self._write({name: mark._replace(last=mark.last + AHEAD) for name, mark in marks.items()})

    def close(self, marks: Mapping[str, StreamMark]) -> None:
        """The play has ended in peace: the next one begins just behind it."""
        self._write(dict(marks))

    def _read(self) -> dict[str, StreamMark]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, StreamMark])
        except FileNotFoundError:
            return {}
        except msgspec.MsgspecError as error:
            raise LedgerUnreadable(self._path, str(error)) from error

    def _write(self, marks: dict[str, StreamMark]) -> None:
        draft = self._path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(marks))
        draft.replace(self._path)
        self._kept = marks


def _covers(kept: StreamMark | None, mark: StreamMark) -> bool:
    return kept is not None and mark.last <= kept.last and mark.writers == kept.writers


@contextmanager
def opened(path: Path) -> Iterator[Ledger]:
    """Hold the ledger for this process; the claim ends with the process however that dies. Raises `LedgerInUse`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerInUse(path) from error
        yield Ledger(path)
