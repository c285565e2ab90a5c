"""A checkpoint that driver and executors share: in an object store, or wherever else Spark's JVM finds a URI.

A folder there serves one query alone (docs/decisions/0009-store.md), so only Spark reads it, and what a driver that was
killed left behind is deleted by the next.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession

from tidemark.streaming.errors import CheckpointNotWritable, Unavailable

SETTINGS = {
    # What a dead executor leaves undone another does: it finds the states.
    "spark.task.maxFailures": "4",
    # `session` has the raw one for the checkpoint's sake; S3A wants Hadoop's own for its buffers.
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
