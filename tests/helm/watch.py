"""What Redis and the sidecars tell of streams, all the time, from the client's pod."""

import itertools
import json
import subprocess
import threading
from collections import defaultdict
from dataclasses import dataclass, field

from tests.helm.kube import Kube

# Runs in the pod: a line for each change in Redis, and one for each answer of the Service.
_WATCH = """
import json, sys, threading, time, urllib.request, redis
url, service, *streams = sys.argv[1:]
lock = threading.Lock()
def say(*words):
    with lock:
        print(json.dumps([time.time(), *words]), flush=True)
def over_redis():
    client, last = redis.Redis.from_url(url, decode_responses=True, socket_timeout=5), {}
    while True:
        for stream in streams:
            try:
                now = int(client.get("tidemark:{%s}:linear" % stream) or 0)
            except (redis.RedisError, OSError):
                continue
            if now != last.get(stream):
                last[stream] = now
                say("redis", stream, now, now)
        time.sleep(0.02)
def over_http(stream):
    while True:
        began = time.time()
        try:
            with urllib.request.urlopen(service + "/v1/streams/" + stream, timeout=2) as response:
                answer = json.load(response)
            linear = answer["linear"] or 0
            say("sidecar", stream, linear, max(answer["vector"].values(), default=linear))
        except (OSError, ValueError):
            pass
        time.sleep(max(0.0, began + 0.2 - time.time()))
for stream in streams:
    threading.Thread(target=over_http, args=(stream,), daemon=True).start()
over_redis()
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What one of them said, at a moment of the pod's clock."""

    at: float
    linear: int
    farthest: int
    """The highest position of a writer."""


@dataclass
class PositionsWatch:
    """Everything that was told. A thread of its own reads; `stop` ends it."""

    kube: Kube
    streams: list[str]
    _told: dict[tuple[str, str], list[Told]] = field(default_factory=lambda: defaultdict(list))
    _process: "subprocess.Popen[str] | None" = None
    _thread: threading.Thread = field(default_factory=threading.Thread)

    def start(self) -> None:
        redis, service = f"redis://{self.kube.name}-redis:6379/0", f"http://{self.kube.name}"
        self._process = self.kube.running("python", "-u", "-c", _WATCH, redis, service, *self.streams)
        self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                break
            at, source, stream, linear, farthest = json.loads(line)
            self._told[source, stream].append(Told(at, linear, farthest))

    def told(self, source: str, stream: str) -> list[Told]:
        """By `redis` each change, by `sidecar` each answer."""
        assert self._thread.is_alive(), "the watch ended"
        return list(self._told[source, stream])

    def position(self, stream: str) -> int:
        """What Redis said last."""
        told = self.told("redis", stream)
        return told[-1].linear if told else 0

    def longest_silence(self, source: str, stream: str, since: float, until: float) -> float:
        """Seconds in which it said nothing: of Redis nothing new, of the sidecars nothing at all."""
        moments = [since, *(told.at for told in self.told(source, stream) if since < told.at < until), until]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))
