"""Where Tidemark's files are if nobody says where."""

import errno
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from tidemark.common.environment import default_home, is_trusted, temporary_home


@pytest.fixture(autouse=True)
def _temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def test_it_is_in_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether or not that is there already, and without HOME if the list of users names it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".cache" / "tidemark"
    monkeypatch.delenv("HOME")
    entry = pwd.struct_passwd(("me", "x", os.getuid(), 0, "", str(tmp_path / "listed"), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
    assert default_home() == tmp_path / "listed" / ".cache" / "tidemark"


def test_a_user_without_home_has_a_directory_among_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A random user ID in a container has no entry in the list of users."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert default_home() == temporary_home() == tmp_path / "temporary" / f"tidemark-{os.getuid()}"


def test_a_home_that_cannot_be_written_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as that of a service, or one on a read-only file system."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert default_home() == temporary_home()
    (tmp_path / "file").touch()
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert default_home().name == f"tidemark-{os.getuid()}"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_a_home_in_which_even_root_can_create_nothing_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rights of /proc allow root to write, its file system does not."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("HOME", "/proc")
    assert default_home() == temporary_home()


def test_a_home_on_a_full_disk_is_still_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program that writes there then reports the full disk, instead of starting somewhere else without its data."""

    def full(**options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert default_home() == tmp_path / ".cache" / "tidemark"


def test_a_directory_that_somebody_else_made_among_temporary_files_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its `stack.env` could lead to the servers of that user. A home elsewhere was chosen by ours."""
    temporary_home().mkdir(parents=True)
    assert is_trusted(temporary_home())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not is_trusted(temporary_home())
    assert is_trusted(tmp_path)
