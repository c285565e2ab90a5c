"""Spark's JVM starts with classes that were archived: to the first batch it takes half the CPU, and lives for seconds.

    SPARK_SUBMIT_OPTS=-XX:ArchiveClassesAtExit=FILE python -m tests.jvm_classes DIRECTORY JAR...

does what a pipeline makes the JVM do, which writes down the classes that it loaded as it ends.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pyspark
from pyspark.sql import DataFrame, SparkSession

from tidemark.streaming import query
from tidemark.streaming.model import Bounds
from tidemark.streaming.spark import Jvm, SparkSettings, configuration, connect

# The JVM's second compiler takes more than it gives in a life of seconds; of an archive that does not fit, because a
# jar was replaced, it need not speak.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr"
BATCHES = 3


def options(directory: Path, java: str, connector: Path) -> str:
    """`SPARK_SUBMIT_OPTS` for a JVM of tests. The archive lies in `directory`, and is made by the first who asks.

    Any number of processes may ask at once.
    """
    connectors = sorted(connector.glob("*.jar"))
    jars = [*sorted((Path(pyspark.__file__).parent / "jars").iterdir()), *connectors]
    known = [subprocess.run([java, "-version"], capture_output=True, check=True).stderr, OPTIONS]
    known += [(str(jar), jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars]
    archive = directory / f"{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.jsa"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            for old in directory.glob("*.jsa"):
                old.unlink()
            _make(archive, connectors)
    return f"{OPTIONS} -XX:SharedArchiveFile={archive}"


def _make(archive: Path, jars: list[Path]) -> None:
    with TemporaryDirectory() as directory:
        made = Path(directory) / "made"
        subprocess.run(
            [sys.executable, "-m", "tests.jvm_classes", directory, *jars],
            env={**os.environ, "SPARK_SUBMIT_OPTS": f"{OPTIONS} -XX:ArchiveClassesAtExit={made}"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        shutil.move(made, archive)


def made_up(spark: SparkSession) -> DataFrame:
    """Records as of Spark's Kafka source, one a second; none of them means anything."""
    return (
        spark.readStream.format("rate")
        .load()
        .selectExpr(
            "'facts' as topic",
            "0 as partition",
            "value as offset",
            "timestamp",
            "cast('s' as binary) as key",
            "cast(value as binary) as value",
        )
    )


def run(spark: SparkSession, checkpoint: Path) -> None:
    """The pipeline's query, until it has done some batches."""
    enough = threading.Event()

    def publish(batch: DataFrame, number: int) -> None:
        query.collect(batch)
        if number >= BATCHES:
            enough.set()

    effects = query.positions(made_up(spark), facts="facts", control="control", shards=4, seeds={}, bounds=Bounds())
    running = effects.writeStream.foreachBatch(publish).option("checkpointLocation", str(checkpoint)).start()
    while not enough.wait(0.1):
        assert running.exception() is None, running.exception()
    running.stop()


def main(directory: Path, jars: list[Path]) -> None:
    conf = configuration(SparkSettings("local[*]", "512m", jars, 4, directory))
    jvm = Jvm(conf)
    spark = connect(jvm, conf)
    run(spark, directory / "checkpoint")
    spark.stop()
    process = jvm.gateway.proc
    process.stdin.close()  # which ends it
    process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(jar) for jar in sys.argv[2:]])
