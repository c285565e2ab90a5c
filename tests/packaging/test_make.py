"""How make prepares .venv, with a Python that only pretends to install packages."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

PYTHON = r"""#!/bin/bash
# A Python of version @VERSION@, whose pip writes the options of each installation to `installed`.
case "$*" in
    -c*version_info\[:3\]*) echo @VERSION@ ;;
    -c*) ;;
    "-m venv --clear "*)
        [ ! -e venv-fails ] || { mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; touch "$4/no-pip"; exit 1; }
        rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"
        printf '#!/bin/bash\necho "tidemark $*, Python @VERSION@"\n' > "$4/bin/tidemark"; chmod +x "$4/bin/tidemark" ;;
    "-m pip --version") ;;
    "-m pip install "*)
        [ ! -e pip-fails ] || { echo "The conflict is caused by: pymdown-extensions"; exit 1; }
        echo "@VERSION@ ${@: -1}" >> installed ;;
    *) exit 64 ;;
esac
"""


class Checkout:
    """A folder with the Makefile, and Pythons of two versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        for name, version in (("python3", "3.11.2"), ("python3.12", "3.12.1")):
            program = folder / "programs" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(PYTHON.replace("@VERSION@", version))
            program.chmod(0o755)

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
        environment["PATH"] = f"{self.folder / 'programs'}:{environment['PATH']}"
        command = ["make", "--no-print-directory", *words]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    def installed(self) -> list[str]:
        """The version of Python and the extras of each installation since the last call."""
        path = self.folder / "installed"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def fails(self, what: str) -> None:
        (self.folder / f"{what}-fails").touch()

    def works(self, what: str) -> None:
        (self.folder / f"{what}-fails").unlink()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_users_install_only_what_they_need(checkout: Checkout) -> None:
    """`make run` and `make up` install the extra `local` once; `make setup` adds what tests need."""
    assert checkout.make("run").stdout.endswith("tidemark up --demo, Python 3.11.2\n")
    assert checkout.installed() == ["3.11.2 .[local]"]
    assert checkout.make("up").stdout == "tidemark up, Python 3.11.2\n"
    assert checkout.make("setup").returncode == 0
    assert checkout.installed() == ["3.11.2 .[local,dev]"]
    assert checkout.make("setup", "run").returncode == 0
    assert checkout.installed() == []


def test_another_python_makes_the_environment_again(checkout: Checkout) -> None:
    """A Python on the command line, of another version. Without it, the environment keeps its Python."""
    assert checkout.make("setup").returncode == 0
    checkout.installed()
    assert checkout.make("PYTHON=python3.12", "run").stdout.endswith("Python 3.12.1\n")
    assert checkout.installed() == ["3.12.1 .[local]"]
    for words in (["PYTHON=python3.12", "run"], ["run"]):
        assert checkout.make(*words).stdout == "tidemark up --demo, Python 3.12.1\n"
    assert checkout.make("setup").returncode == 0
    assert checkout.installed() == ["3.12.1 .[local,dev]"]


def test_a_python_that_does_not_exist_changes_nothing(checkout: Checkout) -> None:
    """make names what it needs, and keeps .venv."""
    assert checkout.make("run").returncode == 0
    failed = checkout.make("PYTHON=python3.99", "run")
    assert (failed.returncode, "Python 3.11 or newer is needed" in failed.stderr) == (2, True)
    assert checkout.make("run").stdout == "tidemark up --demo, Python 3.11.2\n"


def test_failed_installation_shows_the_reason_and_begins_again(checkout: Checkout) -> None:
    """The end of pip's output; the next call makes .venv again, with the Python that it names."""
    checkout.fails("pip")
    failed = checkout.make("run")
    assert failed.returncode == 2
    assert "The conflict is caused by: pymdown-extensions\nmake: pip could not install" in failed.stderr
    (checkout.folder / ".venv/left").touch()
    checkout.works("pip")
    assert checkout.make("PYTHON=python3.12", "run").stdout.endswith("Python 3.12.1\n")
    assert not (checkout.folder / ".venv/left").exists()


def test_an_environment_that_installed_once_is_kept(checkout: Checkout) -> None:
    """New pins that cannot be installed leave the environment of a developer in place."""
    assert checkout.make("setup").returncode == 0
    (checkout.folder / ".venv/left").touch()
    (checkout.folder / "constraints.txt").touch()
    checkout.fails("pip")
    assert checkout.make("setup").returncode == 2
    checkout.works("pip")
    assert checkout.make("setup").returncode == 0
    assert (checkout.folder / ".venv/left").exists()


def test_venv_that_cannot_be_made_leaves_nothing(checkout: Checkout) -> None:
    """Debian's Python without python3-venv makes a folder without pip. After its installation make succeeds."""
    checkout.fails("venv")
    failed = checkout.make("run")
    assert (failed.returncode, "apt-get install python3-venv" in failed.stderr) == (2, True)
    assert not (checkout.folder / ".venv").exists()
    checkout.works("venv")
    assert checkout.make("run").returncode == 0
