"""The process that Spark forks its Python workers from."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StringType, StructField, StructType

from tests.programs import printed
from tidemark.streaming.engine.jvm import write_python_wrapper
from tidemark.streaming.engine.spark import LOCAL_SETTINGS, SparkSettings, configuration

_FOR_PYTHON = "spark.executorEnv."


def test_nothing_that_is_imported_before_the_fork_starts_a_thread() -> None:
    """A thread would be missing after the fork, with whatever it held locked."""
    told = {name.removeprefix(_FOR_PYTHON): it for name, it in LOCAL_SETTINGS.items() if name.startswith(_FOR_PYTHON)}
    program = (
        "import psutil; from pyspark import daemon, worker;"
        "import tidemark.streaming.engine.query, tidemark.streaming.ingest.source;"
        "print(psutil.Process().num_threads())"
    )
    assert printed(program, **told) == ["1"]


def test_workers_begin_with_what_they_need(spark: SparkSession) -> None:
    """They are forked from our daemon, and have the installed pyspark, not the archive of it that Spark carries."""

    def seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark

        for _ in batches:
            parent = " ".join(psutil.Process().parent().cmdline())
            yield pa.RecordBatch.from_pydict({"parent": [parent], "pyspark": [pyspark.__file__]})

    [row] = spark.range(1).mapInArrow(seen, "parent string, pyspark string").collect()
    assert "-m tidemark.streaming.engine.daemon" in row["parent"]
    assert Path(row["pyspark"]).is_file()


def test_what_plans_a_source_has_the_installed_pyspark(spark: SparkSession) -> None:
    """It would compile the archive's, and Spark waits ten seconds for it."""

    class Telling(DataSource):
        """Its columns are named by the process that Spark asks for them."""

        @classmethod
        def name(cls) -> str:
            return "telling"

        def schema(self) -> StructType:
            import pyspark

            return StructType([StructField(path, StringType()) for path in (pyspark.__file__, sys.executable)])

    spark.dataSource.register(Telling)
    told = spark.read.format(Telling.name()).load().columns
    assert Path(told[0]).is_file()
    assert told[1] == sys.executable


def test_our_python_leaves_out_the_archives_and_nothing_else(tmp_path: Path) -> None:
    """Wherever it stands, and whatever it is given."""
    command = write_python_wrapper(tmp_path / "a home; of *")
    archives = "/opt/spark/python/lib/pyspark.zip:/opt/spark/python/lib/py4j-1-src.zip"
    program = "import sys; print(*sys.argv[1:], *sys.path, sep='\\n')"
    for given, kept in ((f"/a b:{archives}:/c*", ["/a b", "/c*"]), (archives, []), ("", [])):
        environment = {**os.environ, "PYTHONPATH": given}
        words = [command, "-P", "-c", program, "an argument", "*"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.splitlines()[: 2 + len(kept)] == ["an argument", "*", *kept]
        assert not re.search(r"py(spark|4j).*zip", done.stdout)


def test_where_nothing_may_be_executed_python_is_begun_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may be mounted so; the archives only cost time."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert write_python_wrapper(tmp_path) == sys.executable


def test_executors_elsewhere_keep_the_daemon_of_spark(tmp_path: Path) -> None:
    """They are sent our modules when their daemon runs already."""
    settings = configuration(SparkSettings("spark://one:7077", "1g", [], 1, tmp_path))
    assert not any(settings.contains(name) for name in LOCAL_SETTINGS)
