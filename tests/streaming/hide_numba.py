"""A pytest plugin that hides numba, for a run without compiled code: `pytest -p tests.streaming.hide_numba`."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

HIDDEN = {"numba", "llvmlite"}


class Hider:
    """An import hook: the modules are not found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Hider())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that did not need numba: it would show nothing."""
    from tidemark.streaming.ingest import jit_loader

    if HIDDEN & {*sys.modules} or set(jit_loader.failed_modules) != {"field_scan", "kernels"}:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
