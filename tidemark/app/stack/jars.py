"""The jars of the local broker and of the demo, fetched once with the Ivy of pyspark.

It needs neither Maven nor a Spark session. `ivy-broker.xml` and `ivy-demo.xml` in this folder pin every version.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from tidemark.common.errors import Stop

_STEP = re.compile(r"\tfound (\S+) in |downloading \S*/(\S+) \.\.\.")
# Ivy prints the reason at the end of a line about an address, or as `:: module: not found`.
_FAILURE = re.compile(r"\((java\.[^()]+)\)$|:: (\S+#\S+: not found)")

BROKER = "kafka"
JDBC = "jdbc"


@dataclass(frozen=True, slots=True)
class JarList:
    """A description for Ivy, and its configurations, each of which is a directory of jars."""

    description: Traversable
    configurations: tuple[str, ...]


SERVERS = JarList(files("tidemark.app.stack") / "ivy-broker.xml", (BROKER,))
DEMO = JarList(files("tidemark.app.stack") / "ivy-demo.xml", (JDBC,))


class JarsUnavailable(Stop):
    def __init__(self, problem: str, log: Path) -> None:
        super().__init__(
            f"the jars could not be fetched ({problem}): check the network and try again, which continues the download;"
            f" the whole output is in {log}"
        )


def fetch_jars(
    directory: Path,
    java: str,
    progress: Callable[[str], None],
    wanted: JarList = SERVERS,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Fetch the jars of `wanted` into directories below `directory`, unless they are there.

    May be repeated after any interruption. A second process waits for the first.

    Args:
        progress: called with the name of each jar, a few times a second.
        environment: of Ivy; None inherits the environment of this process.

    Raises:
        JarsUnavailable: the jars could not be fetched.
    """
    if _is_filled(directory, wanted):  # possibly by another user
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _fill(directory, java, progress, wanted, environment)


def _fill(
    directory: Path,
    java: str,
    progress: Callable[[str], None],
    wanted: JarList,
    environment: Mapping[str, str] | None,
) -> None:
    if _is_filled(directory, wanted):
        return
    text = wanted.description.read_bytes()
    description = directory / wanted.description.name
    marker = _marker(directory, wanted)
    marker.unlink(missing_ok=True)
    for stale in wanted.configurations:
        shutil.rmtree(directory / stale, ignore_errors=True)
    description.write_bytes(text)
    _retrieve(description, java, progress, environment)
    marker.write_text(hashlib.sha256(text).hexdigest())


def _is_filled(directory: Path, wanted: JarList) -> bool:
    marker = _marker(directory, wanted)
    hashed = hashlib.sha256(wanted.description.read_bytes()).hexdigest()
    return marker.exists() and marker.read_text() == hashed


def _marker(directory: Path, wanted: JarList) -> Path:
    """The file with the hash of the description, which exists once the directories of `wanted` are complete."""
    return (directory / wanted.description.name).with_suffix(".sha256")


def _retrieve(
    description: Path, java: str, progress: Callable[[str], None], environment: Mapping[str, str] | None
) -> None:
    directory = description.parent
    command = [java, "-jar", str(_ivy()), "-ivy", str(description), "-cache", str(directory / "cache")]
    command += ["-types", "jar", "bundle", "-retrieve", f"{directory}/[conf]/[artifact]-[revision].[ext]"]
    log = description.with_suffix(".log")
    problem = "no reason given"
    with (
        log.open("w") as record,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as ivy,
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
    """The jar of Ivy. pyspark is not imported, because that takes a second."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("jars/ivy-*.jar"))
