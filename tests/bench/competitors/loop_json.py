"""The hand-written loop with the standard library's `json`."""

import json

from tests.bench.competitors import loop
from tests.bench.competitors.task import Task
from tests.bench.rate import Meter


def run(task: Task, meter: Meter) -> None:
    loop.run(task, meter, json.loads)
