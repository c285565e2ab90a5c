"""What tests need beside Python: servers, by which they are marked and shared out, and programs, which may be missing.

A test has the markers of the servers that its fixtures start, and `server` for any of them; one that starts a server in
another way has a marker by hand, and fails without it. A test whose program is missing is skipped, which the first line
of the run and the last say, with what to install; where `CI=true` it fails instead, but for those few that need what a
machine without root cannot be given.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import cast

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.services.pgbouncer import pgbouncer
from tidemark.app.settings import load
from tidemark.app.versions import JavaUnfit, find_java

SERVERS = {
    "jvm": {"java"},
    "kafka": {"kafka", "guarded_kafka"},
    "postgres": {"postgres"},
    "redis": {"redis_server", "redis_cluster", "watched"},
    "spark": {"spark", "warm_jvm"},
    "browser": {"browser"},
    "stack": {"terminal", "stack"},
    "synapse": {"homeserver"},
}
"""The fixtures that start a server, by marker; `warm_jvm` is for whatever starts a pipeline."""

LONGEST = (
    {"terminal", "stack", "site", "scene", "homeserver"},
    {"spark", "guarded_kafka", "base_install", "shared"},
    {"kafka"},
    {"postgres"},
)
"""Fixtures by how long the tests take that have them. Modules that have the first begin first, so that no process of
`pytest -n --dist loadfile` is left with one in the end."""

TOGETHER = {
    "homeserver": ("tests/sources/synapse/",),
    "spark": tuple(
        f"tests/streaming/test_{it}.py" for it in ("checkpoint_store", "daemon", "source", "query_keys", "spark")
    ),
}
"""The files of tests with a fixture that takes ten seconds of a core to start: one process of `pytest -n` does them
all, so that it starts once."""

LONG = "long"
ANY = "server"
INSTALL = "apt-get install --no-install-recommends"
PROGRAMS = {"java", "spark-submit", "postgres", "redis-server", "chromium"}


def chromium() -> str | None:
    """The path of a browser that Playwright can drive."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _java() -> bool:
    try:
        find_java(load().java_home)
    except JavaUnfit:
        return False
    return True


def _other_user() -> bool:
    """Whether Postgres, which does not run as root, can be run as another user."""
    return os.geteuid() != 0 or shutil.which("setpriv") is not None


@dataclass(frozen=True)
class Need:
    """A program that the tests with one of `fixtures` cannot do without."""

    program: str
    package: str
    fixtures: frozenset[str]
    met: Callable[[], bool]
    everywhere: bool = True
    """Whether its absence fails the tests where `CI=true`."""

    def __str__(self) -> str:
        return f"no {self.program} here: {INSTALL} {self.package}"


CHROMIUM = Need("Chromium", "chromium", frozenset({"browser"}), lambda: chromium() is not None)
NEEDS = (
    CHROMIUM,
    Need("Go", "golang-go", frozenset({"go"}), lambda: shutil.which("go") is not None, everywhere=False),
    Need("Node", "npm", frozenset({"npm"}), lambda: shutil.which("npm") is not None, everywhere=False),
    Need(
        "javac",
        "openjdk-17-jdk-headless",
        frozenset({"javac", "rivals"}),
        lambda: shutil.which("javac") is not None,
        everywhere=False,
    ),
    Need("Maven", "maven", frozenset({"rivals"}), lambda: shutil.which("mvn") is not None, everywhere=False),
    Need(
        "Prometheus",
        "prometheus",
        frozenset({"scene"}),
        lambda: shutil.which("prometheus") is not None,
        everywhere=False,
    ),
    Need("PgBouncer", "pgbouncer", frozenset({"pooler"}), lambda: pgbouncer() is not None, everywhere=False),
    Need("nc", "netcat-openbsd", frozenset({"nc"}), lambda: shutil.which("nc") is not None),
    Need("Java 17 or newer", "openjdk-17-jre-headless", frozenset({"java"}), _java),
    Need("setpriv for root", "util-linux", frozenset({"postgres", "terminal"}), _other_user),
)

