"""One release on one cluster, by helm and kubectl: what `make kube-test` does to it and asks of it."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helm.tools import run, tool

CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Kube:
    """`prefix` goes before every command. The release is called like the chart, so all its names begin with `name`."""

    prefix: list[str]
    namespace: str
    chart: Path
    name: str = "tidemark"

    def kubectl(self, *words: str, given: str | None = None) -> str:
        return run(*self._kubectl(), *words, given=given)

    def helm(self, verb: str, *options: str) -> str:
        return run(*self.prefix, tool("helm"), "-n", self.namespace, verb, self.name, self.chart, *options)

    def rollback(self) -> None:
        run(*self.prefix, tool("helm"), "-n", self.namespace, "rollback", self.name)

    def helm_test(self) -> str:
        run(*self.prefix, tool("helm"), "-n", self.namespace, "test", self.name, "--timeout", "3m")
        return self.kubectl("logs", f"{self.name}-test").strip()

    def uninstall(self) -> None:
        run(*self.prefix, tool("helm"), "-n", self.namespace, "uninstall", self.name, "--wait", "--timeout", "3m")

    def left(self) -> str:
        """What still bears the release's name. Test pods are helm's to keep, for their logs."""
        kinds = "statefulset,deployment,service,job,configmap,secret,serviceaccount,pvc,networkpolicy"
        return self.kubectl("get", kinds, "-l", f"app.kubernetes.io/instance={self.name}", "-o", "name").strip()

    def namespace_made(self) -> None:
        self.kubectl("create", "namespace", self.namespace)
        # The strictest of the pod security standards: what breaks it is not admitted.
        self.kubectl("label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")

    def namespace_deleted(self) -> None:
        self.kubectl("delete", "namespace", self.namespace)

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

    def over_http(self, stream: str) -> tuple[int, dict[str, int]]:
        """Linear position and vector, as the Service answers."""
        url = f"http://{self.name}/v1/streams/{stream}"
        program = f"from urllib.request import urlopen; print(urlopen({url!r}, timeout=10).read().decode())"
        answer: dict[str, Any] = json.loads(self.kubectl("exec", CLIENT, "--", "python", "-c", program))
        return answer["linear"], answer["vector"]

    def status(self, stream: str) -> int:
        """The linear position, as Postgres has it."""
        words = ["exec", f"{self.name}-pipeline-0", "-c", "pipeline", "--", "tidemark", "status", stream, "--json"]
        return int(json.loads(self.kubectl(*words))["streams"][0]["linear"])

    def delete_pod(self, pod: str, *how: str) -> None:
        self.kubectl("delete", "pod", pod, "--wait=false", *how)

    def rolled_out(self) -> None:
        """Return when the pipeline's pod is the wanted one, and its query runs."""
        self.kubectl("rollout", "status", f"statefulset/{self.name}-pipeline", "--timeout=5m")

    def kill_process(self, pod: str) -> None:
        """The JVM and all, as when memory runs out: the container starts again in the same pod."""
        program = "import os, signal; os.kill(-1, signal.SIGKILL)"
        words: Sequence[str] = ["exec", pod, "-c", "pipeline", "--", "python", "-c", program]
        subprocess.run([*self._kubectl(), *words], capture_output=True, check=False)  # it kills itself too

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

    def _kubectl(self) -> list[str]:
        return [*self.prefix, "kubectl", "-n", self.namespace]
