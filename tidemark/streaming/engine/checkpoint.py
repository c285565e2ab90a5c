"""Folders for Spark's checkpoints, on local disks or in a shared store.

Each query has its own folder, which is deleted when the query ends. A query never continues from a checkpoint: it
begins from Postgres (docs/decisions/0024-batch-ahead.md). The next driver deletes the folders of a driver that was
killed.
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
"""Only folders with such a name are deleted on a disk, because a wrong path may contain files of other programs."""


@contextmanager
def locked(path: Path, stopping: threading.Event) -> Iterator[None]:
    """Lock the directory of checkpoints against other processes of this machine. Logs and waits while it is locked.

    The lease in Postgres (sinks.postgres.lease) excludes other processes of the same database. This lock keeps
    processes of different databases from deleting each other's folders.

    Raises:
        Stopping: `stopping` was set before the lock was free.
        CheckpointNotWritable: the lock file cannot be written.
    """
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
def query_folder(directory: Path) -> Iterator[str]:
    """Create a folder below `directory` for one query, and delete it at the end. Take the lock (`locked`) first.

    Executors on other machines keep the states under the same path on their own disks. Within one query each version of
    a state is unique, so a state on an executor's disk is either right or missing; a missing one fails the query. The
    states of another query would be wrong, so each query has its own path.

    Yields:
        The path of the folder.

    Raises:
        CheckpointNotWritable: the folder cannot be created.
    """
    for folder_ in directory.glob(_OURS):  # left by a driver that was killed
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
    # Another executor can repeat the tasks of a dead one, because it can read the states.
    "spark.task.maxFailures": "4",
    # S3A needs Hadoop's own file system for its buffers, not the raw one of `streaming.engine.spark`.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
}

_RECURSIVE = True
# Java IOExceptions that a person must resolve: unknown scheme, missing right, missing bucket, a file instead of a
# folder.
_LASTING = (
    "UnsupportedFileSystemException",
    "AccessDeniedException",
    "AccessControlException",
    "UnknownStoreException",
    "ParentNotDirectoryException",
    "FileAlreadyExistsException",
)


@contextmanager
def store_folder(spark: SparkSession, store: str) -> Iterator[str]:
    """Create a folder below `store` for one query, and delete it at the end.

    Only the pipelines of one database may use `store`, because other folders in it are deleted. These pipelines run one
    after the other.

    Yields:
        The URI of the folder.

    Raises:
        CheckpointNotWritable: a person must resolve the problem.
        Unavailable: the store does not answer.
    """
    with _translated(spark, store):
        jvm: Any = spark._jvm
        path = jvm.org.apache.hadoop.fs.Path
        files = path(store).getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        own = path(store, _new_name())
        if not files.mkdirs(own):
            raise CheckpointNotWritable(store, "no folder can be made there")
        for status in files.listStatus(path(store)):
            other = status.getPath()
            if other.getName().startswith(_PREFIX) and other.getName() != own.getName():
                files.delete(other, _RECURSIVE)
    try:
        yield str(own.toString())
    finally:
        with suppress(Py4JError, OSError):  # if this fails, the next query deletes it
            files.delete(own, _RECURSIVE)


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
