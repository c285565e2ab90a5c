"""A release: one version everywhere, metadata that PyPI accepts, and workflows that run make targets."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.conftest import ROOT, VERSION, build, succeeds

GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
SCHEMAS = {
    **dict.fromkeys(WORKFLOWS, "vendor.github-workflows"),
    **dict.fromkeys((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"), "vendor.github-issue-forms"),
    GITHUB / "ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    GITHUB / "dependabot.yml": "vendor.dependabot",
}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    """In the wheel, the images, the chart and the examples of the documentation."""
    assert wheel.name == f"tidemark_streams-{VERSION}-py3-none-any.whl"
    assert re.findall(r"^ARG VERSION=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE) == [VERSION] * 2
    chart = yaml.safe_load((ROOT / "helm/tidemark/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    values = yaml.safe_load((ROOT / "helm/tidemark/values.yaml").read_text())
    assert values["image"]["tag"] == ""  # the chart's appVersion
    names = succeeds("make", "--no-print-directory", "--eval", "names: ; @echo $(IMAGE) $(SERVICES_IMAGE)", "names")
    assert names.split() == [f"tidemark:{VERSION}", f"tidemark-services:{VERSION}"]
    for page in (ROOT / "docs").rglob("*.md"):
        assert set(re.findall(r"\btidemark(?:-services)?:(\d[\w.]*)", page.read_text())) <= {VERSION}, page


def test_tag_must_name_the_version() -> None:
    """`make version-check`, which the release workflow runs first."""
    succeeds("make", "version-check", f"TAG=v{VERSION}")
    with pytest.raises(AssertionError, match="is not v"):
        succeeds("make", "version-check", "TAG=v9.9.9")


@pytest.mark.builds
def test_metadata_is_what_pypi_accepts(wheel: Path, tmp_path: Path) -> None:
    """`twine check --strict`, as `make dist-check` runs it."""
    succeeds(sys.executable, "-m", "twine", "check", "--strict", wheel, build(ROOT, "sdist", tmp_path))


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_files_for_github_are_valid(path: Path) -> None:
    """By the schemas that the package check-jsonschema brings."""
    succeeds(sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[path], path)


def _commands(part: Any) -> Iterator[str]:
    """The text of every `run` step of a workflow."""
    match part:
        case dict():
            if isinstance(part.get("run"), str):
                yield part["run"]
            for value in part.values():
                yield from _commands(value)
        case list():
            for value in part:
                yield from _commands(value)


def _made(text: str) -> set[str]:
    """Targets that a script makes."""
    lines = re.findall(r"^\s*(?:step )?make((?: +\S+)+)", text, re.MULTILINE)
    return {word for line in lines for word in line.split() if "=" not in word}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_make_targets_that_exist(path: Path) -> None:
    """A step that makes something is a target, so that it also runs on a developer's machine."""
    made = {target for command in _commands(yaml.safe_load(path.read_text())) for target in _made(command)}
    assert made
    assert made <= TARGETS


def test_the_workflow_makes_what_ci_makes() -> None:
    """`.ci/run` and the workflow cannot differ."""
    workflow = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())
    made = {target for command in _commands(workflow["jobs"]["test"]) for target in _made(command)}
    assert {"lint", "test", "test-slow", "docs"} <= _made((ROOT / ".ci/run").read_text()) <= made


def test_pages_and_tests_name_make_targets_that_exist() -> None:
    """Also the Makefile's own texts. `make help` lists every target that has a description."""
    texts = [ROOT / "Makefile", *(ROOT / ".github").rglob("*.md"), *ROOT.glob("*.md")]
    texts += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.py")]
    named = {name for path in texts for name in re.findall(r"`make ([a-z0-9-]+)", path.read_text())}
    assert named <= TARGETS
    described = set(re.findall(r"^([a-z0-9-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"^  make (\S+)", succeeds("make", "help"), re.MULTILINE)) == described


def test_every_supported_python_is_tested() -> None:
    """The matrix of the workflow is the list of classifiers."""
    workflow = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())
    classified = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == classified
    assert f'requires-python = ">={classified[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_release_page_names_every_target_of_the_workflow() -> None:
    """And every file that has the version."""
    page = (ROOT / "docs/how-to/release.md").read_text()
    workflow = yaml.safe_load((GITHUB / "workflows/release.yml").read_text())
    made = {target for command in _commands(workflow) for target in _made(command)} - {"setup"}
    assert all(f"`make {target}`" in page for target in made)
    assert all(f"`{name}`" in page for name in ("pyproject.toml", "helm/tidemark/Chart.yaml", "Dockerfile"))


def test_the_development_container_makes_the_environment() -> None:
    """Its file is JSON, and what it runs exists."""
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert _made(container["postCreateCommand"].partition("&&")[0]) == {"setup"}
    assert all(package in (ROOT / ".ci/run").read_text() for package in container["onCreateCommand"].split()[-4:])
