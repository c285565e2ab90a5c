"""The chart's tools as functions: built by `helm/tools/install`, from PyPI, or found on the PATH."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/tidemark"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
TOOLS = Path(os.environ.get("TIDEMARK_HOME") or "~/.cache/tidemark").expanduser() / "tools"
# The newest minors, for which the chart is rendered and checked.
KUBERNETES = ("1.34.0", "1.35.0", "1.36.0", "1.37.0")


def run(*command: str | Path, given: str | None = None) -> str:
    """What the command prints; an AssertionError with all of its output where it fails."""
    done = subprocess.run([str(word) for word in command], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def tool(name: str) -> Path:
    places = os.pathsep.join([str(TOOLS / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=places)
    assert found, f"there is no {name}: `helm/tools/install {name}` builds it"
    return Path(found)


def rendered(example: str, *options: str, version: str = KUBERNETES[-1]) -> str:
    """The manifests of an example as helm would send them, `helm test` included."""
    values = CHART / f"examples/{example}.yaml"
    return run(tool("helm"), "template", "tidemark", CHART, "-f", values, "--kube-version", version, *options)


def objects(example: str, *options: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(rendered(example, *options)) if found]


def alert_rules(*, bridge: bool = True) -> str:
    """The file of rules for Prometheus, as the chart writes it for its own values, with the relay of one database and
    with the bridge to Synapse or without."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusRule"]
    placed = {
        "NAMESPACE": "streams",
        "RELAY": "tidemark-relay-shop",
        "DATABASE": "shop",
        "BRIDGE": "tidemark-synapse",
        "LAG_RECORDS": values["lagRecords"],
        "OPEN_SECONDS": values["gapSeconds"],
        "OUTBOX_IDS": values["outboxIds"],
    }

    def read(file: str) -> Any:
        template = (CHART / "files" / file).read_text()
        for word, value in placed.items():
            template = template.replace(word, str(value))
        return yaml.safe_load(template)

    groups = read("alerts.yaml")["groups"] + read("relay-alerts.yaml")
    groups += read("synapse-alerts.yaml") if bridge else []
    text: str = yaml.safe_dump({"groups": groups})
    return text
