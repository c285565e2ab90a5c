"""What is made from the chart's `values.yaml` is as it says. The checks that need tools are in `check_chart.py`."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    assert list(value.rows()) == ["| `a.b` | `2` | How many. |"]


def test_a_default_without_a_type_is_refused(describe: ModuleType) -> None:
    """null says nothing of what may stand there: the line is named."""
    with pytest.raises(ValueError, match="line 1: a has no default with a type"):
        describe.read("a:\n")
