"""Spark's executors in processes of their own, on a standalone cluster or in pods: settings, and the code sent to them.

Nothing here counts for a local master. Executors need a Python with our dependencies; our own code is sent to them, so
that it is always that of the driver.
"""

import socket
import zipfile
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from urllib.parse import urlsplit

SETTINGS = {
    "spark.driver.bindAddress": "0.0.0.0",
    # Half of the executors would get all of the states if a query began before the others are there.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    # Executors have logs of their own; there, too, only errors are of interest.
    "spark.log.level": "ERROR",
    "spark.executor.syncLogLevel.enabled": "true",
}

# Where a shard's state lies on the disk of the executor that holds it (streaming.engine.checkpoint).
APART = {
    # A task that does not wait for a busy executor fails the query elsewhere. One that is dead is waited for, too, on
    # two levels, while another lives: so the pipeline looks itself who lives (app.engine).
    "spark.locality.wait": "60s",
    # An executor that is taken away takes states with it, so the number stays.
    "spark.dynamicAllocation.enabled": "false",
}


@dataclass(frozen=True, slots=True)
class Pods:
    """Executors on Kubernetes. `driver_pod` is the pod that we run in, None outside of one: executors end with it."""

    image: str | None = None
    namespace: str | None = None
    service_account: str | None = None
    template: Path | None = None
    driver_pod: str | None = None

    def settings(self) -> dict[str, str]:
        wanted = {
            "container.image": self.image,
            "namespace": self.namespace,
            "authenticate.executor.serviceAccountName": self.service_account,
            "executor.podTemplateFile": self.template,
            "driver.pod.name": self.driver_pod,
        }
        return {f"spark.kubernetes.{name}": str(value) for name, value in wanted.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Executors of `cores` and `memory` (the heap, as `1g`) each, at any master that is not local.

    `driver_host` is the name by which they reach us; ports of 0 are any free ones. `store`: the checkpoint is where all
    reach it (streaming.engine.checkpoint), and Spark may have up to `most` executors while there is work for them.
    """

    driver_host: str
    executors: int
    cores: int
    memory: str
    driver_port: int = 0
    block_manager_port: int = 0
    pods: Pods = Pods()
    store: bool = False
    most: int | None = None

    @property
    def slots(self) -> int:
        """Tasks that run at once, at most."""
        return (self.most or self.executors) * self.cores

    def settings(self) -> dict[str, str]:
        return {
            **SETTINGS,
            **({} if self.store else APART),
            **self._number(),
            "spark.driver.host": self.driver_host,
            "spark.driver.port": str(self.driver_port),
            "spark.blockManager.port": str(self.block_manager_port),
            "spark.executor.cores": str(self.cores),
            "spark.executor.memory": self.memory,
            "spark.cores.max": str(self.slots),
            **self.pods.settings(),
        }

    def _number(self) -> dict[str, str]:
        if self.most is None:
            return {"spark.executor.instances": str(self.executors)}
        return {
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.minExecutors": str(self.executors),
            "spark.dynamicAllocation.maxExecutors": str(self.most),
            # There is no shuffle service: who holds shuffled data stays until that is not needed any more.
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        }


def package(directory: Path) -> Path:
    """Write what executors import of Tidemark, the packages `common` and `streaming`, to a zip file in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / "tidemark.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("tidemark/__init__.py", "")
        for name in ("common", "streaming"):
            _add(packed, files("tidemark").joinpath(name), f"tidemark/{name}")
    return archive


def _add(archive: zipfile.ZipFile, package: Traversable, path: str) -> None:
    for entry in package.iterdir():
        if entry.is_dir():
            _add(archive, entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".py"):
            archive.writestr(f"{path}/{entry.name}", entry.read_bytes())


def address_towards(master: str) -> str:
    """The address of ours from which the host of `master` is reached; raises OSError where its name is unknown."""
    # Of several masters (spark://one:7077,two:7077) the first will do: the kernel looks up a route, nothing is sent.
    first = urlsplit(master.removeprefix("k8s://").split(",")[0])
    family, kind, protocol, _, address = socket.getaddrinfo(first.hostname, first.port or 443, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
