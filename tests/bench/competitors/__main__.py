"""The process of one competitor in Python: name and task as arguments, its answer as one line of JSON on stdout. It
stays until its standard input ends: the CPU of a process can be read while it is there.
"""

import importlib
import sys

import click
import msgspec

from tests.bench.competitors.task import Answer, decode_task
from tests.bench.rate import Meter

_MODULES = {
    "ceiling": "ceiling",
    "row-by-row": "row_by_row",
    "loop-json": "loop_json",
    "loop-orjson": "loop_orjson",
    "quixstreams": "quix",
}


def main() -> None:
    name, text = sys.argv[1:]
    task = decode_task(text)
    meter = Meter(task.limits)
    importlib.import_module(f"tests.bench.competitors.{_MODULES[name]}").run(task, meter)
    click.echo(msgspec.json.encode(Answer(meter.marks)))
    sys.stdin.read()


if __name__ == "__main__":
    main()
