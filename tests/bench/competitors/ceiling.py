"""Spark's Kafka source into a sink that drops everything: no query on Spark can be faster."""

from pyspark.sql import DataFrame

from tests.bench.competitors import spark
from tests.bench.competitors.task import Task
from tests.bench.rate import Meter


def run(task: Task, meter: Meter) -> None:
    spark.run(task, meter, _everything)


def _everything(records: DataFrame) -> DataFrame:
    return records
