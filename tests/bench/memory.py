"""How much memory a pipeline takes: its driver, its JVM and its Python workers, sampled on a thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

MIB = 1 << 20
KINDS = ("driver", "jvm", "workers")


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident memory (bytes) `at` seconds after the first sample; `workers` is the sum over all of them."""

    at: float
    driver: int
    jvm: int
    workers: int


@dataclass(slots=True)
class Samples:
    """Read `taken` once the sampling has ended."""

    taken: list[Sample] = field(default_factory=list)

    def peak(self, kind: str) -> int:
        return max(self.series(kind))

    def series(self, kind: str) -> list[int]:
        return [getattr(sample, kind) for sample in self.taken]


@contextmanager
def sampled(pid: int, every: float) -> Iterator[Samples]:
    """Sample the pipeline whose driver is `pid` until the block ends."""
    samples, stopping = Samples(), threading.Event()

    def run() -> None:
        driver, began = psutil.Process(pid), time.monotonic()
        while not stopping.wait(every):
            sample = _sample(driver, time.monotonic() - began)
            if sample is None:
                return
            samples.taken.append(sample)

    thread = threading.Thread(target=run, name="memory", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stopping.set()
        thread.join()


def _sample(driver: psutil.Process, at: float) -> Sample | None:
    """None where the driver has gone."""
    sums = dict.fromkeys(KINDS, 0)
    try:
        sums["driver"] = driver.memory_info().rss
        for child in driver.children(recursive=True):
            try:
                sums["jvm" if child.name() == "java" else "workers"] += child.memory_info().rss
            except psutil.NoSuchProcess:  # a worker that was let go
                continue
    except psutil.NoSuchProcess:
        return None
    return Sample(at, **sums)
