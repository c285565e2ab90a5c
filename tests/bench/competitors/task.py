"""What a competitor is told, and how its process is started."""

import subprocess
import sys

import msgspec

from tests.bench.rate import Rate, RateLimits, RateMark, steady


class Task(msgspec.Struct, frozen=True):
    """`batch`: records that one of Spark's batches reads at most; `directory` is the competitor's own."""

    bootstrap: str
    topic: str
    partitions: int
    batch: int
    limits: RateLimits
    directory: str
    jars: str


class CompetitorFailed(Exception):
    """The process ended without figures."""


_marks = msgspec.json.Decoder(list[RateMark])
_tasks = msgspec.json.Decoder(Task)


def decode_task(text: str) -> Task:
    return _tasks.decode(text)


def measure(name: str, task: Task) -> Rate:
    """Run the competitor `name` to its end and take the rate of its steady part."""
    command = [sys.executable, "-m", "tests.bench.competitors", name, msgspec.json.encode(task).decode()]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        raise CompetitorFailed(f"{name} ended with {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")
    return steady(_marks.decode(done.stdout.splitlines()[-1]), task.limits)
