"""Starts Spark for the pipeline, and detects an exit of the JVM.

The JVM starts while the pipeline waits for servers and for the lease.
"""

import os
import re
import threading
from collections.abc import Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from tidemark.app.pipeline import class_archive
from tidemark.app.pipeline.preflight import QueryStart
from tidemark.app.settings import Settings
from tidemark.app.versions import find_java
from tidemark.common.environment import failure_cause
from tidemark.common.errors import BadSetting, QueryFailed, SparkDied, Stopping
from tidemark.sources.kafka import KafkaConnection
from tidemark.streaming.engine import checkpoint
from tidemark.streaming.engine.executors import Cluster, Pods, local_address_for
from tidemark.streaming.engine.jvm import Jvm, is_local
from tidemark.streaming.engine.query import shard_keys
from tidemark.streaming.engine.spark import TASKS_SETTING, SparkSettings, configuration, connect
from tidemark.streaming.ingest import source
from tidemark.streaming.ingest.compact import MAX_FACTS, NotStorableOffsets
from tidemark.streaming.ingest.source import LIGHT_RECORDS, KafkaConfig

SLOW_PYTHON_START = "a Python process of Spark did not start within 10 s; check whether this machine is overloaded"
"""The error text if Spark's time limit for the start of a Python process has passed. No setting changes this limit. The
error does not count as a failure of the query (`supervisor.counts_as_failure`)."""
_PYTHON_ERROR_PATTERN = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+(\S.*)")
_PROPERTY_PATTERN = re.compile(r"(?P<name>spark\.[^\s=:]+)(\s*[=:]\s*|\s+)(?P<value>.*)")


class Engine:
    """A Spark session that starts on a separate thread. Use `open_engine` to create one."""

    def __init__(self, spark_settings: SparkSettings) -> None:
        self._spark_settings = spark_settings
        self._jvm: Jvm | None = None
        self._session: Future[SparkSession] = Future()
        # A daemon thread, so that the process can exit before the JVM is up. The JVM ends with the process.
        threading.Thread(target=self._start, name="spark", daemon=True).start()

    def session(self, stopping: threading.Event) -> SparkSession:
        """Wait until Spark has started, and return the session.

        Raises:
            Stopping: `stopping` was set before Spark had started.
            SparkDied: Spark did not start, or the cluster has ended the session. Spark cannot start again in this
                process.
        """
        while not self._session.done():
            if stopping.wait(0.1):
                raise Stopping("the pipeline was stopped before Spark had started")
        spark = self._session.result()
        if spark.sparkContext._jsc.sc().isStopped():
            raise SparkDied("the Spark cluster has ended this application")
        return spark

    @contextmanager
    def detecting_exit(self) -> Iterator[None]:
        """If the block raises `Py4JError` or `OSError`, and the JVM has exited, raise `SparkDied` with the reason."""
        try:
            yield
        except (Py4JError, OSError) as error:
            if message := self._exit_message():
                raise SparkDied(message) from error
            raise

    def close(self) -> None:
        """Stop Spark, if Spark has started and the JVM still runs."""
        if self._session.done() and self._session.exception() is None and not self._exit_message():
            self._session.result().stop()

    def _exit_message(self) -> str | None:
        """The reason for the exit of the JVM; None if the JVM runs or was not started."""
        return self._jvm.exit_cause() if self._jvm is not None else None

    def _start(self) -> None:
        try:
            conf = configuration(self._spark_settings)
            self._jvm = Jvm(conf)
            self._session.set_result(connect(self._jvm, conf))
        except Py4JJavaError as error:  # settings that Spark refuses
            cause = failure_cause(str(error).splitlines()).removeprefix(": ")
            self._session.set_exception(SparkDied(f"it did not start: {cause}"))
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._session.set_exception(error)


def make_packets(
    spark: SparkSession,
    settings: Settings,
    kafka: KafkaConnection,
    start: QueryStart,
    first_max_records: int,
    too_many_records: int,
    not_storable: NotStorableOffsets,
    *,
    one_task: bool,
) -> DataFrame:
    """Make the DataFrame of the packets that the query reads.

    Args:
        spark: the session.
        settings: the settings of the pipeline.
        kafka: the connection to Kafka.
        start: the start of the query.
        first_max_records: the largest number of Kafka records in the first batch. Later batches may be larger.
        too_many_records: the number of records of an earlier batch that had too many facts; 0 if there was none.
        not_storable: records to reject, because Postgres refuses their effects.
        one_task: whether one task computes a batch. A batch then has at most `LIGHT_RECORDS` records.
    """
    limit = min(settings.max_records_per_batch, LIGHT_RECORDS) if one_task else settings.max_records_per_batch
    facts, control = settings.kafka_facts_topic, settings.kafka_control_topic
    config = KafkaConfig(
        client=kafka.portable_settings(),
        facts_topic=facts,
        control_topic=control,
        start_offsets=start.offsets,
        first_max_records=min(first_max_records, limit),
        max_records=limit,
        too_many_records=too_many_records,
        cpu_share=settings.batch_cpu_share,
        driver_pid=os.getpid(),
        shard_keys=shard_keys(settings.shards, int(spark.conf.get(TASKS_SETTING) or 1)),
        max_facts=MAX_FACTS,
        not_storable={
            topic: {number: [*offsets] for number, offsets in by.items()} for topic, by in not_storable.items()
        },
        one_task=one_task,
    )
    return source.packets(spark, config)


