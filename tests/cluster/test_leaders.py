"""The pipeline on three brokers of which one after the other dies, with both readers. Run by `make cluster-test`."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from tests.app.running import PATIENCE
from tests.fix_pipeline import Site, made_site
from tests.jvm_classes import ArchivedKafka
from tests.play.cast import Cast
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import LOOPBACK, RedisServer, free_port
from tidemark.app.stack.up import BROKER

CLUSTER = "TAAAAAAAAAAAAAAAAAAAAA"
ALL = 3


class ReplicatedKafka(ArchivedKafka):
    """One of three that hold the same; `controllers` are the ports of all."""

    def join(self, number: int, controllers: list[int]) -> None:
        self.name = f"kafka-{number}"  # type: ignore[misc]
        self._properties = self.home.data(self.name) / "server.properties"
        self._number, self._controllers = number, controllers

    def prepare(self) -> None:
        logs = self.home.data(self.name) / "logs"
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in self._settings(logs).items()))
        if not (logs / "meta.properties").exists():
            arguments = ["format", "-t", CLUSTER, "-c", str(self._properties)]
            self.run_preparation([*self._jvm(), "kafka.tools.StorageTool", *arguments])

    def answers(self) -> bool:
        return True  # it does when two of them run

    def ready(self) -> bool:
        return super().answers()

    def _settings(self, logs: Path) -> dict[str, str | int]:
        settings = super()._settings(logs)
        del settings["controller.quorum.bootstrap.servers"]
        own = self._controllers[self._number - 1]
        voters = ",".join(f"{number}@{LOOPBACK}:{port}" for number, port in enumerate(self._controllers, 1))
        return settings | {
            "node.id": self._number,
            "listeners": f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{LOOPBACK}:{own}",
            "controller.quorum.voters": voters,
            "default.replication.factor": ALL,
            "min.insync.replicas": 2,
            "offsets.topic.replication.factor": ALL,
        }


@pytest.fixture
def brokers(java: str, jars: Path, archived: list[str], tmp_path: Path) -> Iterator[list[ReplicatedKafka]]:
    home = Home(tmp_path / "brokers")
    ports = [free_port() for _ in range(ALL)]
    brokers = [ReplicatedKafka(home, free_port(), java=java, jars=jars / BROKER, options=archived) for _ in range(ALL)]
    for number, broker in enumerate(brokers, 1):
        broker.join(number, ports)
        broker.start()
    eventually(lambda: all(broker.ready() for broker in brokers), PATIENCE)
    yield brokers
    for broker in brokers:
        broker.stop(5)


def in_sync(site: Site) -> bool:
    """Whether every broker holds all that any of them has."""
    topics = AdminClient(site.kafka.client_settings()).list_topics(timeout=5).topics.values()
    return all(len(partition.isrs) == ALL for topic in topics for partition in topic.partitions.values())


class _Together:
    """All brokers as one address."""

    def __init__(self, brokers: list[ReplicatedKafka]) -> None:
        self.bootstrap_servers = ",".join(broker.bootstrap_servers for broker in brokers)


def test_leaders_that_die_cost_time_and_no_record(
    brokers: list[ReplicatedKafka],
    postgres: PostgresServer,
    redis_server: RedisServer,
    warm_jvm: None,
    tmp_path: Path,
) -> None:
    """Rules 1, 3 and 5: every broker is killed in turn while facts flow, so that each partition changes its leader, and
    comes back; positions are those of the truth in the end, after each of them."""
    with made_site(_Together(brokers), postgres, redis_server, tmp_path) as site:  # type: ignore[arg-type]
        play = site.play(5, Cast(streams=6, writers=3, rate=100.0))
        site.start().ready()
        now = 0.0
        for broker in brokers:
            for _ in range(20):
                now += 0.25
                play.until(now)
                time.sleep(0.25)
            broker.kill()
            for _ in range(20):
                now += 0.25
                play.until(now)
                time.sleep(0.25)
            site.shows(play)
            broker.start()
            eventually(lambda: in_sync(site), PATIENCE, lambda: "all brokers hold everything again")
        play.end()
        site.shows(play)
