"""The directory of Tidemark's files: a directory that this user may write to."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def default_home() -> Path:
    """The directory to use if TIDEMARK_HOME is not set: `~/.cache/tidemark`.

    If this user has no home directory, or may not write there, it is a directory among the temporary files, with the
    user's number in its name. Does not create anything.
    """
    with suppress(RuntimeError):  # neither HOME nor an entry in the list of users
        home = os.environ.get("HOME") or Path("~").expanduser()
        if home and (path := Path(home, ".cache", "tidemark").absolute()) and _is_writable(path):
            return path
    return temporary_home()


def temporary_home() -> Path:
    """The directory among the temporary files. Other users could have made it: see `is_own`."""
    return Path(tempfile.gettempdir(), f"tidemark-{os.getuid()}")


def is_own(path: Path) -> bool:
    """True if this user may trust `path`: an entry among the temporary files must belong to the user."""
    try:
        return not path.is_relative_to(temporary_home()) or path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def _is_writable(path: Path) -> bool:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
