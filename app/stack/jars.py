"""The jars of Spark's Kafka source and of the local broker, fetched once by the Ivy that pyspark carries.

No Maven and no Spark session is needed. `ivy.xml` beside this file pins every version.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from tidemark.streaming.errors import Stop

_STEP = re.compile(r"\tfound (\S+) in |downloading \S*/(\S+) \.\.\.")
# Ivy's output holds the reason as the end of a line about one address, or as `:: module: not found`.
_FAILURE = re.compile(r"\((java\.[^()]+)\)$|:: (\S+#\S+: not found)")

CONNECTOR = "connector"
BROKER = "broker"


class JarsUnavailable(Stop):
    def __init__(self, problem: str, log: Path) -> None:
        super().__init__(
            f"the jars could not be fetched ({problem}): check the network and try again, it goes on where it stopped;"
            f" the whole output is in {log}"
        )


def fetch_jars(directory: Path, java: str, progress: Callable[[str], None]) -> None:
    """Fill `directory/connector` and `directory/broker`, unless they already hold what `ivy.xml` asks for.

    May be repeated after any interruption; a second process that asks meanwhile waits. `progress` is told what was
    found or is being downloaded, a few times a second. Raises `JarsUnavailable`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _fill(directory, java, progress)


def _fill(directory: Path, java: str, progress: Callable[[str], None]) -> None:
    ivy_xml = files("tidemark.app.stack").joinpath("ivy.xml").read_bytes()
    marker = directory / "ivy.sha256"
    wanted = hashlib.sha256(ivy_xml).hexdigest()
    if marker.exists() and marker.read_text() == wanted:
        return
    marker.unlink(missing_ok=True)
    for stale in (CONNECTOR, BROKER):
        shutil.rmtree(directory / stale, ignore_errors=True)
    description = directory / "ivy.xml"
    description.write_bytes(ivy_xml)
    _retrieve(description, java, progress)
    marker.write_text(wanted)


def _retrieve(description: Path, java: str, progress: Callable[[str], None]) -> None:
    directory = description.parent
    command = [java, "-jar", str(_ivy()), "-ivy", str(description), "-cache", str(directory / "cache")]
    command += ["-types", "jar", "bundle", "-retrieve", f"{directory}/[conf]/[artifact]-[revision].[ext]"]
    log = directory / "ivy.log"
    problem = "no reason given"
    with (
        log.open("w") as record,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ivy,
    ):
        assert ivy.stdout is not None
        for line in ivy.stdout:
            record.write(line)
            if step := _STEP.match(line):
                progress(step[1] or step[2])
            elif failure := _FAILURE.search(line):
                problem = failure[1] or failure[2]
    if ivy.returncode != 0:
        raise JarsUnavailable(problem, log)


def _ivy() -> Path:
    """Found without importing pyspark, which takes a second."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("jars/ivy-*.jar"))
