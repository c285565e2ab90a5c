"""From a completion to its position in a subscriber's hands: the whole stack under light traffic, on one machine."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import redis

from tests.bench.site import BenchSite
from tests.bench.table import table, verdict
from tests.bench.topic import Sender, joined, paced
from tests.bench.whole import WrongResult, pipeline
from tests.bench.workload import Completions, Shape, WritersAtWork

WANTED = {50: 300.0, 99: 800.0}
_SHAPE = Shape(streams=4, writers=8)


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """Transactions begin at random moments, `rate` a second."""

    rate: float = 200.0
    warm_seconds: float = 30.0
    seconds: float = 90.0
    partitions: int = 4


class MoveTimes:
    """Moves of positions: when a completion allowed one, and when a subscriber was told. Two threads, no lock: each
    deque is appended by one and popped by the other.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._positions: dict[int, int] = defaultdict(int)
        self._early: dict[int, dict[int, int]] = defaultdict(dict)
        self._awaited: dict[tuple[str, str], deque[tuple[int, float]]] = defaultdict(deque)
        self.latencies: list[tuple[float, float]] = []

    @property
    def unseen(self) -> int:
        return sum(map(len, self._awaited.values()))

    def completed(self, edges: Completions, at: float) -> None:
        """To be called right before the edges are sent."""
        for owner, prev, id_ in zip(edges.owner.tolist(), edges.prev.tolist(), edges.id.tolist(), strict=True):
            self.completed_one(owner, prev, id_, at)

    def completed_one(self, owner: int, prev: int, id_: int, at: float) -> None:
        """As `completed`, for one edge."""
        early = self._early[owner]
        early[prev] = id_
        position = start = self._positions[owner]
        while (following := early.pop(position, None)) is not None:
            position = following
        if position != start:
            self._positions[owner] = position
            stream, writer = divmod(owner, self.shape.writers)
            self._awaited[self.shape.stream(stream), self.shape.writer(writer)].append((position, at))

    def between(self, since: float, until: float) -> list[float]:
        """Latencies, in milliseconds, of the moves that were allowed in that time."""
        return [1000 * latency for allowed, latency in self.latencies if since <= allowed < until]

    def seen(self, stream: str, writer: str, position: int, at: float) -> None:
        awaited = self._awaited[stream, writer]
        while awaited and awaited[0][0] <= position:
            _, allowed = awaited.popleft()
            self.latencies.append((allowed, at - allowed))


def run(site: BenchSite, plan: LatencyPlan) -> dict[str, Any]:
    topic = site.fresh("latency")
    play, moves = WritersAtWork(_SHAPE), MoveTimes(_SHAPE)
    sender = joined(site.connection, topic, plan.partitions, _SHAPE)
    with (
        pipeline(site, topic, plan.partitions, {}) as running,
        subscribed(running.redis_url, _SHAPE, moves),
    ):
        click.echo(f"sending {plan.rate:g} records a second for {plan.warm_seconds + plan.seconds:.0f} s", err=True)
        counted_from = time.monotonic() + plan.warm_seconds
        sent_before = sender.records
        counted_to = send(plan.rate, plan.warm_seconds + plan.seconds, play, sender, moves)
        rest = finish(play, sender, moves)
        running.await_positions(play)
    counted = moves.between(counted_from, counted_to)
    return {
        "rate": (sender.records - sent_before - rest) / (plan.warm_seconds + plan.seconds),
        "seconds": plan.seconds,
        "moves": len(counted),
        "percentiles": {str(p): float(np.percentile(counted, p)) for p in (50, 90, 99, 99.9, 100)},
    }


def render(figures: Mapping[str, Any]) -> list[str]:
    percentiles = figures["percentiles"]
    cells = {name: f"{value:,.0f} ms" for name, value in percentiles.items()}
    cells |= {str(p): verdict(percentiles[str(p)], wanted, " ms") for p, wanted in WANTED.items()}
    return [
        f"{figures['rate']:.0f} records a second for {figures['seconds']:.0f} s after a warm-up, at random moments;"
        " broker, Postgres, Redis, pipeline, producer and subscriber share the machine. From the call that sends the"
        " completion which lets a position move, to the subscriber's receipt of that move from Redis:"
        f" {figures['moves']:,} moves.",
        "",
        *table(["p50", "p90", "p99", "p99.9", "highest"], [list(cells.values())]),
    ]


def send(rate: float, seconds: float, play: WritersAtWork, sender: Sender, moves: MoveTimes) -> float:
    """Transactions at random moments, `rate` a second; returns when the last was sent."""
    for _ in paced(round(rate * seconds), seconds, play.shape.seed):
        edges = play.step(1)
        if len(edges):
            moves.completed(edges, time.monotonic())
            sender.send(edges)
    return time.monotonic()


def finish(play: WritersAtWork, sender: Sender, moves: MoveTimes) -> int:
    """Send what is still open and wait until every move was seen; the count of completions sent."""
    rest = play.finish()
    moves.completed(rest, time.monotonic())
    sender.send(rest)
    sender.flush()
    _await_all_seen(moves)
    return len(rest)


def _await_all_seen(moves: MoveTimes) -> None:
    deadline = time.monotonic() + 30
    while moves.unseen:
        if time.monotonic() > deadline:
            raise WrongResult(f"{moves.unseen} moves of positions never came over the channel")
        time.sleep(0.05)


@contextmanager
def subscribed(url: str, shape: Shape, moves: MoveTimes) -> Iterator[None]:
    """A thread that listens on the streams' channels; subscribed when the block begins."""
    with redis.Redis.from_url(url) as client, client.pubsub() as subscription:
        channels = [f"tidemark:{{{shape.stream(number)}}}" for number in range(shape.streams)]
        subscription.subscribe(*channels)
        for _ in channels:
            subscription.get_message(timeout=5)
        stopping = threading.Event()

        def listen() -> None:
            while not stopping.is_set():
                message = subscription.get_message(timeout=0.2)
                if message is not None and message["type"] == "message":
                    at = time.monotonic()
                    for line in message["data"].decode().splitlines():
                        _, stream, writer, _, position = line.split()
                        moves.seen(stream, writer, int(position), at)

        thread = threading.Thread(target=listen, name="subscriber", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
