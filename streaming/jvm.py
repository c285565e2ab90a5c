"""Spark's JVM as a child process. What it and its Python workers write to stderr becomes lines of our log.

They are logged at `debug`: what fails a query reaches us as an exception anyway, and tells it better.
"""

import os
from collections import deque
from importlib.resources import as_file, files
from subprocess import Popen
from threading import Thread

import structlog
from py4j.java_gateway import JavaGateway
from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from tidemark.streaming.errors import SparkDied

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
            given = conf.get("spark.driver.extraJavaOptions", "")
            conf.set("spark.driver.extraJavaOptions", f'{given} "-Dlog4j2.configurationFile={logging}"'.strip())
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
