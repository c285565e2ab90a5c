"""Spark's JVM: what it inherits, and what it says of its end."""

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from tidemark.common.environment import LOCALE
from tidemark.streaming.engine.jvm import Jvm, set_environment
from tidemark.streaming.engine.spark import SparkSettings, configuration

DYING = """
import logging, sys
from pathlib import Path
import structlog
from tidemark.common.errors import SparkDied
from tidemark.streaming.engine.jvm import DRIVER_OPTIONS, Jvm
from tidemark.streaming.engine.spark import SparkSettings, configuration
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
directory, memory, options = sys.argv[1:]
try:
    Jvm(configuration(SparkSettings("local[1]", memory, [], 1, Path(directory), [], {DRIVER_OPTIONS: options})))
except SparkDied as died:
    print(died)
"""


@pytest.mark.jvm
@pytest.mark.parametrize(
    ("memory", "options", "cause"),
    [
        ("512m", "-XX:+UseSerialGC -XX:+UseParallelGC", "Multiple garbage collectors selected"),
        ("512m", "-agentlib:none", "Could not find agent library none"),
        ("1k", "", "Too small maximum heap"),
    ],
)
def test_a_jvm_that_does_not_begin_says_why(tmp_path: Path, memory: str, options: str, cause: str) -> None:
    """In its own sentence, also if it says that on its standard output, which is not ours."""
    command = [sys.executable, "-P", "-c", DYING, str(tmp_path), memory, options]
    # A JVM that another test of this process has started left its variables here: the child would warn of them.
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    [line] = done.stdout.splitlines()
    assert line.startswith(f"Spark is not running: it did not start: {cause}")


def test_what_is_meant_for_another_spark_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JVM and its workers get ours, and a locale in which Java opens every file."""
    foreign = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP", "PYSPARK_SUBMIT_ARGS", "PYSPARK_PYTHON")
    for name in foreign:
        monkeypatch.setenv(name, "/none")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("SPARK_LOCAL_HOSTNAME", "elsewhere")
    set_environment(configuration(SparkSettings("local[1]", "1g", [], 1, tmp_path)))
    assert "/none" not in [os.environ.get(name) for name in foreign]
    assert (Path(os.environ["SPARK_HOME"]) / "bin" / "spark-submit").exists()
    assert os.environ["SPARK_LOCAL_HOSTNAME"] == "localhost"
    assert os.environ["LC_ALL"] == LOCALE
    assert [*Path(os.environ["SPARK_CONF_DIR"]).iterdir()] == []


def test_a_warning_of_slow_decoding_is_repeated_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Each Python worker logs it on its own output, which becomes lines at `debug`."""
    jvm = Jvm.__new__(Jvm)
    jvm._first_lines, jvm._last_lines, jvm._logged_warnings = [], deque(), set()
    for line in ("08:00 [warning] Slow decoding: no numba", "08:01 [warning] Slow decoding: no numba", "other"):
        jvm._handle_line(line)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "Output of Spark" not in line]
    assert len(warnings) == 1
    assert "Slow decoding: no numba" in warnings[0]
