"""Redis in its other forms: a primary with a replica behind a Sentinel, and a Cluster of three."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import SystemRandom

import pytest

from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import LOOPBACK, RedisServer, ServerProcess, free_port, port_problem, redis_program


class Node(RedisServer):
    """One of several servers; `options` are settings of redis-server."""

    def __init__(self, home: Home, name: str, port: int, **options: str) -> None:
        super().__init__(home, port)
        self.name = name  # type: ignore[misc]
        self._options = options

    def command(self) -> Sequence[str]:
        more = [word for key, value in self._options.items() for word in (f"--{key.replace('_', '-')}", *value.split())]
        return [*super().command(), *more]

    def cli(self, *words: str) -> str:
        return cli(self.port, *words)

    def whole(self) -> bool:
        """Whether all parts of its Cluster are there, as it sees it."""
        return "cluster_state:ok" in self.cli("cluster", "info")


class Watchman(RedisServer):
    """A Sentinel that alone decides about `main`."""

    def __init__(self, home: Home, primary: Node) -> None:
        super().__init__(home, free_port())
        self.name = "sentinel"  # type: ignore[misc]
        self._conf = home.data("sentinel") / "sentinel.conf"
        self._conf.write_text(
            f"port {self.port}\nbind {LOOPBACK}\ndir {home.data('sentinel')}\n"
            f"sentinel monitor main {LOOPBACK} {primary.port} 1\n"
            "sentinel down-after-milliseconds main 3000\nsentinel failover-timeout main 2000\n"
        )

    def command(self) -> Sequence[str]:
        return [redis_program("redis-server"), str(self._conf), "--sentinel"]


@dataclass(frozen=True)
class SentinelSetup:
    sentinel: Watchman
    primary: Node
    replica: Node


def cli(port: int, *words: str) -> str:
    command = [redis_program("redis-cli"), "-h", LOOPBACK, "-p", str(port), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


@contextmanager
def _all_started(servers: Sequence[ServerProcess]) -> Iterator[None]:
    with ExitStack() as stack:
        for server in servers:
            server.start()
            stack.callback(server.stop)
        yield


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[SentinelSetup]:
    """Of one test's own: a failover cannot be taken back."""
    home = Home(tmp_path / "watched")
    primary = Node(home, "redis-primary", free_port())
    replica = Node(home, "redis-replica", free_port(), replicaof=f"{LOOPBACK} {primary.port}")
    sentinel = Watchman(home, primary)
    with _all_started([primary, replica, sentinel]):
        eventually(lambda: "slaves=1" in _about(sentinel), what=lambda: _about(sentinel))
        yield SentinelSetup(sentinel, primary, replica)


def _about(sentinel: Watchman) -> str:
    return cli(sentinel.port, "info", "sentinel")


@pytest.fixture(scope="session")
def redis_cluster(home: Home) -> Iterator[list[Node]]:
    """Three primaries."""
    ports = islice(_node_ports(), 3)
    nodes = [Node(home, f"redis-node-{n}", port, cluster_enabled="yes") for n, port in enumerate(ports)]
    with _all_started(nodes):
        addresses = [f"{LOOPBACK}:{node.port}" for node in nodes]
        subprocess.run(
            [redis_program("redis-cli"), "--cluster", "create", *addresses, "--cluster-yes"],
            check=True,
            capture_output=True,
            timeout=60,
        )
        for node in nodes:
            eventually(node.whole, what=lambda: "a whole Cluster")
        yield nodes


def _node_ports() -> Iterator[int]:
    """Different ones. A node takes the port 10 000 above its own too; nobody else is lent or draws either of them."""
    for port in SystemRandom().sample(range(5_000, 10_000), 5_000):
        if port_problem(port) is None and port_problem(port + 10_000) is None:
            yield port
