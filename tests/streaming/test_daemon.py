"""The process that Spark forks its Python workers from."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark.sql import SparkSession

from tidemark.streaming.spark import LOCAL, SparkSettings, configuration

_FOR_PYTHON = "spark.executorEnv."


def test_nothing_that_is_imported_before_the_fork_starts_a_thread() -> None:
    """A thread would be missing after the fork, with whatever it held locked."""
    told = {name.removeprefix(_FOR_PYTHON): it for name, it in LOCAL.items() if name.startswith(_FOR_PYTHON)}
    program = (
        "import psutil; from pyspark import daemon, worker; from tidemark.streaming import kafka_source, query;"
        "print(psutil.Process().num_threads())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1"]


def test_workers_begin_with_what_they_need(spark: SparkSession) -> None:
    """They are forked from our daemon, and have the installed pyspark, not the archive of it that Spark carries."""

    def seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark

        for _ in batches:
            parent = " ".join(psutil.Process().parent().cmdline())
            yield pa.RecordBatch.from_pydict({"parent": [parent], "pyspark": [pyspark.__file__]})

    [row] = spark.range(1).mapInArrow(seen, "parent string, pyspark string").collect()
    assert "-m tidemark.streaming.daemon" in row["parent"]
    assert Path(row["pyspark"]).is_file()


def test_executors_elsewhere_keep_the_daemon_of_spark(tmp_path: Path) -> None:
    """They are sent our modules when their daemon runs already."""
    settings = configuration(SparkSettings("spark://one:7077", "1g", [], 1, tmp_path))
    assert not any(settings.contains(name) for name in LOCAL)
