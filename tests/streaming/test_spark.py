"""What the driver's JVM is told beside Spark's own settings."""

import stat
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tidemark.streaming.engine.jvm import DRIVER_OPTIONS
from tidemark.streaming.engine.spark import SparkSettings, configuration


@pytest.mark.parametrize("rights", ["600", "751", "1777"])
def test_files_get_their_rights_without_a_process(spark: SparkSession, tmp_path: Path, rights: str) -> None:
    """Spark makes four files a batch, and Hadoop's own class runs `chmod` for each."""
    hadoop: Any = spark._jvm.org.apache.hadoop  # type: ignore[union-attr]
    made = tmp_path / "made"
    made.mkdir()
    path = hadoop.fs.Path(str(made))
    files = path.getFileSystem(spark._jsc.hadoopConfiguration())
    files.setPermission(path, hadoop.fs.permission.FsPermission(rights))
    assert files.getClass().getName() == "tidemark.LocalFiles"
    assert f"{stat.S_IMODE(made.stat().st_mode):o}" == rights


def test_hadoop_knows_what_was_set_and_no_more(spark: SparkSession) -> None:
    """Spark writes all of that out for each batch."""
    hadoop: Any = spark._jsc.hadoopConfiguration()
    assert hadoop.size() < 5  # some hundred defaults are read where they are not left out
    assert hadoop.get("fs.file.impl").endswith("RawLocalFileSystem")


def _driver_options(directory: Path, extra: dict[str, str]) -> str:
    return configuration(SparkSettings("local[1]", "1g", [], 1, directory, ["-first"], extra)).get(DRIVER_OPTIONS) or ""


@pytest.mark.parametrize("variable", ["JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"])
def test_a_jvm_gets_one_collector(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM with two does not start, so a collector from the user's settings or environment replaces the default."""
    for name in ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    default = _driver_options(tmp_path, {})
    assert default.startswith('"-first" -XX:+UseParallelGC ')
    monkeypatch.setenv(variable, "-Dother=1 -XX:+UseTransparentHugePages")
    assert _driver_options(tmp_path, {}) == default
    assert _driver_options(tmp_path, {DRIVER_OPTIONS: "-XX:+UseZGC"}) == '"-first" -XX:+UseZGC'
    monkeypatch.setenv(variable, "-Dother=1 -XX:+UseSerialGC")
    assert "GC" not in _driver_options(tmp_path, {})
