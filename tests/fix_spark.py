"""A session of Spark without the pipeline around it, for what needs its JVM alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tidemark.streaming.spark import SparkSettings, start


@pytest.fixture(scope="session")
def spark(connector_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    jars = sorted(connector_jars.glob("*.jar"))
    started = start(SparkSettings("local[1]", "512m", jars, 1, tmp_path_factory.mktemp("spark")))
    yield started
    started.stop()
