"""Files of a user that are called like something of ours."""

from collections.abc import Iterable
from pathlib import Path

ROOMS = ("app", "sinks", "sources", "streaming")
LIBRARIES = ("msgspec", "numpy", "pyarrow", "redis", "tidemark")


def shadowed(folder: Path, names: Iterable[str] = (*ROOMS, *LIBRARIES)) -> Path:
    """The folder, with a module of each name that must not be taken for ours."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(f"raise AssertionError('this is not the {name} that is meant')\n")
    return folder
