"""A session of Spark without the pipeline around it, for what needs its JVM alone."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tidemark.app.pipeline import class_archive
from tidemark.streaming.engine.spark import SparkSettings, start


@pytest.fixture(scope="session")
def spark(warm_jvm: None, java: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    options = class_archive.options(class_archive.spark_archive_path(java))
    started = start(SparkSettings("local[1]", "512m", [], 1, tmp_path_factory.mktemp("spark"), options))
    yield started
    started.stop()
