"""Class data sharing: with an archive of loaded classes, a JVM needs two thirds of the CPU until its first batch.

`python -m tidemark.app.pipeline.archive_classes` creates the archive, once for each installation. A JVM ignores an
archive that does not match its Java and its jars. Java 19 could create archives automatically
(-XX:+AutoCreateSharedArchive); Java 17 cannot.
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
"""The folder of archives, in the same installation as the classes."""

MAKER = [sys.executable, "-m", "tidemark.app.pipeline.archive_classes"]
"""The command that makes the archive of a pipeline's JVM."""

# The JVM must not print a warning about an archive that does not match.
SILENT = ["-Xlog:disable", "-Xlog:all=error:stderr"]


def spark_archive(java: str, directory: Path = DIRECTORY) -> Path:
    """The path of the archive of a pipeline's JVM. The file may be missing."""
    spark = find_spec("pyspark")
    jars = Path(spark.origin).with_name("jars") if spark is not None and spark.origin else directory
    return archive("spark", java, sorted(jars.glob("*.jar")), directory)


def archive(name: str, java: str, jars: Sequence[Path], directory: Path) -> Path:
    """The path of an archive, which depends on the program `java` and on the jars."""
    program = Path(java).resolve()
    release = program.parent.parent / "release"
    version = release.read_text() if release.is_file() else ""
    files = [(str(jar), jar.stat().st_size, int(jar.stat().st_mtime)) for jar in jars]
    sum_ = hashlib.sha256(repr((str(program), version, files)).encode()).hexdigest()[:16]
    return directory / f"{name}-{sum_}.jsa"


def options(archive: Path) -> list[str]:
    """Options for the JVM; empty if the archive does not exist."""
    return [f"-XX:SharedArchiveFile={archive}", *SILENT] if is_whole(archive) else []


def is_whole(archive: Path) -> bool:
    """Whether the archive exists and has its original size. A truncated archive would make a JVM crash."""
    try:
        return archive.stat().st_size == int(_size_of(archive).read_text())
    except (OSError, ValueError):
        return False


def _size_of(archive: Path) -> Path:
    """The file with the original size of the archive."""
    return archive.with_suffix(".size")


def make(archive: Path, write: Callable[[Path, str], None]) -> None:
    """Make the archive, unless it exists. Several processes may call this at once; one of them makes the archive.

    Args:
        write: runs a JVM with its own directory and an additional option.

    Raises:
        OSError: the folder is not writable.
    """
    name = archive.stem.rpartition("-")[0]
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.with_name(f"{name}.lock").open("w") as lock, TemporaryDirectory() as directory:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_whole(archive):
            return
        made = Path(directory) / "made"
        write(Path(directory), f"-XX:ArchiveClassesAtExit={made}")
        for old in archive.parent.glob(f"{name}-*"):
            old.unlink()
        part = archive.with_suffix(".part")
        try:
            shutil.move(made, part)
            _size_of(archive).write_text(str(part.stat().st_size))
            part.rename(archive)
        finally:
            part.unlink(missing_ok=True)
