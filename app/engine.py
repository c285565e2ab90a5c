"""Spark for the pipeline: its JVM warms up while servers and the lease are waited for, and its death is noticed."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from app.settings import Settings
from app.stack.java import find_java
from streaming import session
from streaming.errors import BadSetting, SparkDied, Stopping
from streaming.jvm import Jvm


class Engine:
    """Starts at once, on a thread of its own. Use it through `running`."""

    def __init__(self, wanted: session.SparkSettings) -> None:
        self._wanted = wanted
        self._jvm: Jvm | None = None
        self._session: Future[SparkSession] = Future()
        # A daemon: who ends before the JVM is up need not wait for it, because it ends with our process.
        threading.Thread(target=self._start, name="spark", daemon=True).start()

    def session(self, stopping: threading.Event) -> SparkSession:
        """Wait for the session. Raises Stopping soon after `stopping` is set, and SparkDied."""
        while not self._session.done():
            if stopping.wait(0.1):
                raise Stopping("told to stop while Spark started")
        return self._session.result()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """What fails inside because there is no JVM any more raises SparkDied."""
        try:
            yield
        except (Py4JError, OSError) as error:
            if end := self._end():
                raise SparkDied(end) from error
            raise

    def close(self) -> None:
        """End the session, if there is one."""
        if self._session.done() and self._session.exception() is None and not self._end():
            self._session.result().stop()

    def _end(self) -> str | None:
        return self._jvm.end() if self._jvm is not None else None

    def _start(self) -> None:
        try:
            conf = session.configuration(self._wanted)
            self._jvm = Jvm(conf)
            self._session.set_result(session.connect(self._jvm, conf))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is for the thread that waits
            self._session.set_exception(error)


@contextmanager
def running(settings: Settings) -> Iterator[Engine]:
    """Spark for as long as this is entered. Raises Stop where there is no Java, or no connector to Kafka."""
    find_java(settings.java_home)
    local = settings.spark_master.startswith("local")
    wanted = session.SparkSettings(
        master=settings.spark_master,
        memory=settings.spark_driver_memory,
        jars=sorted(settings.spark_jars.glob("*.jar")),
        tasks=min(settings.shards, os.cpu_count() or 1) if local else settings.shards,
        local_dir=settings.home / "spark",
    )
    if not wanted.jars:
        raise BadSetting("TIDEMARK_SPARK_JARS", f"no jar of Spark's Kafka connector in {settings.spark_jars}")
    engine = Engine(wanted)
    try:
        yield engine
    finally:
        engine.close()
