"""`make chart-test`, too: the root of the images, made on this machine (Debian or its like, as root)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helm.tools import ROOT, run

PROGRAM = """
import os, ssl, sqlite3, zoneinfo
assert ssl.create_default_context().cert_store_stats()["x509_ca"] > 100
assert os.getuid() == 1000650000
print(zoneinfo.ZoneInfo("Europe/Vienna"))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() or not Path("/var/lib/dpkg/status").exists():
        pytest.skip("chroot needs a user who may, and the base a Debian")
    target = tmp_path_factory.mktemp("root")
    environment = target / "opt/tidemark"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    run(sys.executable, ROOT / "helm/tools/root.py", target, environment, "sh", "cat")
    return target


def chrooted(root: Path, *command: str) -> str:
    """As a user whom nobody knows, which is what some platforms choose."""
    return run("chroot", "--userspec=1000650000:0", root, *command)


def test_python_has_all_that_it_loads(root: Path) -> None:
    """The system's certificates, time zones and shared libraries included."""
    assert chrooted(root, "/opt/tidemark/bin/python", "-c", PROGRAM) == "Europe/Vienna\n"


def test_named_programs_run_and_no_others_are_there(root: Path) -> None:
    """Where nobody installs anything there is nothing to install with."""
    assert chrooted(root, "/bin/sh", "-c", "cat /etc/debian_version")
    here = {path.name for folder in ("usr/bin", "usr/sbin", "usr/local/bin") for path in (root / folder).glob("*")}
    assert not {name for name in here if name.startswith(("apt", "dpkg", "perl", "pip"))}


def test_scanners_find_the_packages_and_people_their_licences(root: Path) -> None:
    """Every package of which a file came along, and none besides."""
    packages = {path.name for path in (root / "var/lib/dpkg/status.d").iterdir()}
    assert {"libc6", "dash", "coreutils"} <= packages
    assert "apt" not in packages
    assert all((root / "usr/share/doc" / package / "copyright").exists() for package in packages)


def test_library_that_is_not_there_is_told(tmp_path: Path) -> None:
    """At the build, and not when a pod first needs it."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc to make one with")
    own = tmp_path / "own"
    own.mkdir()
    away = tmp_path / "libaway.so"
    run("gcc", "-shared", "-o", away, "-xc", "-", given="int away(void) { return 0; }")
    calls = "int away(void); int main(void) { return away(); }"
    run("gcc", "-o", own / "program", "-xc", "-", f"-L{tmp_path}", "-laway", given=calls)
    command = [sys.executable, str(ROOT / "helm/tools/root.py"), str(tmp_path / "root"), str(own)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 1
    assert "own/program needs what is not here" in made.stderr
    assert "libaway.so" in made.stderr
