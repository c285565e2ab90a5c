"""Compiles functions with numba and caches the machine code in files, because compiling takes seconds.

numba's own cache does not detect a change in another module, and raises an error if a file is damaged or the disk is
full. This cache ignores a file that is damaged or that other users could have written, and compiles again. The
name of a file has a hash of all that its machine code depends on, such as the code, the versions of the libraries and
the processor. So several versions of Tidemark can share a directory.
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

from tidemark.common.environment import default_home
from tidemark.common.log import get_logger

log = get_logger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_config: Any = numba.config
_config.DISABLE_JIT = 0  # without compilation, the functions would fail, because Python's integers do not overflow
_config.CPU_NAME, _config.CPU_FEATURES = "generic", ""

_MAX_FILES = 32
"""The largest number of files in a directory, which several versions and processor types may share. If there are more,
the oldest files are deleted.
"""


def compiled(*, inline: bool = False) -> Callable[[Function], Function]:
    """Decorate a function so that numba compiles it at its first call.

    numba's reference counting is off, which doubles the speed. So a compiled function must not create an array.

    Args:
        inline: compile the function into its callers.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": inline, "_nrt": False}
    compiler: Callable[[Function], Function] = numba.njit(**options)
    return compiler


def cached(function: Function) -> Function:
    """Decorate a compiled function so that its machine code is cached in a file.

    The machine code includes the functions that the function calls.
    """
    dispatcher: Any = function
    dispatcher._cache = CodeCache(dispatcher, [*cache_dirs()])
    return function


def cache_dirs() -> Iterator[Path]:
    """Yield the directories of cached machine code: first the installation's directory, then the user's directory."""
    yield Path(sys.prefix, "share", "tidemark", "compiled")
    home = os.environ.get("TIDEMARK_HOME")
    with suppress(RuntimeError, OSError):  # unknown user, or no working directory
        yield (Path(home).expanduser() if home else default_home()).absolute() / "compiled"


class CodeCache:
    """The cache of the machine code of one function, with the interface of numba's caches.

    There is a file for each combination of signature, versions of libraries, and code of the function and of the
    functions that it calls. A file that cannot be read or written is not an error.

    Args:
        dispatcher: numba's object of the compiled function.
        cache_dirs: files are read from all of these directories, and written to the first one that is writable.
    """

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
        except Exception as error:  # noqa: BLE001  # for example, a pickled class was moved to another module
            log.info("Compiling again: the cached code cannot be loaded", name=name, cause=str(error))
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals:
            return  # the code contains addresses of this process
        name = self._name(signature, result.codegen)
        content = dumps(result._reduce())  # type: ignore[no-untyped-call]
        for directory in self._cache_dirs:
            with suppress(OSError):
                _write(directory / name, content)
                return

    def _name(self, signature: Any, codegen: Any) -> str:
        """The name of the file for a signature."""
        digest = hashlib.sha256()
        versions = python_version(), *(library.__version__ for library in (numba, llvmlite, np))
        settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
        arguments = [(str(argument), getattr(argument, "fields", None), _module_of(argument)) for argument in signature]
        for part in (versions, codegen.magic_tuple(), settings, arguments, *_dependencies(self._dispatcher, set())):
            digest.update(repr(part).encode())
        return f"{self._dispatcher.__name__}-{digest.hexdigest()[:32]}"


def _module_of(argument: Any) -> str | None:
    """For the type of a named tuple, the module of its class, which the cached code imports; None for other types."""
    return getattr(getattr(argument, "instance_class", None), "__module__", None)


def _dependencies(dispatcher: Any, seen: set[Any]) -> Iterator[object]:
    """Yield everything that the machine code of a function depends on. Reads code objects, not source files.

    Leaves out functions in `seen`, and adds functions to `seen`.
    """
    seen.add(dispatcher)
    function = dispatcher.py_func
    yield dispatcher.targetoptions, function.__module__, *_code_parts(function.__code__)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, np.ndarray):
            yield value.dtype.str, value.tolist()
        elif (intrinsic := getattr(value, "_defn", None)) is not None:
            yield from _code_parts(intrinsic.__code__)
        elif not hasattr(value, "py_func"):
            yield value, getattr(value, "_fields", None)
        elif value not in seen:
            yield from _dependencies(value, seen)


def _code_parts(code: CodeType) -> Iterator[object]:
    """Yield the parts of a code object that are equal in all processes."""
    yield code.co_code, code.co_names, code.co_varnames
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code_parts(value)
        else:
            yield value


def _read(path: Path) -> bytes | None:
    """The content of a file; None if it is missing, damaged, or writable by a user other than this one and root."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            is_trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not (is_trusted and stat.S_ISREG(status.st_mode)):
                return None  # a user who can write the file could run code in this process
            checksum, content = file.read(32), file.read()
    except OSError:
        return None
    return content if checksum == _checksum(path, content) else None


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, because other processes may write it too. Deletes the oldest files beyond `_MAX_FILES`.

    Raises `OSError` if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_checksum(path, content) + content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    with suppress(OSError):
        for old in sorted(path.parent.iterdir(), key=lambda path_: path_.stat().st_mtime)[:-_MAX_FILES]:
            old.unlink()


def _checksum(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()
