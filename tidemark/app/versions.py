"""Versions that may run together: pipeline and sidecar may differ by one minor version.

Also finds a Java that is recent enough.

A migration of the schema names the oldest code that it works with (`common.migrations`), and states have a format
(`streaming.core.codec`). The versions of processes are compared because a change of the keys in Redis needs no schema.
"""

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
    """Check the version of the `pipeline` whose data this process reads; "" is unknown. Raises `VersionSkew`."""
    if abs(_ahead(pipeline, ours)) > 1:
        raise VersionSkew(ours, pipeline)


def require_successor(last: str, ours: str = OURS) -> None:
    """Check that a pipeline may continue after version `last`: an earlier one, or the next. Raises `VersionSkew`."""
    if _ahead(last, ours) > 1:
        raise VersionSkew(ours, last)


def _ahead(theirs: str, ours: str) -> int:
    """The number of minor versions by which `theirs` is ahead; 1000 for each major version."""
    if not (older := _NUMBERS.match(theirs)) or not (other := _NUMBERS.match(ours)):
        return 0
    majors = int(older[1]) - int(other[1])
    return 1000 * majors if majors else int(older[2]) - int(other[2])


OLDEST = 17


class JavaUnfit(Stop):
    def __init__(self, problem: str) -> None:
        super().__init__(
            f"Java {OLDEST} or newer is needed and {problem}: install one (Debian, Ubuntu:"
            " `apt-get install openjdk-17-jre-headless`; macOS: `brew install openjdk@17`) or set JAVA_HOME"
        )


def find_java(java_home: Path | None) -> str:
    """The `java` program of `java_home`, or the first one on the PATH. Raises `JavaUnfit`."""
    program = str(java_home / "bin" / "java") if java_home else "java"
    path = shutil.which(program)
    if path is None:
        raise JavaUnfit(f"there is no {program}" if java_home else "there is none on the PATH")
    answer = subprocess.run([path, "-version"], env=server_environment(), capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    if version is None:
        raise JavaUnfit(f"`{path} -version` does not print a version")
    if int(version[1]) < OLDEST:
        raise JavaUnfit(f"{path} is Java {version[1]}")
    return path
