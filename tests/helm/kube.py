"""One release on one cluster, by helm and kubectl: what `make kube-test` does to it and asks of it."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helm.tools import run, tool

CLIENT = "client"
PATIENCE = 300.0
_ASK = """
import sys, time, urllib.request
for left in reversed(range(20)):
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())
        break
    except OSError:
        if not left:
            raise
        time.sleep(0.5)
"""


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod as Kubernetes shows it."""

    shown: dict[str, Any]

    @property
    def uid(self) -> str:
        return str(self.shown["metadata"]["uid"])

    @property
    def node(self) -> str | None:
        """None: no node takes it."""
        node: str | None = self.shown["spec"].get("nodeName")
        return node

    @property
    def ready(self) -> bool:
        conditions = self.shown["status"].get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def image(self, container: str) -> str:
        return next(str(one["image"]) for one in self.shown["spec"]["containers"] if one["name"] == container)

    def restarts(self, container: str) -> int:
        return sum(int(one["restartCount"]) for one in self._statuses() if one["name"] == container)

    def waits_for(self, reasons: set[str]) -> bool:
        """Whether a container of it, an init container perhaps, does not run for one of these."""
        return any(one["state"].get("waiting", {}).get("reason") in reasons for one in self._statuses())

    def _statuses(self) -> list[dict[str, Any]]:
        status = self.shown["status"]
        return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