def require_executors(spark: SparkSession, required_addresses: Set[str], registered_addresses: Set[str]) -> None:
    """Cancel all jobs and raise `QueryFailed` if an executor in `required_addresses` is not in `registered_addresses`.

    A required executor has states of streams in memory. Without this check, Spark would run the tasks of an executor
    that has ended on executors that do not have the states.

    Args:
        spark: the session.
        required_addresses: the addresses of the executors with states.
        registered_addresses: the addresses of the registered executors.
    """
    if lost := required_addresses - registered_addresses:
        spark.sparkContext.cancelAllJobs()  # the running batch needs the lost states
        raise QueryFailed(f"a Spark executor ended, and its states were lost: {', '.join(sorted(lost))}")


def innermost_cause(text: str) -> str:
    """Find the cause in an error text of Spark: the last exception of Python, or else the innermost Java exception.

    Returns `SLOW_PYTHON_START` if a Python process did not start in time. Returns the first line if the text has no
    exception.
    """
    if "Python worker failed to connect back" in text:
        return SLOW_PYTHON_START
    if raised := _PYTHON_ERROR_PATTERN.findall(text):
        return str(raised[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by:")]
    return (causes or lines[:1] or ["Spark gave no cause"])[-1].removeprefix("Caused by:").strip()


@contextmanager
def open_engine(settings: Settings) -> Iterator[Engine]:
    """Start Spark on another thread, and stop Spark at the end of the block. `Engine.session` waits for the start.
    Raises `Stop` if Java is missing, or a setting is wrong."""
    java = find_java(settings.java_home)
    cluster = None if is_local(settings.spark_master) else _cluster(settings)
    spark_settings = SparkSettings(
        # Spark's `local` uses only one core.
        master="local[*]" if settings.spark_master == "local" else settings.spark_master,
        memory=settings.spark_driver_memory,
        jars=_jars(settings.spark_jars),
        task_count=settings.shards if cluster is None else min(settings.shards, cluster.slots),
        local_dir=settings.home / "spark",
        jvm_options=class_archive.options(class_archive.spark_archive_path(java)),
        extra_settings=_extra_properties(settings, cluster),
    )
    engine = Engine(spark_settings)
    try:
        yield engine
    finally:
        engine.close()


def _cluster(settings: Settings) -> Cluster:
    """The configuration of a cluster. Does not connect to the master.

    Raises:
        BadSetting: `spark_driver_host` is not set, and the host name of the master is unknown or has no route.
    """
    return Cluster(
        driver_host=settings.spark_driver_host or _own_address(settings.spark_master),
        executor_count=settings.spark_executors,
        max_executors=settings.spark_executors_max,
        has_store=settings.checkpoint_store is not None,
        cores_per_executor=settings.spark_executor_cores,
        memory=settings.spark_executor_memory,
        driver_port=settings.spark_driver_port,
        block_manager_port=settings.spark_block_manager_port,
        pods=Pods(
            image=settings.spark_kubernetes_image,
            namespace=settings.spark_kubernetes_namespace,
            service_account=settings.spark_kubernetes_service_account,
            template=settings.spark_kubernetes_executor_template,
            driver_pod=settings.spark_kubernetes_driver_pod,
        ),
    )


def _jars(directory: Path | None) -> list[Path]:
    """The jar files in the folder, sorted; empty if `directory` is None. Raises `BadSetting` if the folder has none."""
    jars = [] if directory is None else sorted(directory.glob("*.jar"))
    if directory is not None and not jars:
        raise BadSetting("TIDEMARK_SPARK_JARS", f"{directory} contains no jar file")
    return jars


def _own_address(master: str) -> str:
    """The address of this machine from which packets to the master are sent. Raises `BadSetting` if there is none."""
    try:
        return local_address_for(master)
    except (OSError, ValueError) as error:
        raise BadSetting(
            "TIDEMARK_SPARK_MASTER",
            f"no route to {master}: {error}; correct the address, or set TIDEMARK_SPARK_DRIVER_HOST",
        ) from None


def _extra_properties(settings: Settings, cluster: Cluster | None) -> dict[str, str]:
    """The Spark properties that only some installations need. The properties in `spark_conf_file` override the
    others."""
    extra = {} if cluster is None else cluster.settings()
    if settings.checkpoint_store is not None:
        extra |= checkpoint.STORE_SETTINGS
    if settings.spark_executor_python is not None:
        extra["spark.pyspark.python"] = settings.spark_executor_python
    if settings.spark_conf_file is not None:
        extra |= read_properties(settings.spark_conf_file)
    return extra


def read_properties(path: Path) -> dict[str, str]:
    """Read a file such as `spark-defaults.conf`, as Spark does: name -> value. Each line has a name that begins with
    `spark.` and a value, separated by white space, `=` or `:`. Raises `BadSetting` if the file cannot be read, or a
    line is wrong.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise BadSetting("TIDEMARK_SPARK_CONF_FILE", f"cannot read {path}: {error.strerror}") from None
    values = {}
    for number, line in enumerate(lines, start=1):
        if line and not line.startswith("#"):
            match = _PROPERTY_PATTERN.fullmatch(line)
            if match is None:
                raise BadSetting(
                    "TIDEMARK_SPARK_CONF_FILE",
                    f"{path}, line {number}: expected a name that begins with spark. and a value, such as"
                    f" spark.executor.memory 2g, but found {line!r}",
                )
            values[match["name"]] = match["value"]
    return values
