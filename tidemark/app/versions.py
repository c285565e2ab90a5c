"""Which versions may run side by side: pipeline, sidecar and schema differ by one minor version at most.

The schema says itself what works with it (`common.migrations`); states carry a format (`streaming.core.codec`).
Here it is the versions of the processes, as a change of what stands in Redis needs no schema."""

import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from tidemark.common.environment import server_environment
from tidemark.common.errors import Stop, VersionSkew

OURS = version("tidemark-streams")
_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def require_neighbour(pipeline: str, ours: str = OURS) -> None:
    """For a process that reads what `pipeline` publishes; "" is unknown. Raises `VersionSkew`."""
    if abs(_ahead(pipeline, ours)) > 1:
        raise VersionSkew(ours, pipeline)


def require_successor(last: str, ours: str = OURS) -> None:
    """For a pipeline that goes on where `last` ended: any earlier one, or the next. Raises `VersionSkew`."""
    if _ahead(last, ours) > 1:
        raise VersionSkew(ours, last)


def _ahead(theirs: str, ours: str) -> int:
    """By how many minor versions; of another major version, by more than any may."""
    if not (one := _NUMBERS.match(theirs)) or not (other := _NUMBERS.match(ours)):
        return 0
    majors = int(one[1]) - int(other[1])
    return 1000 * majors if majors else int(one[2]) - int(other[2])


OLDEST = 17


class JavaUnfit(Stop):
    def __init__(self, problem: str) -> None:
        super().__init__(
            f"Java {OLDEST} or newer is needed and {problem}: install one (Debian, Ubuntu:"
            " `apt-get install openjdk-17-jre-headless`; macOS: `brew install openjdk@17`) or set JAVA_HOME"
        )


def find_java(java_home: Path | None) -> str:
    """The `java` program, of `java_home` where that is set, else the first on the PATH; raises `JavaUnfit`."""
    program = str(java_home / "bin" / "java") if java_home else "java"
    found = shutil.which(program)
    if found is None:
        raise JavaUnfit(f"there is no {program}" if java_home else "there is none on the PATH")
    answer = subprocess.run([found, "-version"], env=server_environment(), capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    if version is None:
        raise JavaUnfit(f"`{found} -version` does not say its version")
    if int(version[1]) < OLDEST:
        raise JavaUnfit(f"{found} is Java {version[1]}")
    return found
