"""A pipeline whose user has another Spark, or settings that Spark refuses."""

from pathlib import Path

import pytest

from tests.fix_pipeline import Site

pytestmark = pytest.mark.slow


def test_a_pipeline_runs_its_own_spark_and_says_what_it_ignores(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables for a notebook, for a Spark that was removed, and a host's defaults lead it nowhere."""
    (tmp_path / "spark-defaults.conf").write_text("spark.eventLog.enabled true\nspark.eventLog.dir /none\n")
    foreign = {
        "HADOOP_CONF_DIR": "/none",
        "PYSPARK_DRIVER_PYTHON": "jupyter",
        "PYSPARK_GATEWAY_PORT": "1",
        "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "SPARK_CONF_DIR": str(tmp_path),
        "SPARK_HOME": "/none",
    }
    for name, text in foreign.items():
        monkeypatch.setenv(name, text)
    running = site.start(log_level="info").ready()
    [said] = [line for line in running.log().splitlines() if "gnored environment variables of another Spark" in line]
    assert ", ".join(foreign) in said
    running.terminate()


def test_settings_that_spark_refuses_are_told_in_one_line(site: Site, tmp_path: Path) -> None:
    """In Spark's own sentence, without stack frames. `tests.streaming.test_jvm` has JVMs that do not begin at all."""
    file = tmp_path / "spark.conf"
    file.write_text("spark.eventLog.enabled true\nspark.eventLog.dir /none/events\n")
    ended = site.refused(spark_conf_file=file)
    assert ended.code == 1
    [line] = ended.lines
    assert line.startswith("Error: Spark is not running: it did not start: java.io.FileNotFoundException: ")
    assert "/none/events" in line
