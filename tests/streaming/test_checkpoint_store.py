"""Checkpoints in a store that driver and executors share. `tests/cluster` runs a query with one."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tidemark.common.errors import CheckpointNotWritable, Unavailable
from tidemark.streaming.engine.checkpoint import store_folder


def test_each_query_has_a_folder_that_goes_with_it(spark: SparkSession, tmp_path: Path) -> None:
    """Also what the driver before left when it was killed goes; what is not a query's stays."""
    store = tmp_path / "store"
    (store / "query-of-a-killed-driver" / "state").mkdir(parents=True)
    (store / "other").mkdir()
    with store_folder(spark, store.as_uri()) as first:
        [made] = store.glob("query-*")
        assert Path(first.removeprefix("file:")).samefile(made)
        (made / "offsets").mkdir()
    assert [path.name for path in store.iterdir()] == ["other"]
    with store_folder(spark, store.as_uri()) as second:
        assert second != first


@pytest.mark.parametrize("store", ["none://bucket/tidemark", "file:///dev/null/tidemark", "a%:/x"])
def test_place_that_is_none_is_named(spark: SparkSession, store: str) -> None:
    """A scheme without its jar, a file in the way, no URI: one line that names it, because waiting would not help."""
    with pytest.raises(CheckpointNotWritable, match="TIDEMARK_CHECKPOINT_STORE") as caught, store_folder(spark, store):
        pass
    assert store in str(caught.value)
    assert "\n" not in str(caught.value)


def test_store_that_does_not_answer_is_waited_for(spark: SparkSession) -> None:
    """The pipeline tries again."""
    spark.sparkContext._jsc.hadoopConfiguration().set("ipc.client.connect.max.retries", "0")
    with pytest.raises(Unavailable, match=r"hdfs://127\.0\.0\.1:1"), store_folder(spark, "hdfs://127.0.0.1:1/tidemark"):
        pass
