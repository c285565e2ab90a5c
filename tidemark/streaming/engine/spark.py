"""The Spark session in its JVM (`streaming.engine.jvm`).

Comments give the reasons for the settings. If a comment names no document for a measurement, the measurement is from
docs/explanation/benchmarks.md.
"""

import os
import re
import sys
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from py4j.java_gateway import JavaGateway
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tidemark.streaming.engine.executors import write_code_archive
from tidemark.streaming.engine.jvm import DRIVER_OPTIONS, Jvm, is_local, local_directory

_HADOOP = "spark.hadoop."
_LOCAL_FILE_SYSTEM = f"{_HADOOP}fs.file.impl"
TASKS_SETTING = "spark.sql.shuffle.partitions"
"""Spark's setting of the number of tasks after the shuffle."""
# The JVMs only plan and copy data, with a few hundred milliseconds of CPU per second. The second compiler (C2) would
# save less CPU in hours than it takes. Large pages make a batch 10 % faster, because a batch uses much memory, each
# page once.
_JVM_OPTIONS = " ".join(
    ["-XX:TieredStopAtLevel=1", *(["-XX:+UseTransparentHugePages"] if sys.platform.startswith("linux") else [])]
)
# The driver's garbage collector. Java's default, G1, takes at least 10 % more of the JVM's CPU for RUN records. The
# parallel collector fills its whole initial heap before it collects, so the initial heap is small.
_COLLECTOR_OPTIONS = "-XX:+UseParallelGC -XX:InitialRAMPercentage=0.5"
_COLLECTOR_PATTERN = re.compile(r"-XX:\+Use\w*GC\b")
_JVM_VARIABLES = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")  # a JVM adds their options to its own

