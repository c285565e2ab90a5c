"""JVMs of tests begin with archived classes: Spark's takes half the CPU to its first batch, a broker two thirds.

    SPARK_SUBMIT_OPTS=-XX:ArchiveClassesAtExit=FILE python -m tests.jvm_classes DIRECTORY

does what a pipeline makes the JVM do, which writes down the classes that it loaded as it ends.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from tidemark.app.stack.home import Home
from tidemark.app.stack.server import free_port
from tidemark.app.stack.servers import KafkaServer
from tidemark.streaming import query
from tidemark.streaming.compact import MOST_FACTS, compact
from tidemark.streaming.kafka_source import KafkaConfig, PacketReader, PacketSource
from tidemark.streaming.model import Bounds
from tidemark.streaming.spark import Jvm, SparkSettings, configuration, connect

# Of an archive that does not fit, because a jar was replaced, the JVM need not speak.
SILENT = ["-Xlog:disable", "-Xlog:all=error:stderr"]
# Its second compiler takes more than it gives in a life of seconds.
SHORT_LIVED = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
BATCHES = 1


class Archives:
    """In `directory`; each is made by the first who asks for it. Any number of processes may ask at once."""

    def __init__(self, directory: Path, java: str) -> None:
        self._directory = directory
        self._java = java

    def spark(self) -> str:
        """`SPARK_SUBMIT_OPTS`."""

        def make(directory: Path, writing: str) -> None:
            environment = {**os.environ, "SPARK_SUBMIT_OPTS": " ".join([*SHORT_LIVED, *SILENT, writing])}
            command = [sys.executable, "-m", "tests.jvm_classes", str(directory)]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

        jars = sorted((Path(pyspark.__file__).parent / "jars").iterdir())
        return " ".join([*SHORT_LIVED, *self._options("spark", jars, make)])

    def broker(self, jars: Path) -> list[str]:
        """Options of `java`."""

        def make(directory: Path, writing: str) -> None:
            home, port = Home(directory), free_port()
            KafkaServer(home, port, java=self._java, jars=jars).prepare()  # a JVM of its own, with other classes
            broker = ArchivedKafka(home, port, java=self._java, jars=jars, options=[*SILENT, writing])
            broker.start()
            broker.stop(60)

        return self._options("broker", sorted(jars.iterdir()), make)

    def _options(self, name: str, jars: Sequence[Path], make: Callable[[Path, str], None]) -> list[str]:
        version = subprocess.run([self._java, "-version"], capture_output=True, check=True).stderr
        found = [(str(jar), jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars]
        archive = self._directory / f"{name}-{hashlib.sha256(repr((version, found)).encode()).hexdigest()[:16]}.jsa"
        with (self._directory / f"{name}.lock").open("w") as lock, TemporaryDirectory() as directory:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not archive.exists():
                for old in self._directory.glob(f"{name}-*.jsa"):
                    old.unlink()
                made = Path(directory) / "made"
                make(Path(directory), f"-XX:ArchiveClassesAtExit={made}")
                shutil.move(made, archive)
        return [f"-XX:SharedArchiveFile={archive}", *SILENT]


class ArchivedKafka(KafkaServer):
    """A broker whose JVM gets more options."""

    def __init__(self, home: Home, port: int, *, java: str, jars: Path, options: Sequence[str]) -> None:
        super().__init__(home, port, java=java, jars=jars)
        self._options = options

    def _jvm(self) -> list[str]:
        java, *rest = super()._jvm()
        return [java, *self._options, *rest]


class Made(PacketReader):
    """Of one partition, which has a record more whenever it is asked for; none of them is there."""

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        return {topic: {number: at + 1 for number, at in of.items()} for topic, of in start.items()}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ranges = [(it, iter(())) for it in partition.ranges]  # type: ignore[attr-defined]
        return compact(ranges, shards=4, names=self._config.names, most=MOST_FACTS)


class MadeUp(PacketSource):
    def streamReader(self, schema: StructType) -> Made:
        return Made(CONFIG)


CONFIG = KafkaConfig({}, "facts", "control", {"facts": {0: 0}, "control": {}}, 1, 1, 4, MOST_FACTS)


def run(spark: SparkSession, checkpoint: Path) -> None:
    """The pipeline's query, until it has done some batches."""
    enough = threading.Event()

    def publish(batch: DataFrame, number: int) -> None:
        query.collect(batch)
        if number >= BATCHES:
            enough.set()

    spark.dataSource.register(MadeUp)
    packets = spark.readStream.format(MadeUp.name()).load()
    effects = query.positions(packets, seeds={}, bounds=Bounds())
    running = effects.writeStream.foreachBatch(publish).option("checkpointLocation", str(checkpoint)).start()
    while not enough.wait(0.1):
        assert running.exception() is None, running.exception()
    running.stop()


def main(directory: Path) -> None:
    conf = configuration(SparkSettings("local[*]", "512m", [], 4, directory))
    jvm = Jvm(conf)
    spark = connect(jvm, conf)
    run(spark, directory / "checkpoint")
    spark.stop()
    process = jvm.gateway.proc
    process.stdin.close()  # which ends it
    process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
