"""Tidemark whole: a real `tidemark pipeline` process on the servers of a site, and what it has reached."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.request import urlopen

import psycopg
import redis
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.bench.rate import RateMark
from tests.bench.site import BenchSite
from tests.bench.workload import WritersAtWork
from tidemark.app.stack.processes import LOOPBACK, PipelineProcess, free_port

_POLL_SECONDS = 0.2


class WrongResult(Exception):
    """What was published is not what the workload says: no figure of this run counts."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A running pipeline; everything it has written is read from its database and its Redis."""

    server: PipelineProcess
    topic: str
    dsn: str
    redis_url: str

    @property
    def pid(self) -> int:
        pid = self.server.pid
        if pid is None:
            raise WrongResult(f"the pipeline ended with {self.server.returncode}: {self.server.log_tail(5)}")
        return pid

    def marks(self) -> list[RateMark]:
        """One mark per batch: records of the topic counted so far, when Postgres began the batch's transaction.

        From one transaction to the next is one whole turn of the pipeline: reading, computing and both sinks.
        """
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(
                "select (select sum(o.value::bigint) from jsonb_each_text(offsets -> %s) o)::bigint,"
                " extract(epoch from applied_at)::float8 from tidemark.applied_batches order by number",
                [self.topic],
            ).fetchall()
        return [RateMark(records, at) for records, at in rows if records is not None]

    def await_records(self, records: int, seconds: float) -> None:
        """Return once so many records of the topic are counted and published."""
        deadline = time.monotonic() + seconds
        while (reached := max((mark.records for mark in self.marks()), default=0)) < records:
            _ = self.pid
            if time.monotonic() > deadline:
                raise WrongResult(f"{reached} of {records} records after {seconds:.0f} s: {self.server.log_tail(3)}")
            time.sleep(_POLL_SECONDS)

    def await_positions(self, play: WritersAtWork, seconds: float = 30) -> None:
        """Return once Redis shows every position and line as `play` left them; Redis is the last sink of a batch."""
        deadline = time.monotonic() + seconds
        while (difference := self._difference(play)) is not None:
            if time.monotonic() > deadline:
                raise WrongResult(difference)
            time.sleep(_POLL_SECONDS)

    def batches(self) -> int:
        """How many this process has published."""
        samples = self._samples("tidemark_batch_seconds")
        return int(next(sample.value for sample in samples if sample.name.endswith("_count")))

    def sink_seconds(self) -> dict[str, float]:
        """What each sink took on average for a batch, by the pipeline's own metric."""
        samples = self._samples("tidemark_sink_seconds")
        sums = {sample.labels["sink"]: sample.value for sample in samples if sample.name.endswith("_sum")}
        counts = {sample.labels["sink"]: sample.value for sample in samples if sample.name.endswith("_count")}
        return {sink: sums[sink] / counts[sink] for sink in sums if counts[sink]}

    def _samples(self, family: str) -> list[Sample]:
        with urlopen(f"http://{LOOPBACK}:{self.server.port}/metrics") as response:
            families = {found.name: found for found in text_string_to_metric_families(response.read().decode())}
        return list(families[family].samples)

    def state_bytes(self, stream: str) -> int:
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(
                "select length(state) from tidemark.streams where stream = %s", [stream]
            ).fetchone()
        if row is None:
            raise WrongResult(f"the database knows no stream {stream}")
        return int(row[0])

    def _difference(self, play: WritersAtWork) -> str | None:
        shape = play.shape
        with redis.Redis.from_url(self.redis_url) as client, client.pipeline(transaction=False) as asked:
            for number in range(shape.streams):
                asked.hgetall(f"tidemark:{{{shape.stream(number)}}}:positions")
                asked.get(f"tidemark:{{{shape.stream(number)}}}:linear")
            answers = asked.execute()
        for number in range(shape.streams):
            positions = {writer.decode(): int(position) for writer, position in answers[2 * number].items()}
            found = positions, int(answers[2 * number + 1] or 0)
            wanted = play.positions(number), play.linear(number)
            if found != wanted:
                return f"{shape.stream(number)}: Redis has {found}, the workload ends at {wanted}"
        return None


@contextmanager
def pipeline(site: BenchSite, topic: str, partitions: int, variables: Mapping[str, str]) -> Iterator[Whole]:
    """A pipeline on `topic`, with an empty database, an empty Redis and no checkpoint; ready when the block begins.

    `variables` are settings beyond those of the site (`TIDEMARK_...`); all others have their defaults.
    """
    running = not_begun(site, topic, partitions, site.database(), site.emptied_redis(), variables)
    running.server.start()
    try:
        yield running
    finally:
        running.server.stop()


def not_begun(
    site: BenchSite, topic: str, partitions: int, dsn: str, redis_url: str, variables: Mapping[str, str]
) -> Whole:
    """A pipeline without a checkpoint, which its caller starts and stops."""
    port = free_port()
    settings = {
        "TIDEMARK_HOME": str(site.directory("pipeline")),
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": site.kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": topic,
        "TIDEMARK_KAFKA_CONTROL_TOPIC": f"{topic}.control",
        "TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC": f"{topic}.dead-letters",
        "TIDEMARK_KAFKA_CREATE_TOPICS": "true",
        "TIDEMARK_KAFKA_PARTITIONS": str(partitions),
        "TIDEMARK_POSTGRES_DSN": dsn,
        "TIDEMARK_REDIS_URL": redis_url,
        "TIDEMARK_METRICS_PORT": str(port),
        **variables,
    }
    return Whole(PipelineProcess(site.home, port, settings), topic, dsn, redis_url)
