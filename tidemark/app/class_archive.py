"""A JVM that begins with archived classes: with them Spark's takes two thirds of the CPU to its first batch.

`python -m tidemark.app.archive_classes` makes one, once for each installation. What does not fit any more,
because Java or a jar was replaced, a JVM leaves alone.
"""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

DIRECTORY = Path(sys.prefix, "share", "tidemark")
"""Beside the installation whose classes these are, as Python's own compiled modules are."""

MAKER = [sys.executable, "-m", "tidemark.app.archive_classes"]
"""The program that makes that of a pipeline's JVM."""

# Of an archive that does not fit the JVM need not speak.
SILENT = ["-Xlog:disable", "-Xlog:all=error:stderr"]


def spark_archive(java: str, directory: Path = DIRECTORY) -> Path:
    """Where that of a pipeline's JVM is, or would be."""
    spark = find_spec("pyspark")
    jars = Path(spark.origin).with_name("jars") if spark is not None and spark.origin else directory
    return archive("spark", java, sorted(jars.glob("*.jar")), directory)


def archive(name: str, java: str, jars: Sequence[Path], directory: Path) -> Path:
    """`java` is the program, as `find_java` gives it. Another Java and other jars have another."""
    program = Path(java).resolve()
    release = program.parent.parent / "release"
    version = release.read_text() if release.is_file() else ""
    found = [(str(jar), jar.stat().st_size, int(jar.stat().st_mtime)) for jar in jars]
    sum_ = hashlib.sha256(repr((str(program), version, found)).encode()).hexdigest()[:16]
    return directory / f"{name}-{sum_}.jsa"


def options(archive: Path) -> list[str]:
    """For the JVM; none where the archive is not made."""
    return [f"-XX:SharedArchiveFile={archive}", *SILENT] if is_whole(archive) else []


def is_whole(archive: Path) -> bool:
    """Whether it is there as it was made. Of one that was cut since a JVM dies, where it leaves alone what does not fit
    otherwise."""
    try:
        return archive.stat().st_size == int(_size_of(archive).read_text())
    except (OSError, ValueError):
        return False


def _size_of(archive: Path) -> Path:
    """A file in which the size stands that the archive was made with."""
    return archive.with_suffix(".size")


def make(archive: Path, written: Callable[[Path, str], None]) -> None:
    """Have it `written` by a JVM that is given a directory of its own and one more option.

    Any number of processes may ask at once: one makes it. Raises OSError where nothing can be written there.
    """
    name = archive.stem.rpartition("-")[0]
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.with_name(f"{name}.lock").open("w") as lock, TemporaryDirectory() as directory:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_whole(archive):
            return
        made = Path(directory) / "made"
        written(Path(directory), f"-XX:ArchiveClassesAtExit={made}")
        for old in archive.parent.glob(f"{name}-*"):
            old.unlink()
        part = archive.with_suffix(".part")
        try:
            shutil.move(made, part)
            _size_of(archive).write_text(str(part.stat().st_size))
            part.rename(archive)
        finally:
            part.unlink(missing_ok=True)
