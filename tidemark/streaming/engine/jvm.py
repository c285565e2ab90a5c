"""Spark's JVM as a child process: its environment, its output, and the cause of its end.

What the JVM and its Python workers write becomes lines of our log at `debug`: what fails a query reaches us as an
exception too.
"""

import os
import shlex
import sys
from collections import deque
from importlib.resources import as_file, files
from pathlib import Path
from subprocess import Popen
from threading import Thread

import pyspark
from py4j.java_gateway import JavaGateway
from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from tidemark.common.environment import LOCALE, Foreign, forget
from tidemark.common.errors import SparkDied
from tidemark.common.failure_cause import failure_cause, is_noise
from tidemark.common.log import get_logger
from tidemark.streaming.ingest.jit_loader import SLOW_DECODING

DRIVER_OPTIONS = "spark.driver.extraJavaOptions"

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

log = get_logger(__name__)

LINES = 50
"""Of the JVM's output that are kept, of its beginning and of its end: the cause of an end is among them."""
DRAIN_SECONDS = 5.0
_set_here: set[str] = set()
"""Variables that this module has set in this process: an earlier JVM's are not another Spark's."""


class Jvm:
    """Answers when this returns, after some seconds; ends by itself when our process ends, however that is.

    Raises SparkDied where it does not come up.
    """

    def __init__(self, conf: SparkConf) -> None:
        self._begin: list[str] = []
        self._lines: deque[str] = deque(maxlen=LINES)
        self._repeated: set[str] = set()
        reading, writing = os.pipe()
        relay = Thread(target=self._relay, args=(reading,), name="jvm-output", daemon=True)
        relay.start()
        with as_file(files("tidemark.streaming.engine").joinpath("log4j2.properties")) as logging:
            given = conf.get(DRIVER_OPTIONS, "")
            conf.set(DRIVER_OPTIONS, f'{given} "-Dlog4j2.configurationFile={logging}"'.strip())
            set_environment(conf)
            try:
                # A JVM that cannot begin says why on its standard output.
                output = {"stdout": writing, "stderr": writing}
                self.gateway: JavaGateway = launch_gateway(conf, output)  # type: ignore[no-untyped-call]
            except PySparkRuntimeError as error:
                os.close(writing)
                relay.join(DRAIN_SECONDS)
                raise SparkDied(f"it did not start: {self._cause()}") from error
            except BaseException:
                os.close(writing)
                raise
            os.close(writing)
        self._process: Popen[bytes] = self.gateway.proc

    def end(self) -> str | None:
        """How the JVM ended and what it said of the cause, in one line; None while it runs."""
        code = self._process.poll()
        return None if code is None else f"it ended with code {code}: {self._cause()}"

    def _cause(self) -> str:
        return failure_cause([*self._begin, *self._lines]) or "it wrote nothing"

    def _relay(self, descriptor: int) -> None:
        rest = b""
        while data := os.read(descriptor, 65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._note(line.decode(errors="replace").rstrip())
        if rest:
            self._note(rest.decode(errors="replace").rstrip())
        os.close(descriptor)

    def _note(self, line: str) -> None:
        """Log the line, and keep it if it may name the cause of an end: one of the first lines, or of the last."""
        log.debug("Spark says", line=line)
        _, mark, warning = line.partition(SLOW_DECODING)
        if mark and warning not in self._repeated:  # each new worker warns again
            self._repeated.add(warning)
            log.warning(f"{SLOW_DECODING}{warning}")
        if not is_noise(line):
            (self._begin if len(self._begin) < LINES else self._lines).append(line)


def set_environment(conf: SparkConf) -> None:
    """Set what the JVM and the processes that it starts need, and remove what is meant for another Spark.

    Spark runs from this installation of pyspark, with the settings of `conf` alone. Workers must run this interpreter:
    another would lack our packages. The JVM looks at it too, for the processes in which it looks sources of data up.
    """
    if ignored := [name for name in forget([Foreign.SPARK]) if name not in _set_here]:
        log.warning(
            "Ignored variables of another Spark; TIDEMARK_SPARK_CONF_FILE sets Spark up", variables=", ".join(ignored)
        )
    local = is_local(conf.get("spark.master", ""))
    ours = without_archives(local_directory(conf)) if local else sys.executable
    no_settings = local_directory(conf).absolute() / "conf"
    no_settings.mkdir(parents=True, exist_ok=True)
    variables = {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_CONF_DIR": str(no_settings),
        "PYSPARK_PYTHON": conf.get("spark.pyspark.python", ours),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    if local:  # it would look the host's own name up, and end if nobody knows that name
        variables["SPARK_LOCAL_HOSTNAME"] = "localhost"
    if os.environ.get("LC_ALL") in {"C", "POSIX"}:  # in which Java opens no file with a name beyond ASCII
        variables["LC_ALL"] = LOCALE
    os.environ.update(variables)
    _set_here.update(variables)


def local_directory(conf: SparkConf) -> Path:
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


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's own JVM."""
    return master.startswith("local")
