"""The chart's alerts and dashboard as files, without helm. Their expressions are parsed in `check_chart.py`."""

import re
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.helm.tools import CHART, ROOT
from tidemark.app import cli
from tidemark.app.pipeline import metrics
from tidemark.app.read_side import metrics as sidecar_metrics
from tidemark.sources.relay.relay import RelayMetrics
from tidemark.sources.synapse.bridge import BridgeMetrics

ALERTS = ["alerts.yaml", "relay-alerts.yaml", "synapse-alerts.yaml"]


def rules(file: str) -> Iterator[dict[str, Any]]:
    document = yaml.safe_load((CHART / "files" / file).read_text())
    for group in document["groups"] if isinstance(document, dict) else document:
        yield from group["rules"]


@pytest.mark.parametrize("file", ALERTS)
def test_every_alert_says_how_bad_it_is_what_it_is_and_what_to_do(file: str) -> None:
    """A text with a colon in it that is not quoted would be another document, or none."""
    for rule in rules(file):
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert {type(text) for text in rule["annotations"].values()} == {str}
        assert set(rule["annotations"]) == {"summary", "command", "action"}


@pytest.mark.parametrize("file", ALERTS)
def test_every_alert_names_a_command_to_type_first(file: str) -> None:
    """One that this version has. It takes no stream: whoever may write facts chooses those names, and people paste."""
    for rule in rules(file):
        program, *words = rule["annotations"]["command"].split()
        command: click.Command | None = cli.main
        for word in words:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), word)
        assert program == "tidemark"
        assert command is not None
        assert not isinstance(command, click.Group)


@pytest.mark.parametrize("file", ALERTS)
def test_every_alert_leads_to_a_story(file: str) -> None:
    """`runbookUrl` is the address of a page of the documentation site, with a heading for each alert."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    address, fragment = values["monitoring"]["prometheusRule"]["runbookUrl"].split("#")
    assert fragment == ""
    page = "docs" + address.removeprefix(chart["home"]).replace("index.html", "README.md")
    headings = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
    for rule in rules(file):
        told = headings[rule["alert"]]
        assert f"`{rule['annotations']['command']}`" in told
        assert re.search(r"\]\([\w./-]+\.md(#[\w-]+)?\)", told)


@pytest.mark.parametrize("file", ALERTS)
def test_every_text_speaks_of_labels_that_the_alert_has(file: str) -> None:
    """Prometheus writes nothing for another one."""
    for rule in rules(file):
        kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
        asked = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
        assert asked <= set(kept[1].split(", ")) if kept else asked <= {"pod"}


def test_no_two_alerts_have_one_name() -> None:
    """Whoever is called at night looks the name up."""
    names = [rule["alert"] for file in ALERTS for rule in rules(file)]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("file", [*ALERTS, "dashboard.json"])
def test_alerts_and_dashboard_ask_for_metrics_that_exist(file: str) -> None:
    """A metric that is renamed must not leave an alert behind that never fires."""
    known = {name for name, *_ in metrics.STREAM_GAUGES.values()}
    relay = RelayMetrics(CollectorRegistry()).registry
    bridge = BridgeMetrics(CollectorRegistry()).registry
    for registry in (metrics.REGISTRY, sidecar_metrics.REGISTRY, relay, bridge):
        for family in registry.collect():
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
            known |= {family.name + suffix for suffix in suffixes}
    asked = {word for word in re.findall(r"\w+", (CHART / "files" / file).read_text()) if word.startswith("tidemark_")}
    assert asked - known == set()
    assert asked
