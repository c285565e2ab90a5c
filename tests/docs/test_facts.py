"""Facts that several pages state are the same on all of them."""

import re

import click

from tests.docs.test_prose import ROOT
from tidemark.app.cli import main


def test_pages_state_the_latency_of_the_readme() -> None:
    """The README has the measured figure; the pages on limits and on scale repeat it."""
    figures = {
        name: set(re.findall(r"p50 \d+ ms, p99 \d+ ms", (ROOT / name).read_text()))
        for name in ("README.md", "docs/explanation/limits.md", "docs/how-to/scale.md")
    }
    assert len(figures["README.md"]) == 1
    assert set(map(frozenset, figures.values())) == {frozenset(figures["README.md"])}


def test_the_page_on_limits_says_what_works_without_kafka() -> None:
    """The relay keeps positions for readers in the database of the writers, as the changelog says."""
    assert "The relay keeps the positions without Kafka" in (ROOT / "CHANGELOG.md").read_text()
    answer = re.search(r"\*\*Can I use it without Kafka\?\*\* (.*)", (ROOT / "docs/explanation/limits.md").read_text())
    assert answer
    assert "run-relay.md#readers-of-this-database" in answer[1]


def test_the_navigation_labels_the_page_of_a_command_with_the_command() -> None:
    """The site shows the name that a person types, and the page has the same name."""
    section = (ROOT / "mkdocs.yml").read_text().partition("          - Commands:\n")[2].partition("\n  - Reference:")[0]
    entries = re.findall(r"^ +- (\S+): how-to/runbooks/(\S+)\.md$", section, re.MULTILINE)
    assert len(entries) == len(section.splitlines())
    assert {label for label, _ in entries} <= set(main.list_commands(click.Context(main)))
    assert [label for label, page in entries if label != page] == []
