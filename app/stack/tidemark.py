"""Tidemark's own processes in the local stack: the pipeline, the sidecar, and the demo."""

import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import ClassVar
from urllib.request import urlopen

from tidemark.app.settings import child_environment
from tidemark.app.stack.home import Home
from tidemark.app.stack.server import LOOPBACK, Server


class _Command(Server):
    """`tidemark <name>` with the settings of this stack in its environment."""

    def __init__(self, home: Home, port: int, variables: Mapping[str, str]) -> None:
        super().__init__(home, port)
        self._variables = variables

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "tidemark.app.cli", self.name]

    def environment(self) -> Mapping[str, str]:
        return child_environment(self._variables)


class Pipeline(_Command):
    """`port` is that of its /metrics."""

    name: ClassVar[str] = "pipeline"
    patience: ClassVar[float] = 90.0

    def answers(self) -> bool:
        """Whether it reads and publishes: it answers before that, while it waits for a server or for the lease."""
        try:
            with urlopen(f"http://{LOOPBACK}:{self.port}/metrics", timeout=1) as response:
                return b"\ntidemark_pipeline_ready 1.0" in response.read()
        except (OSError, HTTPException):
            return False


class Sidecar(_Command):
    """`port` is that of its HTTP side."""

    name: ClassVar[str] = "sidecar"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def answers(self) -> bool:
        """Whether it is ready: Redis or Postgres answers it."""
        try:
            with urlopen(f"{self.url}/readyz", timeout=1) as response:
                return bool(response.status == 200)
        except (OSError, HTTPException):
            return False


class Demo(_Command):
    """Serves nothing; its port is 0."""

    name: ClassVar[str] = "simulate"

    def answers(self) -> bool:
        return self.running
