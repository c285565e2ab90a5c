"""One shop for the programs of a module, and the compiled programs. Downloads stay in TIDEMARK_HOME."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.services.programs import HERE
from tests.services.shop import Shop, opened
from tidemark.app.settings import load
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer

_numbers = count(1)


@pytest.fixture(scope="module")
def shop(postgres: PostgresServer, kafka: KafkaServer) -> Iterator[Shop]:
    name = f"shop_{next(_numbers)}"
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with opened(postgres.dsn(name), kafka, f"{name}.facts") as shop:
        yield shop
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def downloads() -> Path:
    return load().home / "languages"


@pytest.fixture(scope="session")
def go(downloads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the compiled programs, each with the name of its package."""
    programs = tmp_path_factory.mktemp("go")
    caches = {"GOMODCACHE": str(downloads / "go" / "modules"), "GOCACHE": str(downloads / "go" / "built")}
    _fetched(["go", "mod", "download"], HERE / "go", caches)
    _built(["go", "build", "-modcacherw", "-mod=readonly", "-o", str(programs), "./..."], HERE / "go", caches)
    return programs


@pytest.fixture(scope="session")
def npm(downloads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the programs, with their packages."""
    directory = tmp_path_factory.mktemp("node")
    shutil.copytree(HERE / "node", directory, dirs_exist_ok=True)
    cache = ["--no-audit", "--no-fund", "--prefer-offline", "--cache", str(downloads / "npm")]
    _fetched(["npm", "ci", *cache], directory, {})
    return directory


@pytest.fixture(scope="session")
def javac(tmp_path_factory: pytest.TempPathFactory, jdbc: Path) -> str:
    """The class path of the compiled programs."""
    classes = tmp_path_factory.mktemp("classes")
    sources = [str(path) for path in sorted((HERE / "java").glob("*.java"))]
    _built(["javac", "-cp", f"{jdbc}/*", "-d", str(classes), *sources], classes, {})
    return f"{classes}:{jdbc}/*"


def _fetched(command: list[str], directory: Path, changes: Mapping[str, str]) -> None:
    """Download packages. Where they cannot be had, the tests that need them are skipped, unless `CI=true`."""
    done = _run(command, directory, changes)
    if done.returncode != 0 and os.environ.get("CI") != "true":
        pytest.skip(f"`{' '.join(command[:3])}` cannot download packages: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr


def _built(command: list[str], directory: Path, changes: Mapping[str, str]) -> None:
    done = _run(command, directory, changes)
    assert done.returncode == 0, done.stderr


def _run(command: list[str], directory: Path, changes: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=directory, env={**os.environ, **changes}, timeout=300, capture_output=True, text=True, check=False
    )
