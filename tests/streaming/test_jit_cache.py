"""Where compiled code is kept: never wrong, never in the way of who wants it, never another's."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
from numba import int64
from numba.core.registry import cpu_target

from tests.programs import printed
from tidemark.streaming.engine.executors import write_code_archive
from tidemark.streaming.ingest import jit_cache
from tidemark.streaming.ingest.jit_cache import CodeCache, cache_dirs, compiled

STEP = 1


class Further(NamedTuple):
    by: int


FURTHER = Further(1)


@compiled(inline=True)
def called(number: int) -> int:
    return number + STEP


def _function(number: int) -> int:
    return called(number) + FURTHER.by


def dispatcher(*where: Path, **other: object) -> Any:
    """As in a process that begins; `other`: what its names stand for instead."""
    function = FunctionType(_function.__code__, {**globals(), **other}, "scan")
    made: Any = compiled()(function)
    made._cache = CodeCache(made, [*where])
    return made


def is_kept(made: Any, answer: int = 5) -> bool:
    """Whether what it runs was found in a file."""
    assert made(3) == answer
    return bool(made.stats.cache_hits)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The one that was written."""
    assert not is_kept(dispatcher(tmp_path))
    assert is_kept(dispatcher(tmp_path))
    (found,) = tmp_path.iterdir()
    return found


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _link(file: Path) -> None:
    elsewhere = file.parent.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


HARMED: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "sum only": lambda file: os.truncate(file, 32),
    "flipped": _flip,
    "without the classes that it needs": lambda file: file.write_bytes(jit_cache._checksum(file, b"old") + b"old"),
    "open to all": lambda file: file.chmod(0o666),
    "open to the group": lambda file: file.chmod(0o664),
    "a link": _link,
    "a pipe": _pipe,
}


@pytest.mark.parametrize("harm", HARMED.values(), ids=HARMED)
def test_a_file_that_is_damaged_or_open_to_others_is_made_anew(file: Path, harm: Callable[[Path], object]) -> None:
    harm(file)
    assert not is_kept(dispatcher(file.parent))
    assert is_kept(dispatcher(file.parent))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_loaded(file: Path) -> None:
    os.chown(file, 12345, -1)
    assert not is_kept(dispatcher(file.parent))


def test_a_file_counts_under_its_own_name_alone(file: Path) -> None:
    """A good one of older code in the place of this one's."""
    assert not is_kept(dispatcher(file.parent, called=compiled()(lambda number: number + 2)), 6)
    (other,) = (it for it in file.parent.iterdir() if it != file)
    other.replace(file)
    assert not is_kept(dispatcher(file.parent))


def test_other_code_anywhere_below_has_another_file(tmp_path: Path) -> None:
    """A function that is called, a number in it, one in a tuple with names, and how it is compiled."""
    is_kept(dispatcher(tmp_path))
    further = FunctionType(called.py_func.__code__, {**globals(), "STEP": 2}, "called")  # type: ignore[attr-defined]
    assert not is_kept(dispatcher(tmp_path, called=compiled(inline=True)(further)), 6)
    assert is_kept(dispatcher(tmp_path, called=compiled(inline=True)(further)), 6)
    assert not is_kept(dispatcher(tmp_path, called=compiled()(further)), 6)
    assert not is_kept(dispatcher(tmp_path, FURTHER=Further(2)), 6)
    assert is_kept(dispatcher(tmp_path))


@pytest.mark.parametrize("moved", ["scan", "called"])
def test_the_same_code_in_another_module_has_another_file(tmp_path: Path, moved: str) -> None:
    """A checkout with other modules shares the directory. Code that it loaded would import a module that it lacks."""
    names: dict[str, Any] = {"__name__": "tidemark.streaming.elsewhere"}
    if moved == "called":
        further = FunctionType(called.py_func.__code__, {**globals(), **names}, "called")  # type: ignore[attr-defined]
        names = {"called": compiled(inline=True)(further)}
    again = dispatcher(tmp_path, **names)
    signature, codegen = (int64,), cpu_target.target_context.codegen()
    assert again._cache._name(signature, codegen) != dispatcher(tmp_path)._cache._name(signature, codegen)


