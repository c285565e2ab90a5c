"""Settings that have a value of the chart: files/names.json, the README and the messages in logs."""

import json
import re
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.helm.tools import CHART
from tidemark.app.cli import main
from tidemark.app.settings import FIELDS, variable_of
from tidemark.common.errors import TopicMissing

NAMES: dict[str, str] = json.loads((CHART / "files/names.json").read_text())


def test_every_variable_that_the_chart_names_is_a_setting() -> None:
    """A setting that was renamed must not stay in names.json."""
    known = {variable_of(name) for name in FIELDS}
    assert {f"TIDEMARK_{name}" for name in NAMES} - known == set()


@pytest.mark.parametrize("value", sorted(set(NAMES.values())))
def test_every_value_that_it_names_is_there(value: str) -> None:
    """As a path in values.yaml."""
    found: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in value.partition("=")[0].split("."):
        found = found[key]


def test_every_setting_that_the_chart_refuses_has_a_value_of_its_own() -> None:
    """The refusal names the value to set."""
    [refused] = re.findall(r'regexMatch "(\^\(KAFKA.*?)" \$name', (CHART / "templates/validate.yaml").read_text())
    ours = {variable_of(name).removeprefix("TIDEMARK_") for name in FIELDS}
    made = re.compile(r"HOME|OWNER|METRICS_PORT|SIDECAR_PORT|SPARK_(DRIVER_(HOST|PORT)|BLOCK|JARS|KUBERNETES)")
    assert {name for name in ours if re.search(refused, name) and not made.match(name)} <= set(NAMES)


def test_messages_name_settings_that_the_readme_has() -> None:
    """Whoever reads `check TIDEMARK_KAFKA_PASSWORD_FILE` in a log finds the value of the chart."""
    readme = (CHART / "README.md").read_text()
    [name] = re.findall(r"TIDEMARK_\w+(?==true)", str(TopicMissing("tidemark.facts")))
    assert f"| `{name}` | `topics.create` |" in readme
    assert "| `TIDEMARK_KAFKA_PASSWORD` | `kafka.sasl.passwordSecret` |" in readme


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable, from which the README leads to the value."""
    monkeypatch.setenv("TIDEMARK_REDIS_URL", "http://redis")
    result = CliRunner().invoke(main, ["config"])
    assert result.exit_code == 2
    assert "TIDEMARK_REDIS_URL: the value is not allowed" in result.output
