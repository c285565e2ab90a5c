"""Spark's executors in separate processes, on a standalone cluster or in pods: their settings and Tidemark's code.

Not used with a local master. Executors need a Python with Tidemark's dependencies. The driver sends Tidemark's code to
the executors, so that all run the same version.
"""

import socket
import zipfile
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from urllib.parse import urlsplit

SETTINGS = {
    # Java listens on IPv6 too, if the host has it.
    "spark.driver.bindAddress": "0.0.0.0",
    # Start tasks when all executors have registered, or after 30 s. Otherwise the first executors would get all states.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    # Executors write their own logs.
    "spark.log.level": "ERROR",
    "spark.executor.syncLogLevel.enabled": "true",
}

# For a checkpoint without a store: a shard's state is on its executor's disk (streaming.engine.checkpoint).
LOCAL_STATE_SETTINGS = {
    # A task on another executor would not find its state, and the query would fail. So tasks wait for their executor.
    # Spark also waits for dead executors, so the pipeline checks for them (app.pipeline.engine).
    "spark.locality.wait": "60s",
    # Removing an executor would lose its states.
    "spark.dynamicAllocation.enabled": "false",
}


@dataclass(frozen=True, slots=True)
class Pods:
    """The settings of executors on Kubernetes. If an attribute is None, Spark's default applies.

    Attributes:
        image: the container image of the executors.
        namespace: the namespace of the executors' pods.
        service_account: the service account of the executors.
        template: path of the template of the executors' pods.
        driver_pod: the pod of this process, if there is one. Kubernetes deletes the executors with this pod.
    """

    image: str | None = None
    namespace: str | None = None
    service_account: str | None = None
    template: Path | None = None
    driver_pod: str | None = None

    def settings(self) -> dict[str, str]:
        options = {
            "container.image": self.image,
            "namespace": self.namespace,
            "authenticate.executor.serviceAccountName": self.service_account,
            "executor.podTemplateFile": self.template,
            "driver.pod.name": self.driver_pod,
        }
        return {f"spark.kubernetes.{name}": str(value) for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Cluster:
    """The settings of executors at a master that is not local.

    Attributes:
        driver_host: the name by which executors reach this process.
        executor_count: the number of executors; the smallest number if `max_executors` is set.
        cores_per_executor: CPU cores of each executor.
        memory: the Java heap of each executor, in Spark's notation (`1g`).
        driver_port: the port of the driver; 0 for any free port.
        block_manager_port: the port of each block manager; 0 for any free port.
        pods: how executors run on Kubernetes; ignored for other masters.
        has_store: True if the checkpoint is in a store that all executors reach (streaming.engine.checkpoint).
        max_executors: the largest number of executors that Spark may start for more work. Needs a store.
    """

    driver_host: str
    executor_count: int
    cores_per_executor: int
    memory: str
    driver_port: int = 0
    block_manager_port: int = 0
    pods: Pods = Pods()
    has_store: bool = False
    max_executors: int | None = None

    @property
    def slots(self) -> int:
        """The largest number of tasks that run at once."""
        return (self.max_executors or self.executor_count) * self.cores_per_executor

    def settings(self) -> dict[str, str]:
        return {
            **SETTINGS,
            **({} if self.has_store else LOCAL_STATE_SETTINGS),
            **self._executor_count_settings(),
            "spark.driver.host": _uri_host(self.driver_host),
            "spark.driver.port": str(self.driver_port),
            "spark.blockManager.port": str(self.block_manager_port),
            "spark.executor.cores": str(self.cores_per_executor),
            "spark.executor.memory": self.memory,
            "spark.cores.max": str(self.slots),
            **self.pods.settings(),
        }

    def _executor_count_settings(self) -> dict[str, str]:
        if self.max_executors is None:
            return {"spark.executor.instances": str(self.executor_count)}
        return {
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.minExecutors": str(self.executor_count),
            "spark.dynamicAllocation.maxExecutors": str(self.max_executors),
            # Without a shuffle service, an executor must stay until its shuffled data is no longer needed.
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        }


def write_code_archive(directory: Path) -> Path:
    """Write the packages that executors import, `common` and `streaming`, to a zip file in `directory`.

    Creates the directory. Replaces an existing file.

    Returns:
        The path of the zip file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / "tidemark.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("tidemark/__init__.py", "")
        for name in ("common", "streaming"):
            _add(file, files("tidemark").joinpath(name), f"tidemark/{name}")
    return archive


def _add(archive: zipfile.ZipFile, package: Traversable, path: str) -> None:
    for entry in package.iterdir():
        if entry.is_dir():
            _add(archive, entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".py"):
            archive.writestr(f"{path}/{entry.name}", entry.read_bytes())


def _uri_host(host: str) -> str:
    """`host`, in brackets if it is an IPv6 address, as Spark requires."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def local_address_for(master: str) -> str:
    """The local address from which this host sends packets to `master`. Does not contact `master`.

    Raises:
        OSError: the host name is unknown, or there is no route to its address.
    """
    # Uses the first of several masters (spark://one:7077,two:7077). `connect` of a UDP socket sends no packet.
    first = urlsplit(master.removeprefix("k8s://").split(",")[0])
    family, kind, protocol, _, address = socket.getaddrinfo(first.hostname, first.port or 443, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
