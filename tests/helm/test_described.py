"""What is made from the chart's `values.yaml` is as it says. The checks that need tools are in `check_chart.py`."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tidemark.sources.synapse.tables import STREAMS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def describe() -> ModuleType:
    """helm/tools is no package of ours: only `make` runs it."""
    spec = importlib.util.spec_from_file_location("describe", ROOT / "helm/tools/describe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["describe"] = module
    spec.loader.exec_module(module)
    return module


def test_schema_and_readme_are_made_from_the_values(describe: ModuleType) -> None:
    """`make chart-docs` was run after the last change of values.yaml."""
    for path, text in describe.described(ROOT / "helm/tidemark").items():
        assert path.read_text() == text, f"{path.name} is not what values.yaml says: run `make chart-docs`"


def test_the_chart_knows_the_streams_of_synapse_that_are_told() -> None:
    """Another one is refused before a pod is started that would only say so."""
    schema = json.loads((ROOT / "helm/tidemark/values.schema.json").read_text())
    assert schema["properties"]["synapse"]["properties"]["streams"]["items"] == {"enum": [*STREAMS]}


def test_comments_and_annotations_become_schema(describe: ModuleType) -> None:
    """The default tells the type, the comment the meaning, @schema the rest; no other key is allowed."""
    [value] = describe.read('a:\n  # How many.\n  # @schema {"minimum": 1}\n  b: 2\n')
    assert value.schema() == {
        "type": "object",
        "properties": {"b": {"type": "integer", "description": "How many.", "minimum": 1}},
        "additionalProperties": False,
    }
    assert list(value.rows()) == ["| `a` | object |  |  |", "| `a.b` | integer | `2` | How many. |"]


def test_a_default_without_a_type_is_refused(describe: ModuleType) -> None:
    """null says nothing of what may stand there: the line is named."""
    with pytest.raises(ValueError, match="line 1: a has no default with a type"):
        describe.read("a:\n")


def test_every_value_has_a_description(describe: ModuleType) -> None:
    """By a comment, or as a key that means the same in every place."""
    rows = [row for value in describe.read((ROOT / "helm/tidemark/values.yaml").read_text()) for row in value.rows()]
    assert len(rows) > 300
    assert [row for row in rows if row.endswith("|  |")] == []


def test_formats_are_checked_by_templates_and_not_by_the_schema(describe: ModuleType) -> None:
    """helm would print the pattern of a schema in place of a sentence."""
    values = describe.read('a:\n  # @format digest\n  digest: ""\n  memory: 1Gi\n')
    assert {path: entry["expected"] for path, entry in json.loads(describe.formats(values)).items()} == {
        "a.digest": "sha256: and 64 hexadecimal digits",
        "a.memory": "a quantity of Kubernetes, such as 500m, 2 or 3Gi",
    }
    assert "pattern" not in (ROOT / "helm/tidemark/values.schema.json").read_text()


def test_an_unknown_format_is_refused(describe: ModuleType) -> None:
    """The line is named."""
    with pytest.raises(ValueError, match="line 2: there is no format colour"):
        describe.read('# Of a thing.\n# @format colour\na: ""\n')


def test_the_readme_has_links_that_work_in_the_package() -> None:
    """A relative link leads out of the packaged chart, unless it leads to a file in it."""
    readme = (ROOT / "helm/tidemark/README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", readme):
        assert target.startswith(("https://", "#")) or (ROOT / "helm/tidemark" / target).exists(), target


def test_the_readme_has_the_headings_that_people_look_for() -> None:
    """The README on Artifact Hub is often the only page that is read."""
    headings = re.findall(r"^## (.+)$", (ROOT / "helm/tidemark/README.md").read_text(), re.MULTILINE)
    assert {"Install", "Upgrade", "Uninstall", "Missing Secrets", "Alerts", "Values"} <= set(headings)


def test_the_chart_says_where_it_comes_from() -> None:
    """Artifact Hub and `helm show chart` print these fields."""
    chart = yaml.safe_load((ROOT / "helm/tidemark/Chart.yaml").read_text())
    assert chart["home"].startswith("https://")
    assert all(source.startswith("https://") for source in chart["sources"])
    assert chart["icon"].startswith("https://")
    assert chart["maintainers"][0]["name"]
    assert {"artifacthub.io/license", "artifacthub.io/category", "artifacthub.io/links"} <= set(chart["annotations"])
    values = yaml.safe_load((ROOT / "helm/tidemark/values.yaml").read_text())
    assert values["monitoring"]["prometheusRule"]["runbookUrl"].startswith(chart["home"])
