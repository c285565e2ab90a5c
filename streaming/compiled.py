"""Compiled code, and where it is kept for the processes that follow: compiling takes seconds.

In a folder named after all of our code, because numba looks no farther than the module of the function that is called:
it would go on with what a function called, or with the columns of a row, as they were before an upgrade.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar, cast

from numba import config, njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(*, inline: bool = False) -> Callable[[F], F]:
    """Compiled when it is first called; `inline`: as a part of who calls it.

    Without numba's counting of references, at twice the speed; so nothing that is compiled here may make an array.
    """

    def compiler(function: F) -> F:
        if _KEPT is not None:
            _give_file(function, _KEPT)
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": inline, "_nrt": False}
        return cast(F, njit(cache=_KEPT is not None, **options)(function))

    return compiler


def _give_file(function: Callable[..., Any], directory: Path) -> None:
    """Numba keeps nothing of what was imported from an archive, as on executors (`streaming.executors`)."""
    code, module = function.__code__, Path(function.__code__.co_filename).name
    if not Path(code.co_filename).exists():
        (directory / module).write_bytes(files("tidemark.streaming").joinpath(module).read_bytes())
        function.__code__ = code.replace(co_filename=str(directory / module))


def kept_in(places: Iterable[Path]) -> Path | None:
    """The folder of our code in the first place in which we may write; those of other code there are deleted."""
    name = f"compiled-{_digest()}"
    for place in places:
        try:
            (place / name).mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=place / name):
                pass
        except OSError:
            continue
        for other in place.glob("compiled-*"):
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)
        return place / name
    return None


def _digest() -> str:
    found = hashlib.sha256()
    for module in sorted(files("tidemark.streaming").iterdir(), key=lambda it: it.name):
        if module.name.endswith(".py"):
            found.update(module.read_bytes())
    return found.hexdigest()[:16]


_KEPT = kept_in(
    [
        Path(sys.prefix, "share", "tidemark"),
        Path(os.environ.get("TIDEMARK_HOME") or "~/.cache/tidemark").expanduser(),
    ]
)
config.CACHE_DIR = str(_KEPT or "")  # type: ignore[attr-defined]
