"""What Spark's documentation leads to: `from_json`, a group per writer, and a state function that loops over rows."""

import json
from collections.abc import Iterator

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.functions import col, from_json
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tests.bench.competitors import spark
from tests.bench.competitors.task import Task
from tests.bench.rate import Meter

_RECORD = "kind string, stream string, writer string, epoch long, prev long, id long"
_OUTPUT = "stream string, writer string, position long"
_STATE = "position long, waiting string"


def run(task: Task, meter: Meter) -> None:
    spark.run(task, meter, _positions)


def _positions(records: DataFrame) -> DataFrame:
    return (
        records.select(from_json(col("value").cast("string"), _RECORD).alias("record"))
        .select("record.*")
        .groupBy("stream", "writer")
        .applyInPandasWithState(_advance, _OUTPUT, _STATE, "append", GroupStateTimeout.NoTimeout)
    )


def _advance(writer: tuple[str, str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Edges that came early wait in a dict by their `prev`; between batches it is JSON, for want of a map type."""
    position, packed = state.get if state.exists else (0, "[]")
    start, waiting = position, dict(json.loads(packed))
    for frame in frames:
        for kind, prev, id_ in zip(frame["kind"], frame["prev"], frame["id"], strict=True):
            if kind == "JOIN":
                position = max(position, id_)
            elif prev != position:
                waiting[prev] = id_
            else:
                position = id_
                while waiting and (following := waiting.pop(position, None)) is not None:
                    position = following
    state.update((position, json.dumps(list(waiting.items()))))
    if position != start:
        yield pd.DataFrame({"stream": [writer[0]], "writer": [writer[1]], "position": [position]})
