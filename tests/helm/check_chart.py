"""`make chart-test`: the chart and the Dockerfiles before every tool that knows something of them.

Not `test_...`: the tools are Go programs that take minutes to build, so these run where they are asked for by name.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.helm.tools import CHART, EXAMPLES, KUBERNETES, ROOT, TOOLS, objects, rendered, run, tool
from tidemark.app.settings import FIELDS, variable_of

# Objects of operators that have no schema in tests/helm/schemas.
FOREIGN = "PodMonitor,PrometheusRule,ServiceMonitor"
EMBEDDING = """
apiVersion: v1
kind: Pod
metadata: {name: reader}
spec:
  initContainers:
    {{- include "tidemark.sidecar.native" .Subcharts.tidemark | nindent 4 }}
  containers: [{name: reader, image: reader}]
  volumes:
    {{- include "tidemark.sidecar.volumes" .Subcharts.tidemark | nindent 4 }}
"""
OVERLOOKED = {
    "container-image-pull-policy": "images come by version or digest, which name the same bytes for ever",
    "pod-networkpolicy": "a policy is the user's choice, its egress needs the user's addresses, and hooks serve nobody",
    "deployment-has-host-podantiaffinity": "topologySpreadConstraints do it, by the key that the user names",
}
UNBOUNDED = [
    word
    for value in (
        "monitoring.podMonitor.enabled=false",
        "monitoring.serviceMonitor.enabled=true",
        "networkPolicy.egress[0].ports[0].port=9093",
        "relay.databases[0].name=shop",
        "relay.databases[0].dsnSecret.name=shop-relay",
        "relay.databases[0].migrate.dsnSecret.name=shop-owner",
        "spark.admissionPolicy.enabled=true",
        "synapse.enabled=true",
        "synapse.serverName=example.org",
        "synapse.dsnSecret.name=synapse-db",
        "synapse.redisUrlSecret.name=synapse-redis",
    )
    for word in ("--set", value)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_lint_finds_nothing(example: str) -> None:
    """Warnings count: `helm lint --strict`."""
    run(
        tool("helm"),
        "lint",
        "--strict",
        CHART,
        "-f",
        CHART / f"examples/{example}.yaml",
        "--kube-version",
        KUBERNETES[-1],
    )


def test_templates_do_what_their_tests_say() -> None:
    """helm-unittest: what is rendered for which values, and every message of `fail`."""
    run(tool("helm-unittest"), "--strict", CHART)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("example", EXAMPLES)
def test_manifests_are_valid_for_the_newest_kubernetes(example: str, version: str) -> None:
    """kubeconform, strict: no unknown field, no value of a wrong type, nothing that this minor has removed."""
    run(sys.executable, ROOT / "helm/tools/schemas.py", TOOLS / "schemas", *KUBERNETES)
    place = (
        TOOLS
        / "schemas/{{.NormalizedKubernetesVersion}}-standalone{{.StrictSuffix}}/{{.ResourceKind}}{{.KindSuffix}}.json"
    )
    own = Path(__file__).parent / "schemas/{{.ResourceKind}}{{.KindSuffix}}.json"
    options = ["-strict", "-kubernetes-version", version, "-skip", FOREIGN]
    options += ["-schema-location", str(place), "-schema-location", str(own), "-"]
    run(tool("kubeconform"), *options, given=rendered(example, *UNBOUNDED, version=version))


@pytest.mark.parametrize("number", [10**6, 10**9])
@pytest.mark.parametrize("example", ["one-machine", "cluster"])
def test_every_number_is_written_in_full(example: str, number: int, tmp_path: Path) -> None:
    """A number of a values file is a float for helm, which prints a million as 1e+06."""
    file = tmp_path / "values.yaml"
    values = _with_numbers(json.loads((CHART / "values.schema.json").read_text()), number)
    values["monitoring"]["prometheusRule"]["enabled"] = True
    values["relay"]["databases"] = [{"name": "shop", "dsn": "host=shop"}]
    file.write_text(yaml.safe_dump(values))
    written = rendered(example, "-f", str(file), "--set", "spark.executor.maxInstances=0")
    assert str(number) in written
    assert re.findall(r".*[0-9]e[+][0-9].*", written) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_score_finds_nothing_that_is_not_explained(example: str) -> None:
    """kube-score, but for `OVERLOOKED` and what an annotation in a template gives the reason for."""
    options = ["--kubernetes-version", "v1.36", "--output-format", "ci", "--exit-one-on-warning"]
    run(tool("kube-score"), "score", *options, "--ignore-test", ",".join(OVERLOOKED), "-", given=rendered(example))


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "tests/helm/servers/Dockerfile"])
def test_dockerfiles_follow_good_practice(dockerfile: str) -> None:
    """hadolint, with shellcheck inside."""
    run(tool("hadolint"), ROOT / dockerfile)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_variable_is_a_setting(example: str) -> None:
    """A setting that is renamed must not leave a variable behind that nobody reads."""
    known = {variable_of(name) for name in FIELDS}
    known |= {f"{variable_of(name)}_FILE" for name, field in FIELDS.items() if field.is_secret}
    used = {entry["name"] for entry in _environments(objects(example)) if entry["name"].startswith("TIDEMARK_")}
    assert used - known == set()
    assert "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS" in used


def test_sidecar_can_be_put_beside_containers_of_others(tmp_path: Path) -> None:
    """The named templates that docs/how-to/kubernetes.md shows, in a chart that depends on ours."""
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts/tidemark").symlink_to(CHART)
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: reader, version: 1.0.0}")
    values = yaml.safe_load((CHART / "examples/one-machine.yaml").read_text()) | {"pipeline": {"enabled": False}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"tidemark": values}))
    (tmp_path / "templates/pod.yaml").write_text(EMBEDDING)
    found = yaml.safe_load_all(run(tool("helm"), "template", "t", tmp_path, "--kube-version", KUBERNETES[-1]))
    [pod] = [one for one in found if one["kind"] == "Pod"]
    [sidecar] = pod["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"], sidecar["image"]) == (
        "sidecar",
        "Always",
        "registry.example/tidemark:0.1.0",
    )
    assert {mount["name"] for mount in sidecar["volumeMounts"]} <= {one["name"] for one in pod["spec"]["volumes"]}


def test_alerts_are_expressions_of_prometheus_and_say_what_to_do() -> None:
    """Each parses, and tells a person how bad it is, what it is, and what to do."""
    relays = ["--set", "relay.databases[0].name=shop,relay.databases[0].dsn=host=shop"]
    [rule] = [found for found in objects("cluster", *relays) if found["kind"] == "PrometheusRule"]
    assert len(rule["spec"]["groups"]) == 2
    for alert in (alert for group in rule["spec"]["groups"] for alert in group["rules"]):
        promql_parser.parse(alert["expr"])
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert set(alert["annotations"]) == {"summary", "command", "action", "runbook_url"}


def test_dashboard_asks_in_expressions_of_prometheus() -> None:
    """Each panel's queries parse."""
    panels = json.loads((CHART / "files/dashboard.json").read_text())["panels"]
    for target in (target for panel in panels for target in panel["targets"]):
        promql_parser.parse(target["expr"].replace("$namespace", "streams"))


def _with_numbers(schema: dict[str, Any], number: int) -> dict[str, Any]:
    """Values in which every integer without an upper bound is `number`."""
    values: dict[str, Any] = {}
    for name, shape in schema.get("properties", {}).items():
        if "properties" in shape:
            values[name] = _with_numbers(shape, number)
        elif shape["type"] == "integer" and "maximum" not in shape:
            values[name] = number
    values.get("sidecar", {}).pop("replicas", None)
    return values


def _environments(found: Any) -> Iterator[dict[str, Any]]:
    """Every entry of every `env`, however deep."""
    match found:
        case dict():
            yield from found.get("env") or []
            for value in found.values():
                yield from _environments(value)
        case list():
            for value in found:
                yield from _environments(value)
