"""The competitors on the JVM, which tests/bench/java holds, built by Maven where there is one."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.competitors.task import CompetitorFailed

_SOURCES = Path(__file__).parents[1] / "java"
_LIBRARIES = ("kafka-streams", "fastjson2")
OPTIONS = "-XX:+UseParallelGC -Xmx1g"
THREADS = 2
_QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"

PROGRAMS: Mapping[str, Sequence[str]] = {
    "streams-rocksdb": ("OnKafkaStreams", "rocksdb"),
    "streams-heap": ("OnKafkaStreams", "heap"),
    "loop-java": ("PlainLoop",),
}
"""The class and its first arguments, by the competitor's name."""


@dataclass(frozen=True, slots=True)
class BuiltPrograms:
    """`java` is the program."""

    java: str
    classes: Path
    jars: Path

    def command(self, name: str) -> list[str]:
        return [
            self.java,
            *OPTIONS.split(),
            _QUIET,
            "-cp",
            f"{self.classes}:{self.jars}/*",
            *PROGRAMS[name],
            str(THREADS),
        ]

    def libraries(self) -> str:
        """Those that matter, with their versions."""
        found = (next(self.jars.glob(f"{name}-*.jar")).stem for name in _LIBRARIES)
        return ", ".join(" ".join(each.rsplit("-", 1)) for each in found)


def wanting() -> str | None:
    """What is not here and would be needed to build them."""
    return next((program for program in ("mvn", "javac") if shutil.which(program) is None), None)


def build(java: str, directory: Path) -> BuiltPrograms:
    """Built below `directory`, quickly where they were built there before. Raises `CompetitorFailed`."""
    shutil.rmtree(directory / "jars", ignore_errors=True)  # those of older versions
    command = ["mvn", "-q", "-B", "-f", str(_SOURCES / "pom.xml"), f"-Dbuilt={directory}"]
    done = subprocess.run(
        [*command, "compile", "dependency:copy-dependencies"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CompetitorFailed(f"Maven could not build tests/bench/java: {(done.stdout + done.stderr)[-2000:]}")
    return BuiltPrograms(java, directory / "classes", directory / "jars")
