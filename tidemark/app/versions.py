"""Checks which versions of Tidemark may run together, and finds the Java program.

The pipeline and a process that reads its data may differ by one minor version.

The schema has its own version check (`common.migrations`), and so have encoded states (`streaming.core.codec`). The
versions of processes are compared because the keys in Redis have no version.
"""

import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from tidemark.common.environment import server_environment
from tidemark.common.errors import Stop, VersionSkew

OURS = version("tidemark-streams")
_VERSION_PATTERN = re.compile(r"(\d+)\.(\d+)")


def require_compatible(pipeline: str, ours: str = OURS) -> None:
    """Raise `VersionSkew` if this process may not read the data of a pipeline of version `pipeline`, because the
    versions differ by more than one minor version. A version without a number, such as "", passes."""
    if abs(_minor_versions_ahead(pipeline, ours)) > 1:
        raise VersionSkew(ours, pipeline)


def require_successor(last_version: str, ours: str = OURS) -> None:
    """Raise `VersionSkew` if a pipeline of this version may not continue after a pipeline of version `last_version`,
    because `last_version` is more than one minor version newer. A version without a number, such as "", passes."""
    if _minor_versions_ahead(last_version, ours) > 1:
        raise VersionSkew(ours, last_version)


def _minor_versions_ahead(theirs: str, ours: str) -> int:
    """The number of minor versions by which `theirs` is newer than `ours`; negative if `theirs` is older. 0 if one of
    the versions has no number. A major version counts as 1000 minor versions."""
    if not (their_numbers := _VERSION_PATTERN.match(theirs)) or not (our_numbers := _VERSION_PATTERN.match(ours)):
        return 0
    majors = int(their_numbers[1]) - int(our_numbers[1])
    return 1000 * majors if majors else int(their_numbers[2]) - int(our_numbers[2])


MIN_JAVA = 17


class JavaUnfit(Stop):
    def __init__(self, problem: str) -> None:
        super().__init__(
            f"Tidemark needs Java {MIN_JAVA} or newer, but {problem}: install Java (Debian, Ubuntu:"
            " `apt-get install openjdk-17-jre-headless`; macOS: `brew install openjdk@17`) or set JAVA_HOME"
        )


def find_java(java_home: Path | None) -> str:
    """Find the `java` program of `java_home`; None: the first `java` on the PATH. Runs the program to check its
    version. Raises `JavaUnfit` if Java is missing or too old."""
    program = str(java_home / "bin" / "java") if java_home else "java"
    path = shutil.which(program)
    if path is None:
        raise JavaUnfit(f"there is no {program}" if java_home else "there is no java on the PATH")
    answer = subprocess.run([path, "-version"], env=server_environment(), capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    if version is None:
        raise JavaUnfit(f"`{path} -version` does not print a version")
    if int(version[1]) < MIN_JAVA:
        raise JavaUnfit(f"{path} is Java {version[1]}")
    return path
