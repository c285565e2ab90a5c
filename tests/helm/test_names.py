"""What messages call the settings of a pod of the chart's: values, and not variables that the chart refuses."""

import json
import re
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.helm.tools import CHART
from tidemark.app.cli import main
from tidemark.app.settings import Settings, called, variable_of
from tidemark.common.errors import TopicMissing

NAMES: dict[str, str] = json.loads((CHART / "files/names.json").read_text())


def test_every_variable_that_the_chart_names_is_a_setting() -> None:
    """One that was renamed would be told by a name that nobody knows."""
    known = {variable_of(name) for name in Settings.model_fields}
    assert {f"TIDEMARK_{name.partition('=')[0]}" for name in NAMES} - known == set()


@pytest.mark.parametrize("value", sorted(set(NAMES.values())))
def test_every_value_that_it_names_is_there(value: str) -> None:
    """As a path in values.yaml."""
    found: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in value.partition("=")[0].split("."):
        found = found[key]


def test_every_setting_that_the_chart_refuses_has_a_value_of_its_own() -> None:
    """`settings.X` would be told for it, and refused by the chart."""
    [refused] = re.findall(r'regexMatch "(\^\(KAFKA.*?)" \$name', (CHART / "templates/validate.yaml").read_text())
    ours = {variable_of(name).removeprefix("TIDEMARK_") for name in Settings.model_fields}
    made = re.compile(
        r"HOME|OWNER|SETTING_NAMES|METRICS_|SIDECAR_(HOST|PORT)|SPARK_(DRIVER_(HOST|PORT)|BLOCK|JARS|KUBERNETES)"
    )
    assert {name for name in ours if re.search(refused, name) and not made.match(name)} <= set(NAMES)


@pytest.fixture
def from_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"TIDEMARK_{name}": value for name, value in NAMES.items()}
    monkeypatch.setenv("TIDEMARK_SETTING_NAMES", json.dumps(names))


@pytest.mark.usefixtures("from_the_chart")
def test_messages_name_the_values_of_the_chart() -> None:
    """With what to set them to, and whether the secret comes as a file or not; every other setting by `settings`."""
    assert "or set topics.create=pipeline" in called(str(TopicMissing("tidemark.facts")))
    assert called("check TIDEMARK_KAFKA_PASSWORD_FILE") == "check kafka.sasl.passwordSecret"
    assert called("TIDEMARK_LEASE_SECONDS=1 is low") == "settings.LEASE_SECONDS=1 is low"


def test_messages_name_variables_elsewhere() -> None:
    """Nobody who has set a variable knows of values."""
    assert "set TIDEMARK_KAFKA_CREATE_TOPICS=true" in called(str(TopicMissing("tidemark.facts")))


@pytest.mark.usefixtures("from_the_chart")
def test_a_wrong_setting_is_told_by_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although there are no settings then that could say what anything is called."""
    monkeypatch.setenv("TIDEMARK_REDIS_URL", "http://redis")
    result = CliRunner().invoke(main, ["config"])
    assert result.exit_code == 2
    assert "redis.url: the value is not allowed" in result.output
