"""The Spark session, and its JVM as a child process.

Each setting stands with its reason; figures without a source are in docs/benchmarks.md. What the JVM and its Python
workers write to stderr becomes lines of our log at `debug`: what fails a query reaches us as an exception too.
"""

import os
import shlex
import sys
from collections import deque
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from subprocess import Popen
from threading import Thread
from typing import Any

import structlog
from py4j.java_gateway import JavaGateway
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from tidemark.streaming.errors import SparkDied
from tidemark.streaming.executors import package

_HADOOP = "spark.hadoop."
_FILES = f"{_HADOOP}fs.file.impl"
_OPTIONS = "spark.driver.extraJavaOptions"
TASKS = "spark.sql.shuffle.partitions"
"""Of the session: how many tasks there are after the shuffle."""
# The JVMs hand over, and the driver's plans as well: a few hundred milliseconds of a core a second at most. What their
# second compiler takes is not won back for hours. And they go through much code and memory for each batch, most of it
# once: where the system has large pages they find it a tenth quicker.
_JAVA = " ".join(
    ["-XX:TieredStopAtLevel=1", *(["-XX:+UseTransparentHugePages"] if sys.platform.startswith("linux") else [])]
)

# Where measured: docs/engine.md 3 and 4.
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
    _OPTIONS: _JAVA,
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
    "spark.python.daemon.module": "tidemark.streaming.daemon",
    # It forks: no library may have started a thread by then.
    "spark.executorEnv.OPENBLAS_NUM_THREADS": "1",
    "spark.executorEnv.JE_ARROW_MALLOC_CONF": "background_thread:false",
}


_PYTHON = """\
#!/bin/sh
set -f
IFS=:
kept=
for place in $PYTHONPATH; do
    case $place in */python/lib/py*.zip) ;; *) kept=$kept:$place ;; esac
done
PYTHONPATH=${kept#:} exec %s "$@"
"""


def _say_nothing(*_: object) -> None:
    pass


log = structlog.get_logger(__name__)


class Jvm:
    """Answers when this returns, after some seconds; ends by itself when our process ends, however that is.

    Raises SparkDied where it does not come up.
    """

    def __init__(self, conf: SparkConf) -> None:
        self._lines: deque[str] = deque(maxlen=5)
        reading, writing = os.pipe()
        relay = Thread(target=self._relay, args=(reading,), name="jvm-stderr", daemon=True)
        relay.start()
        with as_file(files("tidemark.streaming").joinpath("log4j2.properties")) as logging:
            given = conf.get(_OPTIONS, "")
            conf.set(_OPTIONS, f'{given} "-Dlog4j2.configurationFile={logging}"'.strip())
            _set_environment(conf)
            try:
                self.gateway: JavaGateway = launch_gateway(conf, {"stderr": writing})  # type: ignore[no-untyped-call]
            except PySparkRuntimeError as error:
                raise SparkDied(f"it did not start ({' / '.join(self._lines)})") from error
            finally:
                os.close(writing)
        self._process: Popen[bytes] = self.gateway.proc

    def end(self) -> str | None:
        """How it ended and what it said last, in one line; None while it runs."""
        code = self._process.poll()
        return None if code is None else f"it ended with code {code} ({' / '.join(self._lines)})"

    def _relay(self, descriptor: int) -> None:
        rest = b""
        while data := os.read(descriptor, 65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                log.debug("Spark says", line=text)
        os.close(descriptor)


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
    return conf.set(_OPTIONS, f"{ours} {conf.get(_OPTIONS, '')}".strip())


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
        context.addPyFile(str(package(_directory(conf))))
    return session


def _set_environment(conf: SparkConf) -> None:
    """The JVM's, which is that of the processes that it starts.

    Workers must run this interpreter: another would lack our packages. The JVM looks at it too, for the processes in
    which it looks sources of data up.
    """
    local = is_local(conf.get("spark.master", ""))
    ours = without_archives(_directory(conf)) if local else sys.executable
    os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", ours)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if local:  # it would look the host's own name up, and end where nobody knows that
        os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")


def _directory(conf: SparkConf) -> Path:
    return Path(conf.get("spark.local.dir", "."))


def without_archives(directory: Path) -> str:
    """This interpreter as a command that leaves out the archives of pyspark, which Spark puts before the installed one:
    modules of an archive are compiled by every process anew, two thirds of a second of a core. To what plans a source
    in Python Spark gives ten seconds to begin, at each start of a query. The interpreter itself where nothing in
    `directory` may be executed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "python"
    part = program.with_suffix(f".{os.getpid()}")
    part.write_text(_PYTHON % shlex.quote(sys.executable))
    part.chmod(0o755)
    part.rename(program)
    return str(program.absolute()) if os.access(program, os.X_OK) else sys.executable


def _write_without_processes(gateway: JavaGateway) -> None:
    """Hadoop runs `chmod` for each file that it makes, four a batch: 14 of some 90 ms of CPU.

    It keeps one object per file system: that for local files is put in the place of the one with which Spark has looked
    at its jars. Should it be lost again, only the processes are back.
    """
    java: Any = gateway.jvm
    compiler = java.org.codehaus.janino.SimpleCompiler()
    compiler.cook(files("tidemark.streaming").joinpath("LocalFiles.java").read_text())
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


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's own JVM."""
    return master.startswith("local")
