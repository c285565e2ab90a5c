"""A sidecar in a process of its own, honest clients whose answers are timed, and a process that attacks it."""

import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

import httpx

from tests.app.sidecar.given import At, moved
from tests.bench.crowd import attacking
from tests.bench.sidecar import answer, running, tell
from tests.sinks.reader.given import Pipeline
from tidemark.app.stack.processes import SidecarProcess

STREAMS = [f"s{number}" for number in range(20)]
PAUSE = 0.1  # seconds between two requests of an honest client
FLOOR = 0.5  # seconds: a machine that does something else must not fail a test
PROBE = 1.0  # seconds that a probe may take


@dataclass
class Timed:
    """Seconds that honest requests took, and what was not answered with 200."""

    probes: list[float] = field(default_factory=list)
    snapshots: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def snapshot(self) -> float:
        return statistics.median(self.snapshots)

    @property
    def probe(self) -> float:
        """The slowest but one in ten: other tests on this machine take whole seconds of its cores now and then."""
        return sorted(self.probes)[int(len(self.probes) * 0.9)]


class HonestClients:
    """From 127.0.0.1: each probe and each snapshot on a connection of its own, and one that follows events while the
    streams move, which must join without a hole."""

    def __init__(self, sidecar: SidecarProcess, pipeline: Pipeline) -> None:
        self._sidecar = sidecar
        self._pipeline = pipeline
        self.at = 0

    def publish(self) -> None:
        """Move every stream by one ID."""
        self.at += 1
        self._pipeline.publish(*(moved(name, self.at, w=At(self.at - 1, self.at)) for name in STREAMS))

    def measure(self, seconds: float) -> Timed:
        timed, over = Timed(), threading.Event()
        threads = [
            threading.Thread(target=self._ask, args=(paths, found, timed.failed, over))
            for paths, found in (
                (["/livez", "/readyz"], timed.probes),
                ([f"/v1/streams/{name}" for name in STREAMS], timed.snapshots),
            )
        ]
        follower = threading.Thread(target=self._follow, args=(self.at, seconds, timed.failed))
        for thread in (follower, *threads):
            thread.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.publish()
            time.sleep(0.5)
        over.set()
        for thread in threads:
            thread.join()
        self.publish()
        follower.join()
        return timed

    def _ask(self, paths: Sequence[str], found: list[float], failed: list[str], over: threading.Event) -> None:
        number = 0
        while not over.is_set():
            path = paths[number % len(paths)]
            number += 1
            began = time.monotonic()
            connection = HTTPConnection("127.0.0.1", self._sidecar.port, timeout=30)
            try:
                connection.request("GET", path)
                if (status := connection.getresponse().status) != HTTPStatus.OK:
                    failed.append(f"{path}: {status}")
            except (OSError, HTTPException) as problem:
                failed.append(f"{path}: {problem!r}")
            finally:
                connection.close()
            found.append(time.monotonic() - began)
            over.wait(PAUSE)

    def _follow(self, begun: int, seconds: float, failed: list[str]) -> None:
        """Every move of one stream, in order, until nothing more is published."""
        at: int | None = None
        deadline = time.monotonic() + seconds
        try:
            with httpx.stream("GET", f"{self._sidecar.url}/v1/events?stream=s0", timeout=30) as told:
                for line in told.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    said = httpx.Response(200, content=line[6:]).json()
                    if "vector" in said:
                        at = said["vector"].get("w", begun)
                    elif "prev" in said:
                        if said["prev"] != at:
                            failed.append(f"events: {said} after {at}")
                        at = said["id"]
                    if time.monotonic() > deadline and at == self.at:
                        return
        except httpx.HTTPError as problem:
            failed.append(f"events: {problem!r}")


@contextmanager
def attacked(sidecar: SidecarProcess, lines: int, *acts: str, crowd: int = 2500) -> Iterator[subprocess.Popen[bytes]]:
    """By a process of its own, from 127.0.0.2, while the block runs."""
    attack = attacking.Attack(sidecar.port, lines, STREAMS, [*acts], crowd=crowd)
    with running(attacking, attack) as process:
        answer(process, dict)
        tell(process, {})
        yield process


def ended(process: subprocess.Popen[bytes]) -> Mapping[str, Mapping[str, int]]:
    """End the attack: how often each act was answered, and how."""
    tell(process, {})
    return answer(process, dict)


def check(before: Timed, during: Timed) -> None:
    """Probes take less than a second, honest clients wait at most twice as long, and lose nothing. On a machine that is
    busy with something else, probes take at most twice as long, too."""
    assert before.failed == []
    assert during.failed == [], during.failed[:10]
    assert during.probe < max(PROBE, 2 * before.probe), (before.probe, during.probe)
    assert during.snapshot <= max(2 * before.snapshot, FLOOR), (before.snapshot, during.snapshot)
