"""The query's checkpoint, on the driver's disk or in a store that the executors share (docs/decisions/0009-store.md).

Whatever is in it can be made again from Postgres (docs/design.md 5). Spark keeps `offsets/N` (batch N is planned) and
`commits/N` (batch N is done). Tidemark adds `seed` before the first batch: the line of batches (`lineage`), the batch
that Postgres had applied last when the line began, the states that the query begins with, and its bounds. A replay of
any batch must find the same: so Postgres is not asked for states again while the checkpoint lives, which is until there
are other bounds.

`Checkpoint` works on files of the driver, without Spark. `folder` makes a folder for one query wherever Spark's JVM
finds a URI; what a driver that was killed left there is deleted by the next.
"""

import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession

from tidemark.streaming.errors import CheckpointNotWritable, Stopping, Unavailable
from tidemark.streaming.model import Bounds

log = structlog.get_logger(__name__)

KEPT_ASIDE = 3
KIND = "python over seed"
"""How offsets are kept, and states: as Kafka's source in Python does, and as `streaming.states` over the seed."""


class AppliedBatch(msgspec.Struct, array_like=True, frozen=True):
    """The batch that Postgres applied last."""

    lineage: str
    batch: int


class Seed(msgspec.Struct, array_like=True, frozen=True):
    """What a line of batches began with; `states` as of `streaming.query.by_shard`. With a checkpoint of another `kind`
    nobody goes on.
    """

    lineage: str
    after: AppliedBatch | None
    shards: int
    states: dict[int, bytes]
    bounds: Bounds | None = None
    kind: str = "spark"

    def before(self, batch: int) -> tuple[str, int] | None:
        """The batch that is applied before `batch` of this line: lineage and number, None where none ever was."""
        if batch > 0:
            return self.lineage, batch - 1
        return None if self.after is None else (self.after.lineage, self.after.batch)


_seeds = msgspec.msgpack.Decoder(Seed)


class Checkpoint:
    """A folder on a file system of the driver. Not safe for two processes: take `lock` first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, applied: AppliedBatch | None, bounds: Bounds) -> Seed | None:
        """The seed to go on with, or None where the checkpoint cannot be gone on with; `applied` is Postgres' word.

        They join where Postgres applied the last batch that Spark finished, or the one after, which Spark has planned
        and will run again. Anything else (a restored database, a foreign or older checkpoint) is set aside.
        """
        seed = self._seed()
        planned, done = self._last("offsets"), self._last("commits")
        if seed is None or planned is None:
            if planned is not None or done is not None:
                self._set_aside("it does not say what it began with")
            return None
        if seed.kind != KIND:
            self._set_aside("another version of Tidemark made it")
            return None
        finished = -1 if done is None else done
        if applied is not None and applied.lineage == seed.lineage:
            joins = finished <= applied.batch <= planned
        else:
            joins = finished == -1 and applied == seed.after
        if not joins:
            self._set_aside(f"its last batch is {seed.lineage}/{finished}, the database has applied {_named(applied)}")
            return None
        if seed.bounds != bounds:
            self._set_aside("bounds of streams have changed")
            return None
        return seed

    def begin(
        self,
        after: AppliedBatch | None,
        shards: int,
        states: dict[int, bytes],
        bounds: Bounds,
    ) -> Seed:
        """Start a new line of batches from `states`; durable when it returns."""
        seed = Seed(uuid.uuid4().hex, after, shards, states, bounds, KIND)
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.path / "seed.part"
        with part.open("wb") as file:
            file.write(msgspec.msgpack.encode(seed))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.path / "seed")
        return seed

    @contextmanager
    def apart(self) -> Iterator["Checkpoint"]:
        """A new one, to be used once, for a query whose executors do not see this folder.

        They keep the states under the same path, on disks of their own. In one line of batches a version of a state has
        one content: what an executor finds there is right or missing, and what is missing fails the query. The states
        of another line would be wrong, so each line has a path of its own, and begins with what Postgres holds.
        """
        for left in self.path.glob("[0-9a-f]" * 32):  # by a driver that was killed
            shutil.rmtree(left, ignore_errors=True)
        inner = Checkpoint(self.path / uuid.uuid4().hex)
        try:
            yield inner
        finally:
            shutil.rmtree(inner.path, ignore_errors=True)

    def shards(self) -> int | None:
        """How many shards the checkpoint was made with; None where there is none."""
        seed = self._seed()
        return None if seed is None or self._last("offsets") is None else seed.shards

    def discard(self, why: str) -> None:
        """Set the checkpoint aside, if there is one."""
        if self.path.exists():
            self._set_aside(why)

    def _seed(self) -> Seed | None:
        try:
            return _seeds.decode((self.path / "seed").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _last(self, kind: str) -> int | None:
        folder = self.path / kind
        batches = [int(file.name) for file in folder.iterdir() if file.name.isdigit()] if folder.is_dir() else []
        return max(batches, default=None)

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_name(f"{self.path.name}.aside-{time.time_ns()}")
        self.path.rename(aside)
        log.warning("The checkpoint is set aside, Postgres is the truth", why=why, aside=str(aside))
        old = sorted(self.path.parent.glob(f"{self.path.name}.aside-*"))[:-KEPT_ASIDE]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(path: Path, stopping: threading.Event) -> Iterator[None]:
    """Hold the checkpoint at `path` against other processes of this machine; waits, and says so.

    Raises Stopping where `stopping` is set first, and CheckpointNotWritable. The lease (sinks.postgres.lease) fences
    processes everywhere; this one keeps two that were given different databases from writing one checkpoint."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("a")
    except OSError as error:
        raise CheckpointNotWritable(str(path), error.strerror or str(error)) from None
    with lock as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    log.info("Waiting for another process to leave the checkpoint", checkpoint=str(path))
                waiting = True
                if stopping.wait(0.5):
                    raise Stopping from None
        yield


