"""quixstreams: a stateful update per record, its state in RocksDB, without a changelog topic (which costs more)."""

import time
from pathlib import Path
from typing import Any

from quixstreams import Application, State

from tests.bench.competitors.task import Task
from tests.bench.rate import Meter

_MARK_SECONDS = 0.02


def run(task: Task, meter: Meter) -> None:
    app = Application(
        broker_address=task.bootstrap,
        consumer_group=Path(task.directory).name,  # a new one each round: one that is known goes on where it stopped
        auto_offset_reset="earliest",
        state_dir=task.directory,
        use_changelog_topics=False,
        auto_create_topics=False,
        loglevel="WARNING",
    )
    topic = app.topic(task.topic, key_deserializer="str", value_deserializer="json")
    seen, noted = 0, 0.0

    def count(*_: object) -> None:
        nonlocal seen, noted
        seen += 1
        now = time.time()
        if now >= noted + _MARK_SECONDS or seen == task.records:
            noted = now
            meter.note(seen, now)
            if meter.done:
                app.stop()

    app.dataframe(topic).update(_advance, stateful=True).update(count)
    app.run()


def _advance(record: dict[str, Any], state: State[Any, Any]) -> None:
    """The state of a key is the stream's; each of its writers has an entry: position, and edges that came early."""
    writer = record["writer"]
    if record["kind"] == "JOIN":
        state.set(writer, [record["id"], []])
        return
    position, early = state.get(writer, [0, []])
    if record["prev"] != position:
        early.append([record["prev"], record["id"]])
    else:
        position, waiting = record["id"], dict(early)
        while waiting and (following := waiting.pop(position, None)) is not None:
            position = following
        early = list(waiting.items())
    state.set(writer, [position, early])