# Measurements: docs/explanation/engine.md 2 and 3.
SETTINGS = {
    "spark.app.name": "tidemark",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # By default, Spark writes the checkpoint through a file system with checksums, which adds a hidden file to each
    # file. On a local disk, a plain rename is as atomic, and reduces a batch from 210 ms to 135 ms.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    _LOCAL_FILE_SYSTEM: "org.apache.hadoop.fs.RawLocalFileSystem",
    # No query reads files of another query (docs/design.md 5), so checksums are not worth their cost.
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # Workers use a Unix socket instead of loopback TCP, which reduces a batch from 125 ms to 90 ms.
    "spark.python.unix.domain.socket.enabled": "true",
    # Arrow data in pieces that fit into the processor's cache.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # Packets are large, so limit the bytes too.
    "spark.sql.execution.arrow.maxBytesPerBatch": "4m",
    # Adaptive execution has no benefit for a plan with one small shuffle of binary columns.
    "spark.sql.adaptive.enabled": "false",
    # Packets are packed integers: compressing them costs more than writing them.
    "spark.shuffle.compress": "false",
    # An idle query runs no batches, because threads of the driver do the maintenance.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # By default an idle query polls Kafka 100 times a second, and each poll takes 2 ms of CPU in the JVM. With this
    # value, the first records after an idle time wait 100 ms on average. Under steady traffic there is no delay.
    "spark.sql.streaming.pollingDelay": "200ms",
    # A batch has four broadcasts of a few KB, and each allocates a whole block. With the default of 4 MiB, these blocks
    # were most of the garbage.
    "spark.broadcast.blockSize": "256k",
    # Spark keeps a thousand finished jobs by default, even without a page that shows them.
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    "spark.sql.ui.retainedExecutions": "10",
    # Old batches are not needed: each query begins from Postgres.
    "spark.sql.streaming.minBatchesToRetain": "10",
    # Spark retries no task. The pipeline starts a failed query again, if the error may be retried.
    "spark.task.maxFailures": "1",
    # A batch that is blocked by a server must not delay the stop of a query: its records are read again.
    "spark.sql.streaming.stopTimeout": "3s",
    "spark.sql.session.timeZone": "UTC",
    # Workers import installed modules, not modules in the working directory of the pipeline.
    "spark.executorEnv.PYTHONSAFEPATH": "1",
    DRIVER_OPTIONS: _JVM_OPTIONS,
    "spark.executor.extraJavaOptions": _JVM_OPTIONS,
    # A worker keeps its memory, because the arrays of all batches have similar sizes. With the defaults, page faults
    # took 8 % of the CPU time for RUN records. Only glibc reads these variables.
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

# For a local master only: executors elsewhere get Tidemark's modules only after their daemon has started.
LOCAL_SETTINGS = {
    "spark.python.daemon.module": "tidemark.streaming.engine.daemon",
    # The daemon forks, so no library may start threads before the fork.
    "spark.executorEnv.OPENBLAS_NUM_THREADS": "1",
    "spark.executorEnv.JE_ARROW_MALLOC_CONF": "background_thread:false",
    # By default, Spark hashes all rows and blocks of a shuffle, to detect a repeated task that gives other rows. A
    # local master repeats no task. For RUN records, the hashes took 15 % of the JVM's CPU.
    "spark.shuffle.checksum.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enableQueryLevelRollbackOnMismatch": "false",
}


def _ignore_error(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """The settings with which to start Spark.

    Attributes:
        master: Spark's master, such as `local[2]` or `spark://host:7077`.
        memory: the driver's Java heap, in Spark's notation (`1g`).
        jars: jar files for the checkpoint's store.
        task_count: the number of tasks after the shuffle. A local master with fewer cores uses the number of its cores.
        local_dir: the directory for Spark's temporary files.
        jvm_options: options of the driver's JVM. The same options of this module or of `extra_settings` override them.
        extra_settings: further Spark settings, which override all others.
    """

    master: str
    memory: str
    jars: list[Path]
    task_count: int
    local_dir: Path
    jvm_options: list[str] = field(default_factory=list)
    extra_settings: dict[str, str] = field(default_factory=dict)


def start(settings: SparkSettings) -> SparkSession:
    """Start the JVM and the session, which takes seconds. A process can have only one session at a time.

    Raises:
        SparkDied: the JVM does not start.
    """
    conf = configuration(settings)
    return connect(Jvm(conf), conf)


def configuration(settings: SparkSettings) -> SparkConf:
    """All settings of Spark: the settings of this module, replaced or completed by `settings`."""
    values = {
        "spark.master": settings.master,
        "spark.driver.memory": settings.memory,
        "spark.jars": ",".join(str(jar) for jar in settings.jars),
        TASKS_SETTING: str(settings.task_count),
        "spark.local.dir": str(settings.local_dir),
    }
    local = LOCAL_SETTINGS if is_local(settings.master) else {}
    conf = SparkConf(loadDefaults=False).setAll(
        list({**SETTINGS, **local, **values, **settings.extra_settings}.items())
    )
    options, given = [f'"{option}"' for option in settings.jvm_options], conf.get(DRIVER_OPTIONS, "")
    # A JVM with two collectors does not start. If another option is given twice, the JVM uses the last.
    if not any(_COLLECTOR_PATTERN.search(text) for text in (given, *map(os.environ.get, _JVM_VARIABLES)) if text):
        options.append(_COLLECTOR_OPTIONS)
    return conf.set(DRIVER_OPTIONS, " ".join([*options, given]).strip())


def connect(jvm: Jvm, conf: SparkConf) -> SparkSession:
    """Start the session in a JVM that was started with `conf`. Sends Tidemark's code to executors elsewhere, if any."""
    local = is_local(conf.get("spark.master", ""))
    has_local_checkpoint = local and conf.get(_LOCAL_FILE_SYSTEM) == SETTINGS[_LOCAL_FILE_SYSTEM]
    if has_local_checkpoint:
        _replace_file_system(jvm.gateway)
    context = SparkContext(conf=conf, gateway=jvm.gateway)
    if has_local_checkpoint:
        _remove_default_settings(context, conf)
    # The JVM is the only client of this server. Without this line, the server prints a stack trace if the JVM dies.
    context._accumulatorServer.handle_error = _ignore_error  # type: ignore[method-assign, assignment]
    session = SparkSession(context)
    if local:
        set_tasks(session, one_task=False)
    else:
        context.addPyFile(str(write_code_archive(local_directory(conf))))
    return session


def set_tasks(session: SparkSession, *, one_task: bool) -> None:
    """Set the number of tasks after the shuffle for later queries. For a local master only.

    Args:
        one_task: True for one task. False for `SparkSettings.task_count` tasks, or one per core if there are fewer
            cores.
    """
    context = session.sparkContext
    # The JVM's `defaultParallelism` respects the CPU limit of the container.
    tasks = min(int(context.getConf().get(TASKS_SETTING, "1")), context.defaultParallelism)
    session.conf.set(TASKS_SETTING, 1 if one_task else tasks)


def _replace_file_system(gateway: JavaGateway) -> None:
    """Replace Hadoop's local file system by `LocalFiles.java`.

    Hadoop's own class starts a `chmod` process for each file, which takes 14 ms of the 90 ms of CPU of a batch. Hadoop
    caches one object for each file system, and Spark has already created the object to read the jars. So this function
    closes that object, and creates an object of the new class.
    """
    java: Any = gateway.jvm
    compiler = java.org.codehaus.janino.SimpleCompiler()
    compiler.cook(files("tidemark.streaming.engine").joinpath("LocalFiles.java").read_text())
    conf = java.org.apache.hadoop.conf.Configuration()
    conf.setClassLoader(compiler.getClassLoader())
    conf.set("fs.file.impl", "tidemark.LocalFiles")
    local = java.java.net.URI("file:///")
    java.org.apache.hadoop.fs.FileSystem.get(local, conf).close()
    java.org.apache.hadoop.fs.FileSystem.get(local, conf)


def _remove_default_settings(context: SparkContext, conf: SparkConf) -> None:
    """Remove Hadoop's default settings. Only the settings `spark.hadoop.*` of `conf` remain.

    Spark serialises all settings for each batch. With the defaults, this takes 10 % of the time to plan a batch.
    """
    hadoop = context._jsc.hadoopConfiguration()
    hadoop.clear()
    for name, value in conf.getAll():
        if name.startswith(_HADOOP):
            hadoop.set(name.removeprefix(_HADOOP), value)


def executor_addresses(session: SparkSession) -> frozenset[str]:
    """The addresses (`host:port`) of the registered executors that are alive. Not for a local master."""
    context = session.sparkContext._jsc.sc()
    driver = context.env().blockManager().blockManagerId().hostPort()
    return frozenset(context.getExecutorMemoryStatus().keySet().mkString(" ").split()) - {driver}