_missing = pytest.StashKey[Sequence[Need]]()


def pytest_configure(config: pytest.Config) -> None:
    for server, fixtures in SERVERS.items():
        config.addinivalue_line("markers", f"{server}: starts it, by the fixture {' or '.join(sorted(fixtures))}")
    config.addinivalue_line("markers", f"{ANY}: starts any server")
    config.addinivalue_line("markers", f"{LONG}: computes for a minute; begins while others wait for what servers need")
    strict = os.environ.get("CI") == "true"
    config.stash[_missing] = [need for need in NEEDS if not (need.met() or (strict and need.everywhere))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        used = _used(item)
        for server, fixtures in SERVERS.items():
            if used & fixtures:
                item.add_marker(server)
        if any(item.get_closest_marker(server) for server in SERVERS):
            item.add_marker(ANY)
        for fixture, files in TOGETHER.items():
            if fixture in used and not item.nodeid.startswith(files):
                raise pytest.UsageError(f"{item.nodeid} has the fixture {fixture}: tests.needs.TOGETHER lacks its file")
        for need in config.stash[_missing]:
            if used & need.fixtures:
                item.add_marker(pytest.mark.skip(reason=str(need)))
    ranks = {module: min(map(_rank, its)) for module, its in groupby(items, _module)}
    items.sort(key=lambda item: ranks[_module(item)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """xdist's own, for which those files are one."""
    if config.getoption("dist") != "loadfile":
        return None
    made = LoadFileScheduling(config, log)
    file_of = made._split_scope
    made._split_scope = lambda nodeid: _together(file_of(nodeid))
    return cast(object, made)


def _together(file: str) -> str:
    return next((fixture for fixture, files in TOGETHER.items() if file.startswith(files)), file)


def _used(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _module(item: pytest.Item) -> Path:
    return item.path


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker(LONG):
        return -1
    used = _used(item)
    return next((rank for rank, fixtures in enumerate(LONGEST) if used & fixtures), len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test without a marker would be run where no server is wanted: it may not start one."""
    _unmarked.extend([] if item.get_closest_marker(ANY) else [item.nodeid])
    try:
        return (yield)
    finally:
        _unmarked.clear()


_unmarked: list[str] = []


def _refuse_servers(event: str, arguments: tuple[object, ...]) -> None:
    if event != "subprocess.Popen" or not _unmarked:
        return
    for word in arguments[1]:  # type: ignore[attr-defined]
        program = Path(os.fsdecode(word))
        # A script that a test made is no server.
        if program.name in PROGRAMS and not any(part.startswith("pytest-") for part in program.parts):
            pytest.fail(f"it starts {program.name}: mark it ({', '.join(SERVERS)})")


sys.addaudithook(_refuse_servers)


@pytest.hookimpl(tryfirst=True)  # before pytest's own first line
def pytest_sessionstart(session: pytest.Session) -> None:
    if not session.config.option.markexpr:  # with one it may be that nothing is skipped: the last line knows
        _tell(session.config, session.config.stash[_missing])


@pytest.hookimpl(trylast=True)  # after its last one
def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = str([report.longrepr for report in reporter.stats.get("skipped", ())]) if reporter else ""
    _tell(config, [need for need in config.stash[_missing] if str(need) in skipped])


def _tell(config: pytest.Config, missing: Sequence[Need]) -> None:
    """In one line, and not by a run's workers."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if missing and reporter is not None and not hasattr(config, "workerinput"):
        programs, packages = ([getattr(it, name) for it in missing] for name in ("program", "package"))
        said = f"Tests are skipped for want of {', '.join(programs)}: {INSTALL} {' '.join(packages)}"
        reporter.write_line(said, yellow=True, bold=True)
