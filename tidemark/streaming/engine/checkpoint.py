"""Folders for Spark's checkpoints, on local disks or in a shared store.

Each query has its own folder, which is deleted when the query ends. No query continues from a checkpoint: each query
begins from Postgres (docs/decisions/0024-batch-ahead.md). The next query deletes the folders that a killed driver left.
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
_FOLDER_PATTERN = _PREFIX + "[0-9a-f]" * 32
"""On a disk, only folders with such a name are deleted, because a wrong path may contain files of other programs."""


@contextmanager
def directory_lock(path: Path, stopping: threading.Event) -> Iterator[None]:
    """Lock the directory of checkpoints during the block. First waits while another process has the lock.

    The lease in Postgres (sinks.postgres.lease) excludes other processes of the same database. This lock keeps
    processes of different databases on one machine from deleting each other's folders.

    Args:
        path: the directory. The lock is a file next to it, `NAME.lock`, which is created and never deleted.
        stopping: set this event to end the wait.

    Raises:
        Stopping: `stopping` was set before the lock was free.
        CheckpointNotWritable: the lock file cannot be opened for writing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("a")
    except OSError as error:
        raise CheckpointNotWritable(str(path), error.strerror or str(error)) from None
    with lock as file:
        is_waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_waiting:
                    log.info(
                        "Waiting for the lock on the checkpoint: another process has the lock", checkpoint=str(path)
                    )
                is_waiting = True
                if stopping.wait(0.5):
                    raise Stopping from None
        yield


@contextmanager
def query_folder(directory: Path) -> Iterator[str]:
    """Create a folder below `directory` for one query, and delete it at the end. Take `directory_lock` first.

    Also deletes the folders of other queries in `directory`, which killed drivers left there.

    Executors on other machines store the states under the same path on their own disks. A state of another query would
    be wrong, so each query has its own path. Then a state on an executor's disk is right or missing, and the query
    fails if a state is missing.

    Yields:
        The path of the folder.

    Raises:
        CheckpointNotWritable: the folder cannot be created.
    """
    for leftover in directory.glob(_FOLDER_PATTERN):  # left by a driver that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    folder = directory / _folder_name()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointNotWritable(str(directory), error.strerror or str(error)) from None
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder_name() -> str:
    return f"{_PREFIX}{uuid.uuid4().hex}"


# Spark settings for a checkpoint in a shared store.
STORE_SETTINGS = {
    # Another executor can repeat the tasks of a dead one, because it can read the states.
    "spark.task.maxFailures": "4",
    # S3A needs Hadoop's own file system for its buffers, not the raw one of `streaming.engine.spark`.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
}

_RECURSIVE = True
# Java IOExceptions that a person must resolve: unknown scheme, missing permission, missing bucket, a file instead
# of a folder.
_PERMANENT_ERRORS = (
    "UnsupportedFileSystemException",
    "AccessDeniedException",
    "AccessControlException",
    "UnknownStoreException",
    "ParentNotDirectoryException",
    "FileAlreadyExistsException",
)


@contextmanager
def store_folder(spark: SparkSession, store: str) -> Iterator[str]:
    """Create a folder below the URI `store` for one query, and delete it at the end.

    Also deletes the folders of other queries in `store`. So only the pipelines of one database may use `store`: the
    lease lets only one of these pipelines run queries. If a deletion at the end fails, the next query deletes the
    folder.

    Yields:
        The URI of the folder.

    Raises:
        CheckpointNotWritable: the store refuses access, or its URI is wrong. A person must resolve the problem.
        Unavailable: the store does not answer, or has another problem that may pass.
    """
    with _translate_errors(spark, store):
        jvm: Any = spark._jvm
        path = jvm.org.apache.hadoop.fs.Path
        files = path(store).getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        folder = path(store, _folder_name())
        if not files.mkdirs(folder):
            raise CheckpointNotWritable(store, "a folder cannot be created")
        for status in files.listStatus(path(store)):
            other = status.getPath()
            if other.getName().startswith(_PREFIX) and other.getName() != folder.getName():
                files.delete(other, _RECURSIVE)
    try:
        yield str(folder.toString())
    finally:
        with suppress(Py4JError, OSError):
            files.delete(folder, _RECURSIVE)


@contextmanager
def _translate_errors(spark: SparkSession, store: str) -> Iterator[None]:
    """Convert errors of Hadoop in the block to `CheckpointNotWritable` or `Unavailable`."""
    try:
        yield
    except IllegalArgumentException as error:
        raise CheckpointNotWritable(store, str(error).splitlines()[0]) from None
    except Py4JJavaError as error:
        cause = error.java_exception
        problem = str(cause.toString()).splitlines()[0]
        is_permanent = problem.partition(":")[0].endswith(_PERMANENT_ERRORS)
        if is_instance_of(spark.sparkContext._gateway, cause, "java.io.IOException") and not is_permanent:
            raise Unavailable("The store of the checkpoint", store, problem) from None
        raise CheckpointNotWritable(store, problem) from None
