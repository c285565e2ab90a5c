"""The documentation site: it builds without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.site_hooks import ROOT

pytestmark = pytest.mark.builds

MKDOCS = (sys.executable, "-m", "mkdocs", "build", "--strict")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [*MKDOCS, "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    """A broken link, anchor or docstring fails the build, and so does a page that is not in the navigation."""
    assert (site / "index.html").exists()


def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    """It works offline: pages name no script, style or picture elsewhere."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text, page
        assert 'rel="stylesheet" href="http' not in text, page


def test_the_header_shows_the_version(site: Path) -> None:
    """The one of pyproject.toml."""
    assert "Tidemark 0.1.0" in (site / "index.html").read_text()


def test_a_page_has_the_title_of_its_heading(site: Path) -> None:
    """The navigation has short names such as "skip", which say little in a list of tabs or search results."""
    assert "<title>Deploy the pipeline - Tidemark" in (site / "how-to/deploy.html").read_text()
    assert "<title>tidemark skip: settle open IDs" in (site / "how-to/runbooks/skip.html").read_text()


def test_the_python_api_shows_the_arguments_of_constructors(site: Path) -> None:
    """With their meanings: those of `Reader` are in the docstring of its `__init__`."""
    text = re.sub(r"<[^>]*>", "", (site / "reference/python-api.html").read_text())
    assert re.search(r"\bReader\(\s*positions", text)
    assert "the largest number of rows of a batch" in text


def test_long_names_in_tables_may_break(site: Path) -> None:
    """On a phone the meaning of a setting is beside its name. A copied name is whole."""
    text = (site / "reference/settings.html").read_text()
    assert "<code>TIDEMARK_<wbr>KAFKA_<wbr>FACTS_<wbr>TOPIC</code>" in text
    assert "***" not in text
