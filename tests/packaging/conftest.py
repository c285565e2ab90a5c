"""What users install: the wheel and the source distribution of this tree, and environments that hold nothing else.

pip takes the other packages from where `make setup` took them, in the same versions.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.shadows import ROOMS, shadowed

ROOT = Path(__file__).parents[2]
VERSION = version("tidemark-streams")
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
COPIED = dict.fromkeys(
    source
    for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    for source in shlex.split(re.sub(r"--\S+ ", "", words))[:-1]
)
"""What the images are built from."""

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def succeeds(*command: object, cwd: Path = ROOT) -> str:
    """What a command prints; fails with all that it said."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(tree: Path, kind: str, directory: Path) -> Path:
    """Build the `wheel`, the `sdist` or the `wheel:editable` of a tree, as any front end has it built."""
    said = succeeds(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", directory, cwd=tree)
    return tree / said.splitlines()[-1]


def copy_of_the_tree(place: Path) -> Path:
    """The files that the image is built from, links as links, and nothing else."""
    for source in COPIED:
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, place / source, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        else:
            (place / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, place / source)
    return place


@dataclass(frozen=True)
class Environment:
    """A virtual environment, without pip."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin/python"

    def install(self, *requirements: object) -> None:
        options = ["--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt"]
        succeeds(*_PIP, "--python", self.python, "install", *options, *requirements)

    def with_also(self, root: Path, *requirements: object) -> "Environment":
        """A copy in which more is installed. In it `bin/tidemark` is still the original's."""
        shutil.copytree(self.root, root, symlinks=True)
        copied = Environment(root)
        copied.install(*requirements)
        return copied

    def finds(self, modules: Sequence[str], cwd: Path) -> list[str]:
        """Those of the modules that its Python would import, run in this place."""
        program = f"from importlib.util import find_spec; print(*filter(find_spec, {modules!r}))"
        return self.run(self.python, "-c", program, cwd=cwd).stdout.split()

    def run(self, *words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program in a place of the caller's, with nothing of this process's environment that Python heeds."""
        ours = ("PYTHON", "TIDEMARK_", "VIRTUAL_ENV")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return subprocess.run(
            [*map(str, words)],
            cwd=cwd,
            env={**clean, "TIDEMARK_HOME": str(cwd), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "base_install" in getattr(item, "fixturenames", ()):
            item.add_marker("registry")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def base_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install tidemark-streams[writer]`, which is the base."""
    root = tmp_path_factory.mktemp("base")
    succeeds(sys.executable, "-m", "venv", "--without-pip", root)
    environment = Environment(root)
    environment.install(f"{wheel}[writer]")
    return environment


@pytest.fixture(scope="session")
def reader_install(base_install: Environment, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return base_install.with_also(tmp_path_factory.mktemp("reader") / "environment", f"{wheel}[reader]")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's folder, with modules that are called like our rooms."""
    return shadowed(tmp_path, ROOMS)
