"""The project's own sinks, driven as the publisher drives them, and ways to collect what a follower hands over."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

from tests.sinks.given import NOW, advance, batch, stream
from tidemark.sinks.port import Batch
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.reader import Event, Follow
from tidemark.sinks.redis.mirror import Mirror
from tidemark.sinks.redis.publish import Redis
from tidemark.streaming.core.effects import StreamEffects


class Pipeline:
    """Commits batches and shows them, or (`commit` alone) dies in between."""

    def __init__(self, store: Postgres, shown: Redis, lease: Lease) -> None:
        self.store = store
        self.lease = lease
        self.mirror = Mirror(store, shown, lease)
        self.number = 0

    def commit(self, *streams: StreamEffects) -> tuple[Batch, Any]:
        self.number += 1
        made = batch(self.number, *streams, token=self.lease.token, now=NOW + self.number)
        return made, self.store.apply(made)

    def publish(self, *streams: StreamEffects) -> None:
        self.mirror.publish(*self.commit(*streams))

    def restarted(self, shown: Redis) -> Mirror:
        """The mirror of a new process, which knows nothing of Redis."""
        return Mirror(self.store, shown, self.lease)

    def move(self, writer: str, prev: int, id_: int, linear: int | None = None, **evidence: int) -> None:
        """One writer of stream `s` advances; the line goes with it unless told otherwise."""
        self.publish(stream("s", advance(writer, prev, id_, **evidence), linear=id_ if linear is None else linear))


@contextmanager
def later(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Do `act` on another thread while the block runs; what it raises is raised here."""

    def wait_and_act() -> None:
        time.sleep(seconds)
        act()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait_and_act)
        yield
        done.result()


def taken(follow: Follow, count: int) -> list[Event]:
    return [*islice(follow, count)]
