"""Services in Go, Java and Node. Their libraries come from where each language has them: `make languages-test`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.services.programs import HERE, places_orders
from tests.services.shop import Shop
from tidemark.app.settings import Settings


@pytest.fixture(scope="session")
def kept() -> Path:
    """Where downloads stay for the next time."""
    return Settings().home / "languages"


@pytest.fixture(scope="session")
def go(kept: Path) -> Path:
    program = kept / "go" / "orders"
    places = {"GOMODCACHE": str(kept / "go" / "modules"), "GOCACHE": str(kept / "go" / "built")}
    _fetched(["go", "build", "-modcacherw", "-mod=readonly", "-o", str(program)], HERE / "go", places)
    return program


@pytest.fixture(scope="session")
def npm(kept: Path) -> Path:
    directory = kept / "node"
    shutil.copytree(HERE / "node", directory, dirs_exist_ok=True)
    _fetched(["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline", "--cache", str(kept / "npm")], directory, {})
    return directory


@pytest.fixture(scope="session")
def javac(tmp_path_factory: pytest.TempPathFactory, jdbc: Path) -> str:
    """The class path of the compiled program."""
    classes = tmp_path_factory.mktemp("classes")
    _fetched(["javac", "-d", str(classes), str(HERE / "java" / "Orders.java")], classes, {})
    return f"{classes}:{jdbc}/*"


def _fetched(command: list[str], directory: Path, changes: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=directory, env={**os.environ, **changes}, timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_a_program_in_go_commits_is_told(shop: Shop, go: Path) -> None:
    """By pgx."""
    places_orders(shop, [go])


def test_what_a_program_in_java_commits_is_told(shop: Shop, java: str, javac: str) -> None:
    """By JDBC."""
    places_orders(shop, [java, "-cp", javac, "Orders"])


def test_what_a_program_in_node_commits_is_told(shop: Shop, npm: Path) -> None:
    """By pg."""
    places_orders(shop, ["node", npm / "orders.mjs"])