@dataclass(frozen=True, slots=True)
class Kube:
    """`prefix` goes before every command. The release is called like the chart, so all its names begin with `name`."""

    prefix: list[str]
    namespace: str
    chart: Path
    name: str = "tidemark"
    helm_program: str = "helm"
    """A name that helm/tools/install knows: `helm` is helm 3, `helm4` is helm 4."""

    def kubectl(self, *words: str, given: str | None = None) -> str:
        return run(*self._kubectl(), *words, given=given)

    def helm(self, verb: str, *options: str) -> str:
        return run(*self._helm(), verb, self.name, self.chart, *options)

    def helm_fails(self, verb: str, *options: str) -> str:
        """All that helm prints as it fails; an AssertionError where it does not."""
        command = [*self._helm(), verb, self.name, self.chart, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode != 0, f"helm {verb} should have failed: {options}"
        return done.stdout + done.stderr

    def rollback(self) -> None:
        run(*self._helm(), "rollback", self.name)

    def helm_test(self) -> str:
        """The log of the test, which helm prints."""
        return run(*self._helm(), "test", self.name, "--timeout", "5m").strip()

    def uninstalled(self) -> None:
        """Nothing that bears its name is there any more."""
        run(*self._helm(), "uninstall", self.name, "--wait", "--timeout", "3m")
        until(f"the uninstall leaves nothing: {self.left()}", lambda: not self.left())

    def left(self) -> set[str]:
        """What still bears the release's name, of every kind there is."""
        kinds = self.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        label = f"app.kubernetes.io/instance={self.name}"
        found = self.kubectl("get", ",".join(kinds), "-l", label, "-o", "name", "--ignore-not-found")
        return set(found.split())

    def namespace_made(self) -> None:
        self.kubectl("create", "namespace", self.namespace)
        # The strictest of the pod security standards: what breaks it is not admitted.
        self.kubectl("label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")

    def namespace_deleted(self) -> None:
        self.kubectl("delete", "namespace", self.namespace)

    def warnings(self) -> list[str]:
        """The warning events of the namespace, oldest first, without duplicates."""
        words = [
            "get",
            "events",
            "--field-selector=type=Warning",
            "--sort-by=.metadata.creationTimestamp",
            "-o",
            "json",
        ]
        events = json.loads(self.kubectl(*words))["items"]
        objects = [event["involvedObject"] for event in events]
        lines = (
            f"{target['kind']} {target['name']}: {event['reason']}: {event['message'].strip()}"
            for target, event in zip(objects, events, strict=True)
        )
        return list(dict.fromkeys(lines))

    def client(self, image: str) -> None:
        """A pod that lives through it all, from which facts are sent and positions watched."""
        environment = {
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": f"{self.name}-kafka:9092",
            "TIDEMARK_REDIS_URL": f"redis://{self.name}-redis:6379/0",
        }
        container = {
            "name": CLIENT,
            "image": image,
            "command": ["tini", "--", "sleep", "infinity"],
            "env": [{"name": name, "value": value} for name, value in environment.items()],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": CLIENT},
            "spec": {"containers": [container], "enableServiceLinks": False, "terminationGracePeriodSeconds": 0},
        }
        self.kubectl("apply", "-f", "-", given=json.dumps(pod))
        self.kubectl("wait", "--for=condition=Ready", f"pod/{CLIENT}", "--timeout=2m")

    def running(self, *command: str) -> "subprocess.Popen[str]":
        """A command inside the client's pod, whose lines the caller reads."""
        words = [*self._kubectl(), "exec", "-i", CLIENT, "--", *command]
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def over_http(self, path: str) -> dict[str, Any]:
        """What the Service answers, within 10 s: a pod that ends may be asked once more."""
        answer: dict[str, Any] = json.loads(self.in_client("python", "-c", _ASK, f"http://{self.name}{path}"))
        return answer

    def clock(self) -> float:
        """Seconds since 1970, as the client's pod has them."""
        return float(self.in_client("python", "-c", "import time; print(time.time())"))

    def in_client(self, *command: str) -> str:
        return self.kubectl("exec", CLIENT, "--", *command)

    def status(self, stream: str) -> int:
        """The linear position, as Postgres has it; 0 for a stream that it does not know."""
        words = ["exec", f"{self.name}-pipeline-0", "-c", "pipeline", "--", "tidemark", "status", "--json"]
        streams = json.loads(self.kubectl(*words))["streams"]
        return next((int(found["linear"]) for found in streams if found["stream"] == stream), 0)

    def pod(self, name: str) -> PodState | None:
        """None where there is none."""
        text = self.kubectl("get", "pod", name, "-o", "json", "--ignore-not-found")
        return PodState(json.loads(text)) if text.strip() else None

    def living_pod(self, name: str) -> PodState:
        """Waits for one: a StatefulSet's pod is away for a moment before the next of its name."""
        until(f"there is a pod {name}", lambda: self.pod(name) is not None)
        return self.pod(name) or self.living_pod(name)

    def pods(self, component: str, *options: str) -> list[str]:
        """Names of the component's pods. `options` are kubectl's, to select fewer of them."""
        labels = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        return self.kubectl("get", "pods", "-l", labels, *options, "-o", "jsonpath={.items[*].metadata.name}").split()

    def delete_pods(self, names: Sequence[str]) -> None:
        """At once. The processes get no signal before SIGKILL."""
        assert names, "there is no pod to delete"
        self.kubectl("delete", "pod", *names, "--wait=false", "--grace-period=0", "--force")

    def may(self, account: str, verb: str, resource: str) -> bool:
        """Whether RBAC lets a service account of the namespace do this."""
        who = f"--as=system:serviceaccount:{self.namespace}:{account}"
        words = [*self._kubectl(), "auth", "can-i", verb, resource, who]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.stdout.strip() in {"yes", "no"}, done
        return done.stdout.strip() == "yes"

    def has_token(self, container: str) -> bool:
        """Whether a container of the pipeline's pod has a token for the API server."""
        program = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io/serviceaccount/token'))"
        words = ["exec", f"{self.name}-pipeline-0", "-c", container, "--", "python", "-c", program]
        return self.kubectl(*words).strip() == "True"

    def rolled_out(self) -> None:
        """Return when the pipeline's pod is the wanted one, and its query runs."""
        self.kubectl("rollout", "status", f"statefulset/{self.name}-pipeline", "--timeout=5m")

    def kill_process(self, pod: str) -> None:
        """The JVM and all, as when memory runs out: the container starts again in the same pod."""
        program = "import os, signal; os.kill(-1, signal.SIGKILL)"
        words: Sequence[str] = ["exec", pod, "-c", "pipeline", "--", "python", "-c", program]
        subprocess.run([*self._kubectl(), *words], capture_output=True, check=False)  # it kills itself too

    @contextmanager
    def draining(self, node: str, *components: str) -> Iterator[None]:
        """The node takes no pods, and loses those of the components, while this lasts; in the end all have gone."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component in ({','.join(components)})"
        options = ["--pod-selector", selector, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=5m"]
        draining = subprocess.Popen(
            [*self._kubectl(), "drain", node, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield
        finally:
            self.kubectl("uncordon", node)
            out, _ = draining.communicate()
        assert draining.returncode == 0, f"the drain of {node} did not end: {out}"

    def memory(self) -> dict[str, str]:
        """What each container takes, as its kubelet counts it: the working set, and what of that is no file."""
        pods = json.loads(self.kubectl("get", "pods", "-l", f"app.kubernetes.io/instance={self.name}", "-o", "json"))
        found = {}
        for node in sorted({pod["spec"]["nodeName"] for pod in pods["items"]}):
            summary = json.loads(self.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))
            for pod in summary["pods"]:
                if pod["podRef"]["namespace"] == self.namespace and pod["podRef"]["name"].startswith(self.name):
                    for container in pod.get("containers", []):
                        taken = container["memory"]
                        found[f"{pod['podRef']['name']}/{container['name']}"] = (
                            f"{taken['workingSetBytes'] >> 20} MiB, {taken['rssBytes'] >> 20} of it anonymous"
                        )
        return found

    def _helm(self) -> list[str | Path]:
        return [*self.prefix, tool(self.helm_program), "-n", self.namespace]

    def _kubectl(self) -> list[str]:
        return [*self.prefix, "kubectl", "-n", self.namespace]


def until(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE:.0f} s: {what}"
        time.sleep(0.1)
