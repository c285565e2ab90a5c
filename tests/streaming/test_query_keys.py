"""Shards spread over tasks as evenly as their number allows."""

from collections import Counter

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from tidemark.streaming.engine.query import shard_keys, spark_hash
from tidemark.streaming.values.limits import shard_of


@pytest.mark.parametrize(
    ("shards", "tasks"), [(1, 1), (16, 1), (16, 2), (16, 3), (16, 4), (16, 16), (36, 20), (200, 200)]
)
def test_no_task_has_more_than_one_shard_more_than_another(shards: int, tasks: int) -> None:
    """And each key tells its shard."""
    keys = shard_keys(shards, tasks)
    assert [key % shards for key in keys] == [*range(shards)]
    had = Counter((spark_hash(np.array(keys)).astype(int) % tasks).tolist())
    assert sum(had.values()) == shards
    assert {*had.values()} <= {shards // tasks, -(-shards // tasks)}


@pytest.mark.parametrize("names", ["events-{}", "s{}", "room.{}", "account_data_{}"])
@pytest.mark.parametrize("tasks", [2, 4])
def test_streams_with_a_number_in_their_names_are_spread(names: str, tasks: int) -> None:
    """The shards of such streams are often all even or all odd."""
    keys = spark_hash(np.array(shard_keys(16, tasks))).astype(int) % tasks
    found = Counter(int(keys[shard_of(names.format(number), 16)]) for number in range(4))
    assert [*found.values()] == [4 // tasks] * tasks


@pytest.mark.server
def test_spark_hashes_as_is_expected_of_it(spark: SparkSession) -> None:
    """And so spreads the keys as they were made to be."""
    numbers = [*range(40), 2**31 - 1]
    frame = spark.createDataFrame([(number,) for number in numbers], "key int")
    found = [row[0] for row in frame.select(sql.hash("key")).collect()]
    assert found == spark_hash(np.array(numbers)).tolist()
    keys = shard_keys(16, 4)
    spread = spark.createDataFrame([(key,) for key in keys], "key int").repartition(4, "key")
    tasks = [(row.key % 16, row.task) for row in spread.select("key", sql.spark_partition_id().alias("task")).collect()]
    assert sorted(tasks) == [(shard, shard // 4) for shard in range(16)]
