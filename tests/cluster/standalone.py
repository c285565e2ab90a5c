"""A Spark standalone cluster from the pip package alone: a master and workers, each as on its own host."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import psutil

from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import LOOPBACK, ServerProcess, find_process, free_port, listens


def spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class _SparkServer(ServerProcess):
    max_idle_seconds: ClassVar[float] = 60.0

    def answers(self) -> bool:
        return listens(self.port)

    def environment(self) -> Mapping[str, str]:
        """Nothing of ours is on the path of Python: what an executor imports of Tidemark was sent to it."""
        foreign = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return foreign | {"SPARK_HOME": str(spark_home()), "SPARK_LOCAL_IP": LOOPBACK, "SPARK_NO_DAEMONIZE": "1"}

    def spark_class(self, name: str, *arguments: str) -> Sequence[str]:
        return [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]


class Master(_SparkServer):
    name: ClassVar[str] = "spark-master"

    @property
    def url(self) -> str:
        return f"spark://{LOOPBACK}:{self.port}"

    def command(self) -> Sequence[str]:
        ports = ["--port", str(self.port), "--webui-port", "0"]
        return self.spark_class("master.Master", "--host", LOOPBACK, *ports)


class ClusterWorker(_SparkServer):
    """One core. `unseen` is a folder that looks empty to it, and whose files of its own nobody else sees: a disk."""

    def __init__(self, home: Home, master: Master, number: int, unseen: Path) -> None:
        super().__init__(home, free_port())
        self.name = f"spark-worker-{number}"  # type: ignore[misc]
        self._master = master
        self._unseen = unseen

    def command(self) -> Sequence[str]:
        work = ["--work-dir", str(self.home.data(self.name)), "--webui-port", "0"]
        size = ["--cores", "1", "--memory", "1g", "--host", LOOPBACK, "--port", str(self.port)]
        java = shlex.join(self.spark_class("worker.Worker", *work, *size, self._master.url))
        disk = f"mount -t tmpfs tmpfs {shlex.quote(str(self._unseen))} && exec {java}"
        return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "sh", "-c", disk]

    @property
    def executors(self) -> int:
        """How many it runs now."""
        process, found = find_process(self.home, self.name), 0
        for child in [] if process is None else process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += "org.apache.spark.executor.CoarseGrainedExecutorBackend" in child.cmdline()
        return found

    def crash(self) -> None:
        """What happens when a host loses power: worker, executors and their Python workers are gone at once."""
        process = find_process(self.home, self.name)
        assert process is not None
        for victim in [process, *process.children(recursive=True)]:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue
        self.kill()
