"""A pipeline whose servers, driver and executors have IPv6 addresses only, as in a cluster without IPv4.

Run by test_ipv6.py in namespaces of its own: python -m tests.helm.ipv6_pipeline DIRECTORY local|executors. There is no
IPv4 but 127.0.0.1, which the kernel gives to the loopback interface of every pod, and which Spark needs.
"""

import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from msgspec import Raw

from tests.cluster import standalone
from tests.fix_pipeline import Site, made_site
from tidemark.app.settings import load
from tidemark.app.stack import postgres, processes
from tidemark.app.stack.home import Home
from tidemark.app.stack.up import BROKER
from tidemark.app.versions import find_java
from tidemark.streaming.wire.records import Rdata

ADDRESS = "fd00::5"
NAME = "six"
"""A name with ADDRESS and no other, in /etc/hosts of the namespace. It is the host name too, as in a pod."""


class OpenPostgres(postgres.PostgresServer):
    """Lets in clients of every address, with the password."""

    def prepare(self) -> None:
        super().prepare()
        with (self.data / "pg_hba.conf").open("a") as clients:
            clients.write("host all all all scram-sha-256\n")


class NumericRedis(processes.RedisServer):
    """Redis looks for the IPv4 address of a name that it is to listen at."""

    def command(self) -> Sequence[str]:
        return [ADDRESS if word == NAME else word for word in super().command()]


def listens(port: int) -> bool:
    try:
        socket.create_connection((NAME, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def use_ipv6() -> None:
    """The servers of the tests listen at ADDRESS, and their clients are given NAME."""
    for module in (processes, postgres, standalone):
        module.LOOPBACK = NAME  # type: ignore[attr-defined]
        module.listens = listens  # type: ignore[attr-defined]
    processes.port_problem = lambda port: None


def positions_move(site: Site, **settings: Any) -> None:
    """Each fact needs the one before. With executors, their addresses are in the log."""
    running = site.start(shards=2, metrics_host="::", **settings).ready()
    for id in (1, 2, 3):
        site.send(Rdata(stream="parcels", writer="depot", id=id, prev=id - 1, row=Raw(b"{}")))
        site.reaches("parcels", depot=id, linear=id)
    running.terminate()


def main(directory: Path, spark: str) -> None:
    use_ipv6()
    home, java = Home(directory), find_java(load().java_home)
    kafka = processes.KafkaServer(home, 19092, java=java, jars=Home(load().home).jars / BROKER)
    database, redis = OpenPostgres(home, 15432), NumericRedis(home, 16379)
    (directory / "site").mkdir()
    with ExitStack() as running:
        for server in (kafka, database, redis):
            server.start()
            running.callback(server.stop)
        site = running.enter_context(made_site(kafka, database, redis, directory / "site"))
        if spark == "executors":
            site.checkpoint.mkdir(parents=True)
            master = standalone.Master(home, 17077)
            worker = standalone.ClusterWorker(home, master, 1, site.checkpoint)
            for process in (master, worker):
                process.start()
                running.callback(process.stop)
            positions_move(site, spark_master=master.url, spark_executor_memory="512m", spark_executors=1)
        else:
            positions_move(site)
    click.echo("positions moved without IPv4")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