def _named(applied: AppliedBatch | None) -> str:
    return "none" if applied is None else f"{applied.lineage}/{applied.batch}"


SETTINGS = {
    # What a dead executor leaves undone another does: it finds the states.
    "spark.task.maxFailures": "4",
    # `streaming.spark` has the raw one for the checkpoint's sake; S3A wants Hadoop's own for its buffers.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
}

_PREFIX = "query-"
_WHOLE = True  # delete with all that is in it
# Java's IOExceptions that do not mend themselves: nothing for the scheme, no right, no such bucket, a file in the way.
_LASTING = (
    "UnsupportedFileSystemException",
    "AccessDeniedException",
    "AccessControlException",
    "UnknownStoreException",
    "ParentNotDirectoryException",
    "FileAlreadyExistsException",
)


@contextmanager
def folder(spark: SparkSession, store: str) -> Iterator[str]:
    """The URI of a new folder below `store` for one query, which is deleted at the end.

    Nobody but the pipelines of one database may use `store`: these work one after the other. Raises
    CheckpointNotWritable where a person must help, and Unavailable.
    """
    with _translated(spark, store):
        jvm: Any = spark._jvm
        path = jvm.org.apache.hadoop.fs.Path
        files = path(store).getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        own = path(store, f"{_PREFIX}{uuid.uuid4().hex}")
        if not files.mkdirs(own):
            raise CheckpointNotWritable(store, "no folder can be made there")
        for status in files.listStatus(path(store)):
            left = status.getPath()
            if left.getName().startswith(_PREFIX) and left.getName() != own.getName():
                files.delete(left, _WHOLE)
    try:
        yield str(own.toString())
    finally:
        with suppress(Py4JError, OSError):  # then the next one does it
            files.delete(own, _WHOLE)


@contextmanager
def _translated(spark: SparkSession, store: str) -> Iterator[None]:
    try:
        yield
    except IllegalArgumentException as error:
        raise CheckpointNotWritable(store, str(error).splitlines()[0]) from None
    except Py4JJavaError as error:
        cause = error.java_exception
        problem = str(cause.toString()).splitlines()[0]
        lasting = problem.partition(":")[0].endswith(_LASTING)
        if is_instance_of(spark.sparkContext._gateway, cause, "java.io.IOException") and not lasting:
            raise Unavailable("The store of the checkpoint", store, problem) from None
        raise CheckpointNotWritable(store, problem) from None
