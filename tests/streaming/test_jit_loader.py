"""Without numba or librdkafka's symbols slower code gives the same results, and one warning says so."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.programs import printed
from tidemark.streaming import ingest
from tidemark.streaming.ingest import decode, field_scan, jit_loader
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.jit_loader import get_module, load_field_scan, load_kernels
from tidemark.streaming.ingest.record_batch import RecordBatch
from tidemark.streaming.wire.records import Topic

VALUE = b'{"kind": "VOID", "stream": "events", "writer": "w", "prev": 1, "id": 2}'


@pytest.fixture(autouse=True)
def _cold_loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jit_loader, "failed_modules", [])
    monkeypatch.setattr(jit_loader, "_futures", {})
    for load in (load_field_scan, load_kernels):
        load.cache_clear()
    yield
    for load in (load_field_scan, load_kernels):
        load.cache_clear()


@pytest.fixture(autouse=True)
def _all_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "MIN_COMPILED_BYTES", 0)


def decoded_ids() -> list[int]:
    zero = np.zeros(1, np.int64)
    decoder = Decoder(Topic.FACTS)
    decoder.add(RecordBatch.of([b"events"], [VALUE], zero, zero))
    decoder.add(RecordBatch.of([b"events"], [VALUE], zero, zero))
    ids: list[int] = decoder.edges().ids.tolist()
    return ids


def test_a_batch_does_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower code decodes it meanwhile, unless that would take longer: then the batch waits, once."""
    monkeypatch.setattr(jit_loader, "MAX_SLOW_SECONDS", 2.0)
    compiling, may_end = threading.Event(), threading.Event()

    def load() -> ModuleType:
        compiling.set()
        assert may_end.wait(60)
        return field_scan

    assert get_module(load, 1.9) is None
    assert compiling.wait(60)
    assert get_module(load, 1.9) is None
    monkeypatch.setattr(decode, "load_field_scan", load)
    assert decoded_ids() == [2, 2]
    threading.Timer(0.1, may_end.set).start()
    assert get_module(load, 2.1) is field_scan
    assert get_module(load, 0.1) is field_scan


@pytest.mark.builds
def test_the_suite_of_compaction_passes_without_numba() -> None:
    """All of `test_compact.py` in a process in which numba cannot be imported."""
    suite = str(Path(__file__).with_name("test_compact.py"))
    plugins = "-p", "tests.streaming.hide_numba", "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *plugins, "--hypothesis-profile", "quick", suite]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_numba_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module can be imported and lacks what is used of it."""
    for name in ("jit_cache", "json_scan", "field_scan", "kernels"):
        monkeypatch.delitem(sys.modules, f"tidemark.streaming.ingest.{name}", raising=False)
        monkeypatch.delattr(ingest, name, raising=False)  # another test of this process may have loaded it
    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    assert load_field_scan() is None
    assert load_kernels() is None
    assert decoded_ids() == [2, 2]
    assert capsys.readouterr().out.count(jit_loader.NUMBA_WARNING) == 1


def test_a_compiler_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning names the error."""

    def fail() -> None:
        raise TypeError("cannot unify int64 and uint64")

    monkeypatch.setattr(field_scan, "compile_all", fail)
    assert decoded_ids() == [2, 2]
    output = capsys.readouterr().out
    assert output.count(jit_loader.NUMBA_WARNING) == 1
    assert "TypeError: cannot unify int64 and uint64" in output


def test_without_symbols_of_librdkafka_the_consumer_of_confluent_kafka_is_used() -> None:
    """A build of confluent-kafka that hides them, as a static one may."""
    program = """
import ctypes
load = ctypes.CDLL
ctypes.CDLL = lambda name, *arguments: object() if "cimpl" in str(name) else load(name, *arguments)
from tidemark.streaming.ingest.consumer import open_consumer
print(type(open_consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, id)).__name__)
"""
    words = printed(program)
    assert words[-1] == "PythonConsumer"
    assert "librdkafka cannot be called; a message takes about 2 µs of CPU instead of 0.3 µs" in " ".join(words)
    assert "has no symbol rd_kafka_conf_new" in " ".join(words)
