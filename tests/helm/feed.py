"""Facts into a stream, and its position out of Redis, both from the client's pod."""

import itertools
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.helm.kube import Kube

# Runs in the pod. Every ten IDs are shuffled; every seventh is a VOID; the hole is left out.
_WRITE = """
import json, random, sys, time
stream, first, last, rate, hole = sys.argv[1], *map(int, sys.argv[2:])
began, sent = time.monotonic(), 0
for low in range(first, last + 1, 10):
    ids = list(range(low, min(low + 10, last + 1)))
    random.shuffle(ids)
    for id in ids:
        if id == hole:
            continue
        kind = {"kind": "RDATA", "row": {}} if id % 7 else {"kind": "VOID"}
        print(json.dumps({**kind, "stream": stream, "writer": "writer", "prev": id - 1, "id": id}))
        sent += 1
    if rate:
        sys.stdout.flush()
        time.sleep(max(0.0, began + sent / rate - time.monotonic()))
"""
_WATCH = """
import sys, time, redis
client = redis.Redis.from_url(sys.argv[1], decode_responses=True)
last = None
while True:
    try:
        now = client.get("tidemark:{%s}:linear" % sys.argv[2])
    except redis.RedisError:
        now = last
    if now != last:
        print(now, flush=True)
        last = now
    time.sleep(0.02)
"""


@dataclass(frozen=True, slots=True)
class FactsFeed:
    kube: Kube
    stream: str

    def send(self, first: int, last: int, rate: int, hole: int = 0) -> None:
        """Every ID from first to last but the hole, at `rate` a second (0: at once); returns when Kafka has them."""
        problem = self._await(self._start(first, last, rate, hole))
        assert problem is None, problem

    def sent(self, first: int, last: int) -> bool:
        """Whether it could be sent: it may be too early."""
        return self._await(self._start(first, last, 0, 0)) is None

    @contextmanager
    def flowing(self, first: int, last: int, rate: int) -> Iterator[None]:
        process = self._start(first, last, rate, 0)
        yield
        problem = self._await(process)
        assert problem is None, problem

    def _start(self, first: int, last: int, rate: int, hole: int) -> "subprocess.Popen[str]":
        numbers = " ".join(map(str, (first, last, rate, hole)))
        return self.kube.running("sh", "-c", f"python -c '{_WRITE}' {self.stream} {numbers} | tidemark produce")

    @staticmethod
    def _await(process: "subprocess.Popen[str]") -> str | None:
        out, problem = process.communicate()
        return None if process.returncode == 0 else f"sending failed: {out}{problem}"


@dataclass
class RedisWatch:
    """Every position that Redis showed, and when it came here. A thread of its own reads."""

    kube: Kube
    stream: str
    _seen: list[tuple[float, int]] = field(default_factory=list)
    _process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        redis = f"redis://{self.kube.name}-redis:6379/0"
        self._process = self.kube.running("python", "-u", "-c", _WATCH, redis, self.stream)
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit():
                self._seen.append((time.monotonic(), int(line)))

    @property
    def position(self) -> int:
        return self._seen[-1][1] if self._seen else 0

    def require_ascending(self) -> None:
        positions = [position for _, position in list(self._seen)]
        back = [pair for pair in itertools.pairwise(positions) if pair[0] >= pair[1]]
        assert not back, f"positions went back: {back}"

    def longest_standstill(self, since: float) -> float:
        """Seconds between two positions, while facts flowed, that came after `since`."""
        times = [since, *(at for at, _ in list(self._seen) if at > since)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))
