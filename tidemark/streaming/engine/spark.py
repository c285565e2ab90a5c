"""The Spark session in its JVM (`streaming.engine.jvm`).

Each setting stands with its reason; figures without a source are in docs/explanation/benchmarks.md.
"""

import sys
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from py4j.java_gateway import JavaGateway
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tidemark.streaming.engine.executors import package
from tidemark.streaming.engine.jvm import DRIVER_OPTIONS, Jvm, is_local, local_directory

_HADOOP = "spark.hadoop."
_FILES = f"{_HADOOP}fs.file.impl"
TASKS = "spark.sql.shuffle.partitions"
"""Of the session: how many tasks there are after the shuffle."""
# The JVMs hand over, and the driver's plans as well: a few hundred milliseconds of a core a second at most. What their
# second compiler takes is not won back for hours. And they go through much code and memory for each batch, most of it
# once: where the system has large pages they find it a tenth quicker.
_JAVA = " ".join(
    ["-XX:TieredStopAtLevel=1", *(["-XX:+UseTransparentHugePages"] if sys.platform.startswith("linux") else [])]
)

# Where measured: docs/explanation/engine.md 3 and 4.
SETTINGS = {
    "spark.app.name": "tidemark",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The default writes the checkpoint through a checksumming file system with a hidden file beside each file; on a
    # local disk a plain rename is as atomic and takes a batch from 210 ms to 135 ms.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    _FILES: "org.apache.hadoop.fs.RawLocalFileSystem",
    # No query begins with a file of another (docs/design.md 5): a sum of each is not worth it.
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # Workers talk over a Unix socket instead of loopback TCP: 125 ms to 90 ms a batch.
    "spark.python.unix.domain.socket.enabled": "true",
    # Arrow data is handed to Python in pieces that stay in the processor's cache.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # Of packets, each of many facts, far fewer do.
    "spark.sql.execution.arrow.maxBytesPerBatch": "4m",
    # Effects and states are binary: nothing to gain from adapting a plan with one small shuffle.
    "spark.sql.adaptive.enabled": "false",
    # Packets are packed integers already; compressing them costs a batch more than writing the rest of them.
    "spark.shuffle.compress": "false",
    # An idle system runs no batch; what must happen then is done by threads of the driver.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Nor need Kafka be asked a hundred times a second then: three requests, 2 ms of a core in the JVM alone. Records
    # that come after a silence wait half of this on average; where there is always something to read nobody waits.
    "spark.sql.streaming.pollingDelay": "200ms",
    # Each of a batch's broadcasts, four of some KB, takes as much new memory as a block may have. With the 4 MiB of the
    # default these were most of the garbage.
    "spark.broadcast.blockSize": "256k",
    # Of jobs that have ended Spark keeps a thousand, in order, whether it has a page that shows them or not.
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    "spark.sql.ui.retainedExecutions": "10",
    # Old batches are of no use: each query begins from Postgres.
    "spark.sql.streaming.minBatchesToRetain": "10",
    # A query that fails is started again by the pipeline, which knows what may be retried.
    "spark.task.maxFailures": "1",
    # Stopping must not wait for ever for a batch that waits for a server: what it has is read again.
    "spark.sql.streaming.stopTimeout": "3s",
    "spark.sql.session.timeZone": "UTC",
    # Workers look for modules where they are installed, not in the folder that the pipeline was started in.
    "spark.executorEnv.PYTHONSAFEPATH": "1",
    DRIVER_OPTIONS: _JAVA,
    "spark.executor.extraJavaOptions": _JAVA,
    # A batch's arrays are as large as those of the batch before. A worker that gives their memory back asks for it page
    # by page again, which was a twelfth of what RUN records cost. Of glibc; other libraries do not know the names.
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

# Executors elsewhere get our modules after their daemon has started.
LOCAL = {
    "spark.python.daemon.module": "tidemark.streaming.engine.daemon",
    # It forks: no library may have started a thread by then.
    "spark.executorEnv.OPENBLAS_NUM_THREADS": "1",
    "spark.executorEnv.JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def _say_nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """`jars`: jar files that the checkpoint's store needs. `memory`: the driver's heap, in Spark's notation (`1g`).

    `tasks`: parallel tasks after the shuffle at most, fewer where a local master has fewer cores; fixed by the
    checkpoint once it exists. `options` are for the JVM. `extra` is in Spark's words and wins.
    """

    master: str
    memory: str
    jars: list[Path]
    tasks: int
    local_dir: Path
    options: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)


def start(settings: SparkSettings) -> SparkSession:
    """Start the JVM and the session; takes seconds. One per process."""
    conf = configuration(settings)
    return connect(Jvm(conf), conf)


def configuration(settings: SparkSettings) -> SparkConf:
    own = {
        "spark.master": settings.master,
        "spark.driver.memory": settings.memory,
        "spark.jars": ",".join(str(jar) for jar in settings.jars),
        TASKS: str(settings.tasks),
        "spark.local.dir": str(settings.local_dir),
    }
    local = LOCAL if is_local(settings.master) else {}
    conf = SparkConf(loadDefaults=False).setAll(list({**SETTINGS, **local, **own, **settings.extra}.items()))
    ours = " ".join(f'"{option}"' for option in settings.options)
    # Of two that say the same of a thing the JVM takes the last.
    return conf.set(DRIVER_OPTIONS, f"{ours} {conf.get(DRIVER_OPTIONS, '')}".strip())


def connect(jvm: Jvm, conf: SparkConf) -> SparkSession:
    """The session in a JVM that was started with `conf`."""
    local = is_local(conf.get("spark.master", ""))
    own_disk = local and conf.get(_FILES) == SETTINGS[_FILES]
    if own_disk:
        _write_without_processes(jvm.gateway)
    context = SparkContext(conf=conf, gateway=jvm.gateway)
    if own_disk:
        _leave_out_defaults(context, conf)
    # Its one client is the JVM: when that dies it would print a stack trace about it.
    context._accumulatorServer.handle_error = _say_nothing  # type: ignore[method-assign, assignment]
    session = SparkSession(context)
    if local:
        # The JVM knows how many cores the limits of a container leave us.
        tasks = min(int(conf.get(TASKS, "1")), context.defaultParallelism)
        session.conf.set(TASKS, tasks)
    else:
        context.addPyFile(str(package(local_directory(conf))))
    return session


def _write_without_processes(gateway: JavaGateway) -> None:
    """Hadoop runs `chmod` for each file that it makes, four a batch: 14 of some 90 ms of CPU.

    It keeps one object per file system: that for local files is put in the place of the one with which Spark has looked
    at its jars. Should it be lost again, only the processes are back.
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


def _leave_out_defaults(context: SparkContext, conf: SparkConf) -> None:
    """Spark writes Hadoop's configuration out anew for each batch: hundreds of settings of file systems, queues and
    services that are not used here, and a tenth of what the thread does that plans batches. Those alone are left that
    somebody has set.
    """
    hadoop = context._jsc.hadoopConfiguration()
    hadoop.clear()
    for name, value in conf.getAll():
        if name.startswith(_HADOOP):
            hadoop.set(name.removeprefix(_HADOOP), value)


def executors(session: SparkSession) -> frozenset[str]:
    """Addresses of the executors that have registered and live; not for a local master."""
    context = session.sparkContext._jsc.sc()
    driver = context.env().blockManager().blockManagerId().hostPort()
    return frozenset(context.getExecutorMemoryStatus().keySet().mkString(" ").split()) - {driver}
