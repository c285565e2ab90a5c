"""constraints.txt: it pins every package, and the oldest supported Python can install each pin."""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT, succeeds

PINS = re.findall(r"^[^#\s]\S*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
OLDEST = "3.11.0"
WITHOUT_WHEELS = {"pyspark"}
"""Packages that PyPI has only as a source distribution. pip builds none for another Python."""


def test_every_package_is_pinned() -> None:
    """What `make setup` installs, also what only the oldest patch release of Python 3.11 needs."""
    environments = [{}, {"python_version": "3.11", "python_full_version": OLDEST}]
    needed: set[tuple[str, str]] = set()
    open_requirements = [("tidemark-streams", extra) for extra in ("local", "dev")]
    while open_requirements:
        package = open_requirements.pop()
        if package in needed:
            continue
        needed.add(package)
        try:
            requirements = [Requirement(text) for text in requires(package[0]) or ()]
        except PackageNotFoundError:  # another Python needs it
            continue
        for requirement in requirements:
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": package[1], **values}) for values in environments):
                continue
            open_requirements += [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]
    pinned = {canonicalize_name(pin.partition("==")[0]) for pin in PINS}
    assert {name for name, _ in needed} - pinned == {"tidemark-streams", "setuptools"}  # venv installs setuptools


@pytest.mark.registry
@pytest.mark.slow
def test_the_oldest_python_can_install_every_pin(tmp_path: Path) -> None:
    """Debian 12 has Python 3.11.2. A package may need a later patch release than `requires-python` promises."""
    assert f'>={OLDEST.rpartition(".")[0]}"' in (ROOT / "pyproject.toml").read_text()
    pins = tmp_path / "pins.txt"
    pins.write_text("\n".join(pin for pin in PINS if pin.partition("==")[0] not in WITHOUT_WHEELS))
    options = ["--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--target", tmp_path / "none"]
    oldest = ["--python-version", OLDEST, "--only-binary=:all:"]
    succeeds(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *oldest, "-r", pins)
