"""The Java that runs both Spark and Kafka."""

import re
import shutil
import subprocess
from pathlib import Path

from tidemark.common.environment import server_environment
from tidemark.common.errors import Stop

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
