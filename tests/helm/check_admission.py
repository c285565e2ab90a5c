"""`make admission-test`: what an API server allows the account of Spark's driver, with `spark.admissionPolicy.enabled`.

The API server of the current context needs no nodes: no pod runs here. Spark itself creates the executors that must be
allowed, with the account's own token. Every pod that must be refused is such an executor with one change.
"""

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.kube import Kube, until
from tests.helm.tools import CHART, objects, run
from tidemark.app.pipeline.engine import read_properties
from tidemark.streaming.engine.executors import Cluster, Pods
from tidemark.streaming.engine.spark import SparkSettings, start

pytestmark = pytest.mark.jvm
RELEASE = "tidemark"
DRIVER = f"{RELEASE}-pipeline-0"
OTHERS = {DRIVER, "other"}
"""Pods that are no executors."""
KINDS = {"ServiceAccount", "Role", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
# More rules than the chart's own, so that the policy alone refuses changes of pods.
RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
OPTIONS = ["--set", "spark.master=kubernetes,spark.admissionPolicy.enabled=true"]
OPTIONS += ["--set", r"commonLabels.team=streams,spark.conf.spark\.kubernetes\.executor\.label\.cost=low"]
OPTIONS += ["--set-json", f"spark.extraRules={json.dumps(RULES)}"]
Pod = dict[str, Any]


def pod_with(change: Callable[[Pod], object]) -> Callable[[Pod], Pod]:
    """A copy of a pod on which `change` was called."""

    def changed(pod: Pod) -> Pod:
        copy = deepcopy(pod)
        change(copy)
        return copy

    return changed


def spec_with(**fields: Any) -> Callable[[Pod], Pod]:
    return pod_with(lambda pod: pod["spec"].update(fields))


def container_with(**fields: Any) -> Callable[[Pod], Pod]:
    return pod_with(lambda pod: pod["spec"]["containers"][0].update(fields))


def security_with(**fields: Any) -> Callable[[Pod], Pod]:
    return pod_with(lambda pod: pod["spec"]["containers"][0]["securityContext"].update(fields))


def volume(**source: Any) -> Callable[[Pod], Pod]:
    return pod_with(lambda pod: pod["spec"]["volumes"].append({"name": "other", **source}))


def variable(**source: Any) -> Callable[[Pod], Pod]:
    return pod_with(lambda pod: pod["spec"]["containers"][0]["env"].append({"name": "OTHER", "valueFrom": source}))


def container(field: str) -> Callable[[Pod], Pod]:
    """One more container, a copy of the first."""
    return pod_with(
        lambda pod: pod["spec"].setdefault(field, []).append(deepcopy(pod["spec"]["containers"][0]) | {"name": "other"})
    )


def labels_with(**labels: str) -> Callable[[Pod], Pod]:
    return pod_with(lambda pod: pod["metadata"]["labels"].update(labels))


VOLUMES = "has volumes that are no emptyDir: other"
VARIABLES = "has variables with values from other objects: OTHER"
NODE = "uses its node: hostNetwork, hostPID, hostIPC or hostPort"
PRIVILEGES = "is privileged, may gain privileges, or has more capabilities than an executor"
CONTAINERS = "has more containers than the one of an executor"
LABELS = f"is not an executor of {RELEASE}: it lacks one of the labels"
TOKEN = {"serviceAccountToken": {"path": "token"}}

REFUSED = {
    "volume of a Secret": (volume(secret={"secretName": "database"}), VOLUMES),
    "volume of a projected Secret": (volume(projected={"sources": [{"secret": {"name": "database"}}]}), VOLUMES),
    "volume of a projected token": (volume(projected={"sources": [TOKEN]}), VOLUMES),
    "volume of a ConfigMap": (volume(configMap={"name": "other"}), VOLUMES),
    "volume of a claim": (volume(persistentVolumeClaim={"claimName": "other"}), VOLUMES),
    "volume of a CSI driver": (
        volume(csi={"driver": "other.example", "nodePublishSecretRef": {"name": "database"}}),
        VOLUMES,
    ),
    "directory of the node": (volume(hostPath={"path": "/"}), VOLUMES),
    "variable of a Secret": (variable(secretKeyRef={"name": "database", "key": "password"}), VARIABLES),
    "variable of a ConfigMap": (variable(configMapKeyRef={"name": "other", "key": "other"}), VARIABLES),
    "all variables of a Secret": (container_with(envFrom=[{"secretRef": {"name": "database"}}]), "has envFrom"),
    "other service account": (
        spec_with(serviceAccountName="other", serviceAccount="other"),
        f"has the service account other, and executors have {RELEASE}",
    ),
    "token": (spec_with(automountServiceAccountToken=True), "has a token of its service account"),
    "other image": (container_with(image="other:1"), "runs the image other:1, and executors run"),
    "two containers": (container("containers"), CONTAINERS),
    "init container": (container("initContainers"), CONTAINERS),
    "privileged": (security_with(privileged=True, allowPrivilegeEscalation=True), PRIVILEGES),
    "privilege escalation": (security_with(allowPrivilegeEscalation=True), PRIVILEGES),
    "capability": (security_with(capabilities={"add": ["NET_ADMIN"]}), PRIVILEGES),
    "network of the node": (spec_with(hostNetwork=True), NODE),
    "processes of the node": (spec_with(hostPID=True), NODE),
    "IPC of the node": (spec_with(hostIPC=True), NODE),
    "port of the node": (container_with(ports=[{"containerPort": 7079, "hostPort": 7079}]), NODE),
    "no labels": (pod_with(lambda pod: pod["metadata"].pop("labels")), LABELS),
    "not an executor": (labels_with(**{"spark-role": "driver"}), LABELS),
    "other release": (labels_with(**{"app.kubernetes.io/instance": "other"}), LABELS),
    "other component": (labels_with(**{"app.kubernetes.io/component": "sidecar"}), LABELS),
    "label of other pods": (labels_with(app="other"), "has labels that executors do not have: app"),
    "label of the Service": (
        labels_with(**{"tidemark/serves": "positions"}),
        "has labels that executors do not have: tidemark/serves",
    ),
    "other value of a label": (labels_with(team="other"), "has labels that executors do not have: team"),
}


class Driver:
    """The driver's service account in a namespace that has the objects of the chart which concern it."""

    def __init__(self, kube: Kube, manifests: list[dict[str, Any]]) -> None:
        self.kube = kube
        self.account = f"system:serviceaccount:{kube.namespace}:{RELEASE}"
        self.executor: Pod = {}
        """An executor as Spark creates it, without what the API server adds."""
        self._files = next(found["data"] for found in manifests if found["metadata"]["name"] == f"{RELEASE}-spark")
        [pipeline] = [found for found in manifests if found["kind"] == "StatefulSet"]
        self._image = pipeline["spec"]["template"]["spec"]["containers"][0]["image"]

    def refusal(self, *words: str, given: Pod | None = None) -> str:
        """Run kubectl as the account. Return the message of the API server if it refuses, otherwise an empty text."""
        command = ["kubectl", "-n", self.kube.namespace, f"--as={self.account}", *words]
        text = None if given is None else json.dumps(given)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode or done.stdout, command
        return done.stderr if done.returncode else ""

    def create(self, pod: Pod, *options: str) -> str:
        return self.refusal("create", "-f", "-", *options, given=pod)

    def pods(self) -> set[str]:
        listed = self.kube.kubectl("get", "pods", "-o", "name").split()
        return {name.removeprefix("pod/") for name in listed}

    def settings(self, directory: Path) -> SparkSettings:
        """Settings of a driver outside the cluster, with the files that the chart mounts and the account's token."""
        (directory / "spark.conf").write_text(self._files["spark.conf"])
        (directory / "executor.yaml").write_text(self._files["executor.yaml"])
        view = yaml.safe_load(run("kubectl", "config", "view", "--raw", "--minify", "--flatten"))
        token = self.kube.kubectl("create", "token", RELEASE).strip()
        # Spark would use the administrator's certificate of the environment beside a token of its settings.
        view["users"][0]["user"] = {"token": token}
        (directory / "kubeconfig").write_text(yaml.safe_dump(view))
        pods = Pods(
            image=self._image,
            namespace=self.kube.namespace,
            service_account=RELEASE,
            template=directory / "executor.yaml",
            driver_pod=DRIVER,
        )
        extra = {
            **Cluster("127.0.0.1", executor_count=2, cores_per_executor=1, memory="1g", pods=pods).settings(),
            **read_properties(directory / "spark.conf"),
            # No executor registers, because no pod runs.
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "1s",
        }
        server = view["clusters"][0]["cluster"]["server"]
        return SparkSettings(f"k8s://{server}", "512m", [], 1, directory / "spark", extra_settings=extra)


def other_pod(name: str) -> Pod:
    """A pod that is no executor."""
    spec = {"containers": [{"name": "other", "image": "other:1"}], "serviceAccountName": "other"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """A namespace of its own. It may stay behind as `Terminating` if the cluster has no controllers."""
    kube = Kube([], f"tidemark-admission-{secrets.token_hex(3)}", CHART, RELEASE)
    kube.kubectl("create", "namespace", kube.namespace)
    yield kube
    kube.kubectl("delete", "namespace", kube.namespace, "--wait=false")


@pytest.fixture(scope="module")
def driver(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """The release's objects without workloads, two pods of others, and an executor that Spark has made."""
    manifests = objects("one-machine", "--namespace", kube.namespace, *OPTIONS)
    applied = yaml.safe_dump_all([found for found in manifests if found["kind"] in KINDS])
    driver = Driver(kube, manifests)
    kube.kubectl("apply", "-f", "-", given=applied)
    try:
        kube.kubectl("create", "serviceaccount", "other")
        for name in (f"{RELEASE}-pipeline-0", "other"):
            kube.kubectl("create", "-f", "-", given=json.dumps(other_pod(name)))
        until("the policy works", lambda: LABELS in driver.create(other_pod("refused"), "--dry-run=server"))
        driver.executor = executor_of_spark(driver, tmp_path_factory.mktemp("driver"))
        yield driver
    finally:
        kube.kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false", given=applied)
        kube.kubectl("delete", "pods", "--all", "--wait=false")


def executor_of_spark(driver: Driver, directory: Path) -> Pod:
    """Let Spark start with two executors and stop. Return one of its executors."""
    settings = driver.settings(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(directory / "kubeconfig"))
        session = start(settings)
    try:
        until("Spark has created two executors", lambda: len(driver.pods() - OTHERS) == 2)
        [name, _] = sorted(driver.pods() - OTHERS)
        found = json.loads(driver.kube.kubectl("get", "pod", name, "-o", "json"))
    finally:
        session.stop()
    until("Spark has deleted its executors", lambda: driver.pods() == OTHERS)
    metadata = {"name": "executor", "labels": found["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": found["spec"]}


def test_spark_creates_and_deletes_its_executors(driver: Driver) -> None:
    """Spark with the account's token did both, and what it created is allowed again."""
    assert driver.executor["spec"]["containers"][0]["args"] == ["executor"]
    assert driver.create(driver.executor, "--dry-run=server") == ""


@pytest.mark.parametrize("change", REFUSED)
def test_driver_creates_no_pod_but_executors(driver: Driver, change: str) -> None:
    """The message names the pod and the field. An administrator may create the same pod."""
    changed, message = REFUSED[change]
    pod = changed(driver.executor)
    refusal = driver.create(pod, "--dry-run=server")
    assert f"ValidatingAdmissionPolicy '{RELEASE}-driver.{driver.kube.namespace}'" in refusal
    assert f"pod executor {message}" in refusal
    driver.kube.kubectl("create", "-f", "-", "--dry-run=server", given=json.dumps(pod))


def test_driver_deletes_executors_only(driver: Driver) -> None:
    """By name."""
    assert driver.create(driver.executor) == ""
    assert driver.refusal("delete", "pod", "executor") == ""
    assert f"pod other {LABELS}" in driver.refusal("delete", "pod", "other")
    assert driver.pods() == OTHERS


def test_delete_of_all_pods_leaves_others(driver: Driver) -> None:
    """A deletecollection is checked for each pod. With the selector that Spark uses, it succeeds."""
    path = f"/api/v1/namespaces/{driver.kube.namespace}/pods"
    assert driver.create(driver.executor) == ""
    assert driver.refusal("delete", "--raw", f"{path}?labelSelector=spark-role%3Dexecutor") == ""
    assert driver.pods() == OTHERS
    assert LABELS in driver.refusal("delete", "--raw", path)
    assert driver.pods() == OTHERS


def test_driver_makes_no_executor_of_another_pod(driver: Driver) -> None:
    """Even if `spark.extraRules` allows changes of pods: neither by labels, nor by another image."""
    labels = {"metadata": {"labels": driver.executor["metadata"]["labels"]}}
    assert f"pod other {LABELS}" in driver.refusal("patch", "pod", "other", "-p", json.dumps(labels))
    assert driver.create(driver.executor) == ""
    image = {"spec": {"containers": [{"name": "executor", "image": "other:1"}]}}
    assert "runs the image other:1" in driver.refusal("patch", "pod", "executor", "-p", json.dumps(image))
    assert driver.refusal("patch", "pod", "executor", "-p", '{"metadata": {"annotations": {"seen": "yes"}}}') == ""
    assert driver.refusal("delete", "pod", "executor") == ""


def test_driver_reaches_no_secret_and_no_subresource(driver: Driver) -> None:
    """By the Role alone: the policy is not asked."""
    for words in (["get", "secrets"], ["exec", "other", "--", "true"], ["logs", "other"]):
        assert "is forbidden: User" in driver.refusal(*words)


def test_driver_sees_other_pods(driver: Driver) -> None:
    """Reading cannot be limited: a namespace of its own does it."""
    assert driver.refusal("get", "pod", "other") == ""
