"""Facts into streams from the client's pod, and what is true of the streams meanwhile."""

import bisect
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

from tests.helm.kube import Kube

VOID_EVERY = 7
# Runs in the pod. Every ten IDs are shuffled; every seventh is a VOID; the hole is left out. Before ten are sent, the
# highest of them stands on its second output, with the time by the pod's clock.
_WRITE = """
import json, random, sys, time
stream, first, last, rate, hole, void = sys.argv[1], *map(int, sys.argv[2:])
began, sent = time.monotonic(), 0
for low in range(first, last + 1, 10):
    ids = list(range(low, min(low + 10, last + 1)))
    print("sending", time.time(), ids[-1], file=sys.stderr, flush=True)
    random.shuffle(ids)
    for id in ids:
        if id == hole:
            continue
        kind = {"kind": "RDATA", "row": {}} if id % void else {"kind": "VOID"}
        print(json.dumps({**kind, "stream": stream, "writer": "writer", "prev": id - 1, "id": id}))
        sent += 1
    if rate:
        sys.stdout.flush()
        time.sleep(max(0.0, began + sent / rate - time.monotonic()))
"""
_SENDING = re.compile(r"sending (?P<at>[\d.]+) (?P<id>\d+)\n?")


@dataclass
class FactsFeed:
    """One stream with one writer. IDs are sent in order of `send` and `flowing`; `last` is the highest of all."""

    kube: Kube
    stream: str
    last: int = 0
    hole: int = 0
    """The one ID that is open, while there is one."""
    _limits: list[tuple[float, int]] = field(default_factory=list)
    """Since when, by the pod's clock, positions up to which ID may be true."""

    @property
    def settled(self) -> int:
        """Where the stream comes to stand with what has been sent."""
        return self.hole - 1 if self.hole else self.last

    def may_be(self, at: float) -> int:
        """The highest position that anybody may have told at that moment: all IDs up to it had been sent."""
        before = bisect.bisect_right(self._limits, at, key=itemgetter(0))
        return self._limits[before - 1][1] if before else 0

    def counts(self) -> tuple[int, int]:
        """Of the IDs up to where it stands: how many are facts, and how many void."""
        void = self.settled // VOID_EVERY
        return self.settled - void, void

    def send(self, count: int, rate: int = 0) -> None:
        """So many IDs more, at `rate` a second (0: at once); returns when Kafka has them."""
        with self.flowing(count, rate):
            pass

    def send_with_hole(self, count: int) -> None:
        """So many IDs more, but for the one in the middle."""
        self.hole = self.last + count // 2
        self.send(count)

    def fill(self) -> None:
        """The one that was left out."""
        hole, self.hole = self.hole, 0
        self._require(self._sending(hole, hole, 0, lambda _: self.last))

    def first_was_sent(self) -> bool:
        """Whether it could be: it may be too early."""
        done = self._sending(1, 1, 0, lambda sent: sent).problem() is None
        self.last = max(self.last, int(done))
        return done

    @contextmanager
    def flowing(self, count: int, rate: int) -> Iterator[None]:
        first, self.last = self.last + 1, self.last + count
        below = self.hole - 1 if self.hole else self.last
        sending = self._sending(first, self.last, rate, lambda sent: min(sent, below))
        yield
        self._require(sending)

    def _sending(self, first: int, last: int, rate: int, limit: Callable[[int], int]) -> "_Sending":
        """`limit` tells how far a position may be when the IDs up to one that is given have been sent."""
        numbers = " ".join(map(str, (first, last, rate, self.hole, VOID_EVERY)))
        script = f"{{ python -c '{_WRITE}' {self.stream} {numbers} | tidemark produce; }} 2>&1"
        return _Sending(self.kube.running("sh", "-c", script), lambda at, sent: self._limits.append((at, limit(sent))))

    @staticmethod
    def _require(sending: "_Sending") -> None:
        problem = sending.problem()
        assert problem is None, f"sending failed: {problem}"


class _Sending:
    """A writer in the pod; a thread reads what it says, so that it never waits for us."""

    def __init__(self, process: "subprocess.Popen[str]", note: Callable[[float, int], object]) -> None:
        self._process, self._note = process, note
        self._said: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def problem(self) -> str | None:
        """When it has ended: all that it said, where it failed."""
        self._thread.join()
        return None if self._process.wait() == 0 else "".join(self._said)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if sending := _SENDING.fullmatch(line):
                self._note(float(sending["at"]), int(sending["id"]))
            else:
                self._said.append(line)
