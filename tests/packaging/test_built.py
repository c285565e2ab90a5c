"""The wheel and the source distribution, and what the image is made of, without anything installed."""

import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import COPIED, DOCKERFILE, ROOT, VERSION, build, copy_of_the_tree, succeeds
from tests.shadows import ROOMS


def test_wheel_puts_one_name_into_site_packages(wheel: Path) -> None:
    """`tidemark`, and what pip knows of it. Below it is every file of the rooms, and the marker of types."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"tidemark", f"tidemark_streams-{VERSION}.dist-info"}
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tidemark").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if name.startswith("tidemark/")} == expected
    assert {"tidemark/__init__.py", "tidemark/__main__.py", "tidemark/errors.py", "tidemark/py.typed"} <= expected
    assert all(any(name.startswith(f"tidemark/{room}/") for name in expected) for room in ROOMS)


@pytest.mark.builds
def test_source_distribution_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """It holds no links, so any archive program can unpack it, and installs as the checkout does."""
    with tarfile.open(build(ROOT, "sdist", tmp_path)) as packed:
        assert all(member.isfile() or member.isdir() for member in packed)
        if hasattr(tarfile, "data_filter"):  # not in Python 3.11.0 to 3.11.3
            packed.extraction_filter = tarfile.data_filter
        packed.extractall(tmp_path)
    tree = tmp_path / f"tidemark_streams-{VERSION}"
    assert build(tree, "wheel", tmp_path).read_bytes() == wheel.read_bytes()


def test_image_is_made_of_what_its_dockerfile_copies(wheel: Path, tmp_path: Path) -> None:
    """The copied files alone build the same wheel; the link to a folder that was forgotten would lead nowhere."""
    admitted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all(any(source == name or source.startswith(f"{name}/") for name in admitted) for source in COPIED)
    tree = copy_of_the_tree(tmp_path / "tree")
    assert build(tree, "wheel", tmp_path).read_bytes() == wheel.read_bytes()


def test_image_has_the_libraries_of_every_role_but_the_local_stack() -> None:
    """The layer below our code holds what the extras name, as pyproject.toml has it; the small image no pipeline."""
    small, whole = (words.split() for words in re.findall(r"python3 requirements (.+?) >runtime.txt", DOCKERFILE))
    assert set(whole) - set(small) == {"pipeline", "otel"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    roles = [requirement for role in whole for requirement in extras[role]]
    assert set(whole) == {"relay", "reader", "pipeline", "sidecar", "otel"}
    required = succeeds(sys.executable, ROOT / "helm/tools/requirements", *whole).split("\n")
    assert set(required) == {*project["dependencies"], *roles, ""}
    (installed,) = re.findall(r"^ +'\.\[(.*)\]'$", (ROOT / "helm/tools/sbom").read_text(), re.MULTILINE)
    assert set(installed.split(",")) == set(whole)
    assert extras["local"][0] == f"tidemark-streams[{installed.removesuffix(',otel')}]"


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "tests/helm/servers/Dockerfile"])
def test_paths_that_dockerfiles_name_in_the_package_are_there(dockerfile: str, wheel: Path) -> None:
    """The list of jars, where an image takes it from the package or the checkout."""
    names = zipfile.ZipFile(wheel).namelist()
    text = (ROOT / dockerfile).read_text()
    for path in re.findall(r"site-packages/(tidemark/[^\s)]+)", text):
        assert path in names
    assert not re.search(rf"site-packages/({'|'.join(ROOMS)})/", text)


def test_image_holds_what_a_start_would_otherwise_make(wheel: Path) -> None:
    """The JVM's classes, archived, and what scans records, compiled."""
    made = re.findall(r"python -m (tidemark\.\S+)", DOCKERFILE)
    assert made == ["tidemark.app.pipeline.archive_classes", "tidemark.app.pipeline.compile_ahead"]
    assert {f"{name.replace('.', '/')}.py" for name in made} <= {*zipfile.ZipFile(wheel).namelist()}
