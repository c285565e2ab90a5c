"""Archives of loaded Java classes (class data sharing). With an archive, the pipeline's JVM needs a third less CPU time
until the first batch.

`python -m tidemark.app.pipeline.archive_classes` creates the archive, once for each installation. A JVM ignores an
archive of another Java or of other jars. Java 19 can create archives automatically (-XX:+AutoCreateSharedArchive), but
Java 17 cannot.
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

CREATE_COMMAND = [sys.executable, "-m", "tidemark.app.pipeline.archive_classes"]
"""The command that creates the archive of the pipeline's JVM."""

# Without these options, the JVM prints a warning about an archive that does not match.
NO_WARNINGS = ["-Xlog:disable", "-Xlog:all=error:stderr"]


def spark_archive_path(java: str, directory: Path = DIRECTORY) -> Path:
    """The path of the archive of the pipeline's JVM. The file may be missing."""
    spark = find_spec("pyspark")
    jars = Path(spark.origin).with_name("jars") if spark is not None and spark.origin else directory
    return archive_path("spark", java, sorted(jars.glob("*.jar")), directory)


def archive_path(name: str, java: str, jars: Sequence[Path], directory: Path) -> Path:
    """The path of an archive, which may be missing. Another version of Java and other jars have another path.

    Args:
        name: the beginning of the file name.
        java: the path of the program `java`.
        jars: the jars with the classes.
        directory: the folder of archives.
    """
    program = Path(java).resolve()
    release = program.parent.parent / "release"
    version = release.read_text() if release.is_file() else ""
    files = [(str(jar), jar.stat().st_size, int(jar.stat().st_mtime)) for jar in jars]
    digest = hashlib.sha256(repr((str(program), version, files)).encode()).hexdigest()[:16]
    return directory / f"{name}-{digest}.jsa"


def options(archive: Path) -> list[str]:
    """The options with which a JVM uses the archive; empty if the archive is missing or truncated."""
    return [f"-XX:SharedArchiveFile={archive}", *NO_WARNINGS] if is_complete(archive) else []


def is_complete(archive: Path) -> bool:
    """Whether the archive exists and has its original size. A truncated archive would crash the JVM."""
    try:
        return archive.stat().st_size == int(_size_path(archive).read_text())
    except (OSError, ValueError):
        return False


def _size_path(archive: Path) -> Path:
    """The path of the file that contains the original size of the archive, as text."""
    return archive.with_suffix(".size")


def create(archive: Path, run_jvm: Callable[[Path, str], None]) -> None:
    """Create the archive if it is missing or incomplete. Then also deletes the archives for other versions of Java or
    of the jars. Does nothing if the archive is complete.

    If several processes call this function at the same time, one process creates the archive, and the others wait.

    Args:
        archive: the path of the archive.
        run_jvm: called with a temporary directory and an additional option of the JVM. Runs a JVM until the JVM exits.

    Raises:
        OSError: the folder is not writable.
    """
    name = archive.stem.rpartition("-")[0]
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.with_name(f"{name}.lock").open("w") as lock, TemporaryDirectory() as directory:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(archive):
            return
        created = Path(directory) / "created"
        run_jvm(Path(directory), f"-XX:ArchiveClassesAtExit={created}")
        for old in archive.parent.glob(f"{name}-*"):
            old.unlink()
        part = archive.with_suffix(".part")
        try:
            shutil.move(created, part)
            _size_path(archive).write_text(str(part.stat().st_size))
            part.rename(archive)
        finally:
            part.unlink(missing_ok=True)
