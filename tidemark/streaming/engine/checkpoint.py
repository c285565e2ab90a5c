"""Folders for Spark's checkpoint: one for each query, deleted at its end, on disks or in a store that executors share.

Nobody goes on with a checkpoint: each query begins from Postgres (docs/decisions/0024-batch-ahead.md), and a folder
lives as long as its query does. What a driver that was killed left is deleted by the next.
"""

import fcntl
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession

from tidemark.common.errors import CheckpointNotWritable, Stopping, Unavailable
from tidemark.common.log import get_logger

log = get_logger(__name__)

_PREFIX = "query-"
_OURS = _PREFIX + "[0-9a-f]" * 32
"""Nothing of another name is deleted on a disk: a place that was mistyped may hold somebody's files."""


@contextmanager
def locked(path: Path, stopping: threading.Event) -> Iterator[None]:
    """Hold the place of checkpoints at `path` against other processes of this machine; waits, and says so.

    Raises Stopping where `stopping` is set first, and CheckpointNotWritable. The lease (sinks.postgres.lease) fences
    processes everywhere; this one keeps two that were given different databases from deleting each other's folders."""
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


@contextmanager
def apart(directory: Path) -> Iterator[str]:
    """The path of a new folder below `place` for one query, which is deleted at the end. Take `locked` first.

    Executors elsewhere keep the states under the same path, on disks of their own. In one line of batches a version of
    a state has one content: what an executor finds there is right or missing, and what is missing fails the query. The
    states of another line would be wrong, so each has a path of its own. Raises CheckpointNotWritable.
    """
    for folder_ in directory.glob(_OURS):  # by a driver that was killed
        shutil.rmtree(folder_, ignore_errors=True)
    own = directory / _new_name()
    try:
        own.mkdir(parents=True)
    except OSError as error:
        raise CheckpointNotWritable(str(directory), error.strerror or str(error)) from None
    try:
        yield str(own)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _new_name() -> str:
    return f"{_PREFIX}{uuid.uuid4().hex}"


SETTINGS = {
    # What a dead executor leaves undone another does: it finds the states.
    "spark.task.maxFailures": "4",
    # `streaming.engine.spark` has the raw one for the checkpoint's sake; S3A wants Hadoop's own for its buffers.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
}

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
        own = path(store, _new_name())
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
