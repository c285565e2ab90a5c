"""Settings of Spark's own, from a file, and what Spark says when it fails."""

from pathlib import Path

import pytest

from tidemark.app.pipeline.engine import SLOW_PYTHON_START, innermost_cause, read_properties
from tidemark.common.errors import BadSetting


def test_properties_are_read_as_spark_reads_them(tmp_path: Path) -> None:
    """With a space, `=` or `:` between name and value, remarks left out."""
    path = tmp_path / "spark.conf"
    path.write_text("# remark\n\nspark.a  1 2\nspark.b=x=y\n  spark.c : z\nspark.d\t8\n")
    assert read_properties(path) == {"spark.a": "1 2", "spark.b": "x=y", "spark.c": "z", "spark.d": "8"}


@pytest.mark.parametrize("text", ["sparkle 1\n", "spark.alone\n"])
def test_a_line_that_is_no_setting_is_named(tmp_path: Path, text: str) -> None:
    """A typing error must not be passed over in silence."""
    (tmp_path / "spark.conf").write_text(text)
    with pytest.raises(BadSetting, match=rf"spark\.conf, line 1: .* found '{text.strip()}'"):
        read_properties(tmp_path / "spark.conf")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(BadSetting, match=r"TIDEMARK_SPARK_CONF_FILE: cannot read .*nowhere"):
        read_properties(tmp_path / "nowhere")


OF_JAVA = """Job aborted due to stage failure
\tat org.apache.spark.Scheduler.abort(Scheduler.scala:1)
Caused by: java.io.IOException: no space left
\tat java.base/java.io.File.write(File.java:1)
"""
OF_PYTHON = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "py4j/clientserver.py", line 1, in call
    return f()
           ^^^
pyspark.errors.exceptions.captured.PythonException:
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "kafka_ranges.py", line 1, in read
    raise self._errors.explain(error)
tidemark.common.errors.Unavailable: Kafka at k:9092: it is gone

\tat org.apache.spark.api.python.PythonException.throw(PythonRunner.scala:1)
Caused by: org.apache.spark.SparkException: Job aborted
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (OF_JAVA, "java.io.IOException: no space left"),
        (OF_PYTHON, "tidemark.common.errors.Unavailable: Kafka at k:9092: it is gone"),
        ("SparkException: Python worker failed to connect back.\nCaused by: SocketTimeoutException", SLOW_PYTHON_START),
        ("one line", "one line"),
        ("", "Spark gave no cause"),
    ],
    ids=["Java", "Python", "a slow start", "neither", "nothing"],
)
def test_of_a_failure_the_innermost_cause_is_named(text: str, found: str) -> None:
    """In one line; of what a Python worker raised that is its own error, and not that Spark has seen one."""
    assert innermost_cause(text) == found
