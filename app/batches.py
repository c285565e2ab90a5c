"""What happens to a batch in the driver: collected, checked, published, counted. Called by Spark's own thread.

Spark turns what a callback raises into a text, so the error itself is kept here for the pipeline to act on.
"""

import gc
import threading
import time
from collections.abc import Mapping

import structlog
from pyspark.sql import DataFrame

from tidemark.app import metrics
from tidemark.app.board import Board
from tidemark.app.tracing import BatchTrace, Trace
from tidemark.sinks.publisher import Publisher
from tidemark.sources.start import RememberedTopic
from tidemark.streaming.checkpoint import Seed
from tidemark.streaming.effects import ShardEffects
from tidemark.streaming.errors import BatchCut, PartitionsChanged, Stopping, TidemarkError
from tidemark.streaming.query import collect

log = structlog.get_logger(__name__)

LET_GO_AFTER = 50
"""Batches. What pyspark makes of one hangs together in cycles and keeps 40 KB of plans in the JVM until Python looks
for these, which it does seldom (`app.pipeline`)."""
FEWER = 4  # so many times fewer records has a batch than were read of one that had to be cut


class Batches:
    """The query's sink. `seed` is what its batches began with; `topics` are those that are read; `trace` is told of
    each.

    After `finish` the batch in hand is completed and none begins.
    """

    def __init__(
        self,
        publisher: Publisher,
        board: Board,
        seed: Seed,
        topics: Mapping[str, RememberedTopic],
        trace: Trace,
    ) -> None:
        self._publisher = publisher
        self._board = board
        self._seed = seed
        self._topics = topics
        self._trace = trace
        self._finishing = threading.Event()
        self._in_hand = threading.Lock()
        self.failure: TidemarkError | None = None
        self.published = 0

    def __call__(self, batch: DataFrame, number: int) -> None:
        with self._in_hand:
            try:
                if self._finishing.is_set():
                    raise Stopping("told to end between two batches")
                with self._trace(self._seed.lineage, number) as trace:
                    self._publish(batch, number, trace)
            except TidemarkError as error:
                self.failure = error
                raise

    def finish(self, seconds: float) -> bool:
        """Let the batch in hand end and no other begin; False where it did not end in time."""
        self._finishing.set()
        if not self._in_hand.acquire(timeout=seconds):
            return False
        self._in_hand.release()
        return True

    def _publish(self, batch: DataFrame, number: int, trace: BatchTrace) -> None:
        began = time.monotonic()
        effects = collect(batch)
        trace.computed(batch, effects)
        self._require_known_partitions(effects)
        cut = any(shard.cut for shard in effects)
        # Spark takes all of a batch for done. Under another name it is none of this line of batches, so that no query
        # goes on with this checkpoint, whenever we are killed.
        line = f"{self._seed.lineage}.cut" if cut else self._seed.lineage
        published = self._publisher.publish(line, number, effects, self._seed.before(number))
        trace.published(published)
        read = self._board.new_offsets(effects)
        self._board.update(effects)
        metrics.count_batch(effects, published, time.monotonic() - began)
        self.published += 1
        if self.published % LET_GO_AFTER == 0:
            gc.collect()
        log.debug("Published a batch", batch=number, seconds=round(time.monotonic() - began, 3))
        if cut:
            raise BatchCut(read, max(1, read // FEWER))

    def _require_known_partitions(self, effects: list[ShardEffects]) -> None:
        """Spark reads a partition that is added while it runs; its streams would have two orders."""
        for shard in effects:
            for progress in shard.progress:
                known = self._topics[progress.topic].partitions
                if progress.partition >= known:
                    raise PartitionsChanged(progress.topic, known, progress.partition + 1)
