"""Compiled code, and where it is kept for the processes that follow: compiling takes seconds.

Not by numba's own cache: that looks no farther than the module of the function that is called, and fails its caller
where a file was cut or the disk is full. Here a file that is missing, damaged or not to be trusted is one that was
never written.
"""

import hashlib
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from platform import python_version
from tempfile import mkstemp
from types import CodeType
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from tidemark.common.home_directory import default_home
from tidemark.common.log import get_logger

log = get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_config: Any = numba.config
_config.DISABLE_JIT = 0  # in Python the numbers of compiled code overflow
# An image runs elsewhere, and what this processor knows beyond that gains nothing.
_config.CPU_NAME, _config.CPU_FEATURES = "generic", ""

_MAX_FILES = 32
"""Files that are left in a place: of versions and kinds of processors that share it."""


def compiled(*, inline: bool = False) -> Callable[[F], F]:
    """Compiled when it is first called; `inline`: as a part of who calls it.

    Without numba's counting of references, at twice the speed; so nothing that is compiled here may make an array.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": inline, "_nrt": False}
    compiler: Callable[[F], F] = numba.njit(**options)
    return compiler


def cached(function: F) -> F:
    """A compiled function, kept with all that it calls."""
    dispatcher: Any = function
    dispatcher._cache = CodeCache(dispatcher, [*cache_dirs()])
    return function


def cache_dirs() -> Iterator[Path]:
    """Where files may be, best first."""
    yield Path(sys.prefix, "share", "tidemark", "compiled")
    given = os.environ.get("TIDEMARK_HOME")
    with suppress(RuntimeError, OSError):  # there is no such user, or no directory that we are in
        yield (Path(given).expanduser() if given else default_home()).absolute() / "compiled"


class CodeCache:
    """The cache of one function, as numba calls it: a file for each signature and whatever else the code depends on."""

    def __init__(self, dispatcher: Any, cache_dirs: list[Path]) -> None:
        self.cache_path = str(cache_dirs[0])
        self._dispatcher = dispatcher
        self._cache_dirs = cache_dirs

    def load_overload(self, signature: Any, target: Any) -> Any:
        target.refresh()
        name = self._name(signature, target.codegen())
        content = next(filter(None, (_read(directory / name) for directory in self._cache_dirs)), None)
        if not content:
            return None
        try:
            return CompileResult._rebuild(target, *pickle.loads(content))  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  # what it names has moved since: compile again, and overwrite it
            log.info("Compiling again: the cached code cannot be loaded", name=name, cause=str(error))
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals:
            return  # addresses of this process
        name = self._name(signature, result.codegen)
        content = dumps(result._reduce())  # type: ignore[no-untyped-call]
        for directory in self._cache_dirs:
            with suppress(OSError):
                _write(directory / name, content)
                return

    def _name(self, signature: Any, codegen: Any) -> str:
        digest = hashlib.sha256()
        versions = python_version(), *(library.__version__ for library in (numba, llvmlite, np))
        settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
        arguments = [(str(argument), getattr(argument, "fields", None), _module_of(argument)) for argument in signature]
        for part in (versions, codegen.magic_tuple(), settings, arguments, *_parts(self._dispatcher, set())):
            digest.update(repr(part).encode())
        return f"{self._dispatcher.__name__}-{digest.hexdigest()[:32]}"


def _module_of(argument: Any) -> str | None:
    """The module of a named tuple's class, which the cached code imports."""
    return getattr(getattr(argument, "instance_class", None), "__module__", None)


def _parts(dispatcher: Any, seen: set[Any]) -> Iterator[object]:
    """All that the machine code of a function is made from, as it is in this process, whatever the files say by now."""
    seen.add(dispatcher)
    function = dispatcher.py_func
    yield dispatcher.targetoptions, *_code(function.__code__)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, np.ndarray):
            yield value.dtype.str, value.tolist()
        elif (intrinsic := getattr(value, "_defn", None)) is not None:
            yield from _code(intrinsic.__code__)
        elif not hasattr(value, "py_func"):
            yield value, getattr(value, "_fields", None)
        elif value not in seen:
            yield from _parts(value, seen)


def _code(code: CodeType) -> Iterator[object]:
    """Without what differs between processes: addresses and file names."""
    yield code.co_code, code.co_names, code.co_varnames
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code(value)
        else:
            yield value


def _read(path: Path) -> bytes | None:
    """What was written under this name, by us or by root."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not (ours and stat.S_ISREG(status.st_mode)):
                return None  # whoever may write it, may do here whatever we may
            sum_, content = file.read(32), file.read()
    except OSError:
        return None
    return content if sum_ == _sum(path, content) else None


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, part = mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(_sum(path, content) + content)
        Path(part).chmod(0o644)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    with suppress(OSError):
        for old in sorted(path.parent.iterdir(), key=lambda path_: path_.stat().st_mtime)[:-_MAX_FILES]:
            old.unlink()


def _sum(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()
