"""The directory of Tidemark's files, wherever this user may write."""

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
        if home and (place := Path(home, ".cache", "tidemark").absolute()) and _may_be_written(place):
            return place
    return temporary_home()


def temporary_home() -> Path:
    """The directory among the temporary files. Other users could have made it: see `is_own`."""
    return Path(tempfile.gettempdir(), f"tidemark-{os.getuid()}")


def is_own(path: Path) -> bool:
    """Whether this user may trust `path`: an entry among the temporary files has to be the user's own."""
    try:
        return not path.is_relative_to(temporary_home()) or path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def _may_be_written(path: Path) -> bool:
    present = next(place for place in (path, *path.parents) if place.exists())
    return present.is_dir() and os.access(present, os.W_OK | os.X_OK)
