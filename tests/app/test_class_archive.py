"""Archived classes: one for each installation, made once, and whole or not at all."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidemark.app.pipeline.class_archive import archive_path, create, options, spark_archive_path
from tidemark.common.environment import child_environment


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{name}.jar" for name in "ab"]
    for jar in made:
        jar.write_text(jar.name)
    return made


def writing(text: str, calls: list[str]) -> Callable[[Path, str], None]:
    def write(_: Path, option: str) -> None:
        calls.append(option)
        Path(option.partition("=")[2]).write_text(text)

    return write


def test_there_are_options_for_what_is_there(jars: list[Path], tmp_path: Path) -> None:
    """A start without an archive is slower and nothing else."""
    found = archive_path("spark", "java", jars, tmp_path / "share" / "tidemark")
    assert options(found) == []
    create(found, writing("classes", []))
    assert options(found)[0] == f"-XX:SharedArchiveFile={found}"


def test_other_jars_have_another_archive_which_replaces_the_old(jars: list[Path], tmp_path: Path) -> None:
    """That of an upgraded Spark; a broker's beside it stays."""
    calls: list[str] = []
    before, broker = (archive_path(name, "java", jars, tmp_path) for name in ("spark", "broker"))
    for each in (before, broker):
        create(each, writing("old", calls))
    jars[0].write_text("another version")
    after = archive_path("spark", "java", jars, tmp_path)
    create(after, writing("new", calls))
    assert sorted(tmp_path.glob("*.jsa")) == sorted([after, broker])
    assert after.read_text() == "new"


def test_many_who_ask_at_once_wait_for_one(jars: list[Path], tmp_path: Path) -> None:
    """As the workers of a test run do."""
    calls: list[str] = []
    found = archive_path("spark", "java", jars, tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: create(found, writing("classes", calls)), range(4)))
    assert len(calls) == 1


def test_what_was_not_written_to_its_end_is_no_archive(jars: list[Path], tmp_path: Path) -> None:
    """The next who asks makes it."""

    def interrupted(_: Path, option: str) -> None:
        Path(option.partition("=")[2]).write_text("half")
        raise SystemExit(143)

    assert options(tmp_path / ("where nobody may look" * 20)) == []
    found = archive_path("spark", "java", jars, tmp_path)
    with pytest.raises(SystemExit):
        create(found, interrupted)
    assert not list(tmp_path.glob("*.jsa"))
    create(found, writing("classes", []))
    assert found.read_text() == "classes"


@pytest.mark.parametrize("kept", [0, 3, None])
def test_what_was_cut_since_is_no_archive(jars: list[Path], tmp_path: Path, kept: int | None) -> None:
    """A JVM that was given one would die of it, and no pipeline would start."""
    found = archive_path("spark", "java", jars, tmp_path)
    create(found, writing("classes", []))
    if kept is None:
        found.unlink()
    else:
        os.truncate(found, kept)
    assert options(found) == []
    create(found, writing("classes", []))
    assert options(found)


def test_of_what_finds_no_room_nothing_is_left(
    jars: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the room that others need."""

    def fill(_: Path, part: Path) -> None:
        part.write_text("clas")
        raise OSError(errno.ENOSPC, "No space left on device")

    found = archive_path("spark", "java", jars, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.move", fill)
        with pytest.raises(OSError, match="No space left"):
            create(found, writing("classes", []))
    assert not list(tmp_path.glob("spark-*"))
    create(found, writing("classes", []))
    assert options(found)


@pytest.mark.usefixtures("warm_jvm")
def test_the_images_executors_begin_with_the_same_archive(java: str, tmp_path: Path) -> None:
    """Before what Spark's driver asks for, none of which is split."""
    (named_user := tmp_path / "named-user").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    named_user.chmod(0o755)
    asked = ["DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "APPLICATION_ID", "EXECUTOR_POD_IP", "RESOURCE_PROFILE_ID"]
    variables = {f"SPARK_{name}": "it" for name in [*asked, "EXECUTOR_POD_NAME"]} | {
        "SPARK_EXECUTOR_MEMORY": "1g",
        "SPARK_JAVA_OPT_0": "-Da=two words *",
        "SPARK_JAVA_OPT_1": "-Db",
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), str(Path(java).parent), os.defpath]),
    }
    script = Path(__file__).parents[2] / "helm/tools/executor"
    command = subprocess.run(
        ["sh", script], env=child_environment(variables), check=True, capture_output=True, text=True
    )
    ours = options(spark_archive_path(java))
    assert len(ours) == 3
    assert command.stdout.splitlines()[: len(ours) + 4] == ["java", *ours, "-Da=two words *", "-Db", "-Xms1g"]
