"""What a contestant takes of the machine, with all its processes: memory and CPU, sampled on a thread."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import psutil

MIB = 1 << 20
KINDS = ("driver", "jvm", "workers")


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident memory (bytes) of a pipeline `at` a time (s since 1970), `workers` all together; `cpu` is the core time
    (s) that all processes have taken so far, those included that have ended.
    """

    at: float
    driver: int
    jvm: int
    workers: int
    cpu: float


@dataclass(slots=True)
class Samples:
    """Read `taken` once the sampling has ended."""

    taken: list[Sample] = field(default_factory=list)

    def peak(self, kind: str) -> int:
        return max(self.series(kind))

    def series(self, kind: str) -> list[int]:
        return [getattr(sample, kind) for sample in self.taken]

    def cpu(self, began: float, ended: float) -> float:
        """Core time (s) between two moments (s since 1970) of the sampling; even between two samples."""
        at = [sample.at for sample in self.taken]
        # A process that went before its parent had waited for it takes its time along for a moment.
        so_far = np.maximum.accumulate([sample.cpu for sample in self.taken])
        first, last = np.interp([began, ended], at, so_far)
        return float(last - first)


@contextmanager
def sampled(pid: int, every: float, servers: Sequence[int] = ()) -> Iterator[Samples]:
    """Sample the process `pid` and all below it until the block ends, first and last as it begins and ends. Of
    `servers`, and of what is below them, only the CPU counts.
    """
    samples, stopping = Samples(), threading.Event()
    roots = [psutil.Process(each) for each in (pid, *servers)]

    def take() -> bool:
        sample = _sample(*roots)
        if sample is not None:
            samples.taken.append(sample)
        return sample is not None

    def run() -> None:
        while not stopping.wait(every) and take():
            pass

    take()
    thread = threading.Thread(target=run, name="usage", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stopping.set()
        thread.join()
        take()


def _sample(driver: psutil.Process, *servers: psutil.Process) -> Sample | None:
    """None where one of them has gone."""
    rss = dict.fromkeys(KINDS, 0)
    cpu = 0.0
    at = time.time()
    try:
        rss["driver"], cpu = driver.memory_info().rss, _cpu(driver)
        for child in driver.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a worker that was let go
                cpu += _cpu(child)
                rss["jvm" if child.name() == "java" else "workers"] += child.memory_info().rss
        for server in servers:
            cpu += _cpu(server)
            for child in server.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    cpu += _cpu(child)
    except psutil.NoSuchProcess:
        return None
    return Sample(at, **rss, cpu=cpu)


def _cpu(process: psutil.Process) -> float:
    """Of the process itself and of the children that it has waited for; the others are counted themselves."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
