"""Spark's JVM as a child process: its environment, its output, and the cause of its end.

Output of the JVM and of its Python workers is logged at `debug`. Errors of a query are raised as exceptions too.
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
"""Spark's setting with the options of the driver's JVM."""

_PYTHON_WRAPPER = """\
#!/bin/sh
set -f
IFS=:
paths=
for entry in $PYTHONPATH; do
    case $entry in */python/lib/py*.zip) ;; *) paths=$paths:$entry ;; esac
done
PYTHONPATH=${paths#:} exec %s "$@"
"""

log = get_logger(__name__)

STORED_LINES = 50
"""The number of first lines, and of last lines, of the JVM's output that are stored to find the cause of an exit."""
DRAIN_SECONDS = 5.0  # time limit for reading the rest of the output of a JVM that did not start
_own_variables: set[str] = set()
"""Variables that this module has set in this process for an earlier JVM."""


class Jvm:
    """A JVM, which ends at the latest with this process.

    The constructor starts the JVM, and blocks some seconds until the JVM answers. The constructor also adds an option
    to `conf`, and changes the environment of this process (`set_environment`).

    Args:
        conf: the settings of Spark; changed.

    Attributes:
        gateway: the connection to the JVM.

    Raises:
        SparkDied: the JVM does not start.
    """

    def __init__(self, conf: SparkConf) -> None:
        self._first_lines: list[str] = []
        self._last_lines: deque[str] = deque(maxlen=STORED_LINES)
        self._logged_warnings: set[str] = set()
        read_end, write_end = os.pipe()
        reader = Thread(target=self._read_output, args=(read_end,), name="jvm-output", daemon=True)
        reader.start()
        with as_file(files("tidemark.streaming.engine").joinpath("log4j2.properties")) as logging:
            options = conf.get(DRIVER_OPTIONS, "")
            conf.set(DRIVER_OPTIONS, f'{options} "-Dlog4j2.configurationFile={logging}"'.strip())
            set_environment(conf)
            try:
                # A JVM that cannot start writes the cause to its standard output.
                output = {"stdout": write_end, "stderr": write_end}
                self.gateway: JavaGateway = launch_gateway(conf, output)  # type: ignore[no-untyped-call]
            except PySparkRuntimeError as error:
                os.close(write_end)
                reader.join(DRAIN_SECONDS)
                raise SparkDied(f"it did not start: {self._cause()}") from error
            except BaseException:
                os.close(write_end)
                raise
            os.close(write_end)
        self._process: Popen[bytes] = self.gateway.proc

    def exit_cause(self) -> str | None:
        """The exit code of the JVM and the likely cause from its output, as one line; None while the JVM runs."""
        code = self._process.poll()
        return None if code is None else f"it ended with code {code}: {self._cause()}"

    def _cause(self) -> str:
        """The likely cause of an exit, from the stored output of the JVM."""
        return failure_cause([*self._first_lines, *self._last_lines]) or "it wrote nothing"

    def _read_output(self, descriptor: int) -> None:
        rest = b""
        while data := os.read(descriptor, 65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._handle_line(line.decode(errors="replace").rstrip())
        if rest:
            self._handle_line(rest.decode(errors="replace").rstrip())
        os.close(descriptor)

    def _handle_line(self, line: str) -> None:
        """Log a line of output, and store the line if it may name the cause of an exit."""
        log.debug("Output of Spark", line=line)
        _, mark, warning = line.partition(SLOW_DECODING)
        if mark and warning not in self._logged_warnings:  # each new worker repeats the warning
            self._logged_warnings.add(warning)
            log.warning(f"{SLOW_DECODING}{warning}")
        if not is_noise(line):
            (self._first_lines if len(self._first_lines) < STORED_LINES else self._last_lines).append(line)


def set_environment(conf: SparkConf) -> None:
    """Set the environment variables of Spark in this process, for the JVM and its child processes.

    Removes the variables of another Spark installation, and logs a warning if there are any. Then Spark runs from this
    installation of pyspark, with the settings of `conf` only. Workers run this Python interpreter, because another one
    may lack the required packages.
    """
    if ignored := [name for name in remove_foreign_variables([VariableGroup.SPARK]) if name not in _own_variables]:
        log.warning(
            "Ignored environment variables of another Spark installation. To configure Tidemark's Spark, set"
            " TIDEMARK_SPARK_CONF_FILE",
            variables=", ".join(ignored),
        )
    local = is_local(conf.get("spark.master", ""))
    interpreter = write_python_wrapper(local_directory(conf)) if local else sys.executable
    empty_directory = local_directory(conf).absolute() / "conf"
    empty_directory.mkdir(parents=True, exist_ok=True)
    variables = {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_CONF_DIR": str(empty_directory),
        "PYSPARK_PYTHON": conf.get("spark.pyspark.python", interpreter),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    if local:  # without this variable, Spark looks up the name of this host, and fails if the name is unknown
        variables["SPARK_LOCAL_HOSTNAME"] = "localhost"
    if os.environ.get("LC_ALL") in {"C", "POSIX"}:  # with these values, Java cannot open files with non-ASCII names
        variables["LC_ALL"] = LOCALE
    os.environ.update(variables)
    _own_variables.update(variables)


def local_directory(conf: SparkConf) -> Path:
    return Path(conf.get("spark.local.dir", "."))


def write_python_wrapper(directory: Path) -> str:
    """Write a command to `directory` that runs this interpreter without the zip archives of pyspark in `PYTHONPATH`.

    Spark puts the archives before the installed pyspark in the search path. Then each process would compile the modules
    of the archives again, which takes 0.7 s of CPU. The planner of a data source must start within 10 s.

    Returns:
        The path of the command. If files in `directory` cannot be executed, the path of the interpreter.
    """
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "python"
    temporary = program.with_suffix(f".{os.getpid()}")
    temporary.write_text(_PYTHON_WRAPPER % shlex.quote(sys.executable))
    temporary.chmod(0o755)
    temporary.rename(program)
    return str(program.absolute()) if os.access(program, os.X_OK) else sys.executable


def is_local(master: str) -> bool:
    """Whether `master` is a local master: tasks then run in the JVM of the driver."""
    return master.startswith("local")