def test_where_nothing_can_be_written_it_runs_all_the_same(tmp_path: Path) -> None:
    """It is kept in the first place where that can be."""
    (tmp_path / "file").touch()
    wrong = [tmp_path / "file", Path("/proc/nowhere")]
    assert not is_kept(dispatcher(*wrong))
    assert not is_kept(dispatcher(*wrong, tmp_path / "good"))
    assert is_kept(dispatcher(*wrong, tmp_path / "good"))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jit_cache, "_checksum", full)
        assert not is_kept(dispatcher(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_files_of_other_versions_do_not_grow_in_number(tmp_path: Path) -> None:
    most = jit_cache._MAX_FILES
    for at in range(most + 9):
        (tmp_path / f"scan-{at}").touch()
        os.utime(tmp_path / f"scan-{at}", (at, at))
    assert not is_kept(dispatcher(tmp_path))
    assert is_kept(dispatcher(tmp_path))
    assert {it.name for it in tmp_path.iterdir()} > {f"scan-{at}" for at in range(10, most + 9)}
    assert len([*tmp_path.iterdir()]) == most


def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMARK_HOME", "~nobody-of-this-name/tidemark")
    assert len([*cache_dirs()]) == 1


def test_it_is_compiled_whatever_numba_is_told() -> None:
    """Numbers of numpy's own overflow in Python, and every record would be left, at a hundred times the price."""
    done = printed(
        "from tidemark.streaming.ingest import field_scan as scan; print(type(scan.scan).__name__)",
        NUMBA_DISABLE_JIT="1",
    )
    assert done == ["CPUDispatcher"]


def test_executors_find_what_the_installation_compiled(tmp_path: Path) -> None:
    """The code of an archive is that of the installation; a home that is empty, two processes."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from tests.streaming.test_field_scan import VOID, raw, scanned;"
        "from tidemark.streaming.ingest import field_scan as scan, jit_loader;"
        "jit_loader.MAX_SLOW_SECONDS = 0.0;"  # wait until the code is loaded
        "scanned([(b'events', raw(VOID))]);"
        "print(scan.__file__.split('/')[-5], sum(scan.scan.stats.cache_hits.values()))"
    )
    archive = str(write_code_archive(tmp_path))
    outcomes = [printed(program, archive, TIDEMARK_HOME=str(tmp_path / "home")) for _ in range(2)]
    assert outcomes[1] == ["tidemark.zip", "1"]


def test_who_has_few_records_loads_no_compiler() -> None:
    """A quiet system: neither what Spark forks its workers from, nor a worker with a record, nor the driver."""
    program = """
import sys
from tidemark.app.pipeline import supervisor
from tidemark.streaming.ingest import source
from tidemark.streaming.ingest import consumer
from tidemark.streaming.engine import query
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.record_batch import RecordBatch
from tidemark.streaming.wire.records import Topic
import numpy as np
zero = np.zeros(1, np.int64)
Decoder(Topic.FACTS).add(RecordBatch.of([b"events"], [b" " * (Decoder.MIN_COMPILED_BYTES - 1)], zero, zero))
assert not {"numba", "llvmlite"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.builds
def test_an_image_holds_what_any_processor_runs(tmp_path: Path) -> None:
    """Made where it was built, read by a user who may not write there, and by executors from their archive."""
    making = f"import sys; sys.prefix = {str(tmp_path)!r}; from tidemark.app.pipeline.compile_ahead import main; main()"
    subprocess.run([sys.executable, "-c", making], check=True, timeout=600)
    (place,) = tmp_path.glob("share/tidemark/compiled")
    assert {it.name.rpartition("-")[0] for it in place.iterdir()} == {
        "scan",
        "sort_edges",
        "gather",
        "read_times",
        "release",
    }
    assert all(it.stat().st_mode & 0o777 == 0o644 for it in place.iterdir())
    target: Any = cpu_target.target_context
    assert "generic" in target.codegen().magic_tuple()
