"""A Kafka broker of the local stack: one KRaft process, broker and controller in one."""

import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import ClassVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tidemark.app.stack.home import Home
from tidemark.app.stack.server import LOOPBACK, Server, free_port, listens

_JVM = ["-Xmx512m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true"]


class Kafka(Server):
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
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in self._settings(logs).items()))
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
