"""Spark's JVM as a child process: its environment, its output, and the cause of its end.

Output of the JVM and of its Python workers is logged at `debug`. Errors of a query are also raised as exceptions.
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

from tidemark.common.environment import LOCALE, VariableGroup, failure_cause, is_noise, remove_foreign_variables
from tidemark.common.errors import SparkDied
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
"""The number of first and of last lines of the JVM's output that are stored. They contain the cause if the JVM ends."""
DRAIN_SECONDS = 5.0
_set_here: set[str] = set()
"""Variables that this module has set in this process for an earlier JVM."""


class Jvm:
    """A running JVM. The constructor takes seconds, and returns when the JVM answers. It ends when this process ends.

    Raises:
        SparkDied: the JVM does not start.
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
                # A JVM that cannot start writes the cause to its standard output.
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
        """The exit status of the JVM and the cause from its output, in one line; None while it runs."""
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
        """Log a line, and store it if it is one of the first or last lines, which may have the cause of an exit."""
        log.debug("Spark says", line=line)
        _, mark, warning = line.partition(SLOW_DECODING)
        if mark and warning not in self._repeated:  # each new worker repeats the warning
            self._repeated.add(warning)
            log.warning(f"{SLOW_DECODING}{warning}")
        if not is_noise(line):
            (self._begin if len(self._begin) < LINES else self._lines).append(line)


def set_environment(conf: SparkConf) -> None:
    """Set the environment of the JVM and its child processes, and remove variables of another Spark.

    Spark runs from this installation of pyspark, only with the settings of `conf`. Workers run this interpreter,
    because others may lack the required packages.
    """
    if ignored := [name for name in remove_foreign_variables([VariableGroup.SPARK]) if name not in _set_here]:
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
    if local:  # otherwise Spark would look up the host name, and fail if it is unknown
        variables["SPARK_LOCAL_HOSTNAME"] = "localhost"
    if os.environ.get("LC_ALL") in {"C", "POSIX"}:  # with these, Java cannot open files with non-ASCII names
        variables["LC_ALL"] = LOCALE
    os.environ.update(variables)
    _set_here.update(variables)


def local_directory(conf: SparkConf) -> Path:
    return Path(conf.get("spark.local.dir", "."))


def without_archives(directory: Path) -> str:
    """A command that runs this interpreter without the zip archives of pyspark in its path.

    Spark puts these archives before the installed pyspark. Each process would compile their modules again, for 0.7 s of
    CPU, and the planner of a data source must start within 10 s.

    Returns:
        The path of the command, or of the interpreter if files in `directory` cannot be executed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "python"
    part = program.with_suffix(f".{os.getpid()}")
    part.write_text(_PYTHON % shlex.quote(sys.executable))
    part.chmod(0o755)
    part.rename(program)
    return str(program.absolute()) if os.access(program, os.X_OK) else sys.executable


def is_local(master: str) -> bool:
    """Whether tasks run in the JVM of the driver."""
    return master.startswith("local")
