"""What a competitor is told, what it answers, and how its process is started."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile

import msgspec

from tests.bench.rate import Rate, RateLimits, RateMark, steady
from tests.bench.usage import Samples, sampled

_EVERY = 0.25
"""Seconds between two looks at the CPU."""


class Task(msgspec.Struct, frozen=True):
    """`records`: all that the topic holds; `batch`: those that one of Spark's batches reads at most; `directory` is the
    competitor's own.
    """

    bootstrap: str
    topic: str
    partitions: int
    records: int
    batch: int
    limits: RateLimits
    directory: str
    jars: str


class Answer(msgspec.Struct, frozen=True):
    """`positions` by stream and writer once all records were read; None from who did not read them all."""

    marks: list[RateMark]
    positions: dict[str, dict[str, int]] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What one contestant did in one round: its rate, and the core time (s) that all its processes took meanwhile."""

    rate: Rate
    cpu: float

    @property
    def price(self) -> float:
        """Core time (µs) a record."""
        return self.cpu / self.rate.records * 1e6


class CompetitorFailed(Exception):
    """The process ended without figures, or with wrong positions."""


_answers = msgspec.json.Decoder(Answer)
_tasks = msgspec.json.Decoder(Task)
_ANSWER = b'{"marks":'


def decode_task(text: str) -> Task:
    return _tasks.decode(text)


def measure(name: str, command: Sequence[str], task: Task, truth: Mapping[str, Mapping[str, int]]) -> Turn:
    """Run the competitor `name` to its end and take the rate of its steady part. `truth`: where all writers of all
    streams stand once everything was read.
    """
    answer, samples = ask(name, command, task)
    check(name, answer, truth)
    rate = steady(answer.marks, task.limits)
    return Turn(rate, samples.cpu(rate.began, rate.ended))


def check(name: str, answer: Answer, truth: Mapping[str, Mapping[str, int]]) -> None:
    """Raises `CompetitorFailed` where the competitor ends at other positions; some do not say where they end."""
    if answer.positions is not None and answer.positions != truth:
        raise CompetitorFailed(f"{name} ends at wrong positions: {_difference(answer.positions, truth)}")


def ask(
    name: str, command: Sequence[str], task: Task, meanwhile: Callable[[], None] = lambda: None
) -> tuple[Answer, Samples]:
    """What the competitor `name` answers in the end, and what it took; `meanwhile` is called once it has started."""
    wanted = msgspec.json.encode(task).decode()
    with (
        TemporaryFile() as errors,
        subprocess.Popen([*command, wanted], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with sampled(process.pid, _EVERY) as samples:
                meanwhile()
                # Libraries may say something before.
                line = next((line for line in process.stdout if line.startswith(_ANSWER)), None)
            process.stdin.close()
            process.wait()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-2000:]
    if line is None or process.returncode != 0:
        raise CompetitorFailed(f"{name} ended with {process.returncode}: {said}")
    return _answers.decode(line), samples


def _difference(found: Mapping[str, object], truth: Mapping[str, object]) -> str:
    """One stream of all that differ."""
    stream = min(stream for stream in found.keys() | truth.keys() if found.get(stream) != truth.get(stream))
    return f"of {stream} {found.get(stream)}, and the truth is {truth.get(stream)}"
