"""The line protocol on one channel of Redis, a command a message.

Every sidecar relays commands, in both directions; positions are announced by one alone (`speaker`). Nothing is resent:
a command that came while Redis was away is lost, as the protocol allows.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from tidemark.app.lines.commands import RelayedCommand, ReplicateCommand, parse
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LineServer
from tidemark.app.lines.speaker import ChannelConfig, Speaker
from tidemark.app.read_side.notifications import listen
from tidemark.app.read_side.tasks import ended
from tidemark.sinks.reader.redis import translated
from tidemark.streaming.errors import BadCommand, Stop, Unavailable

log = structlog.get_logger(__name__)

WAITING = 10_000  # commands that may wait for Redis


class Channel:
    """For one event loop; `client` is of redis.asyncio and decodes what it reads."""

    def __init__(self, hub: Hub, server: LineServer, client: Any, config: ChannelConfig) -> None:
        self._server = server
        self._client = client
        self._name = config.channel
        self._speaker = Speaker(hub, client, config)
        self._outgoing: asyncio.Queue[RelayedCommand] = asyncio.Queue(WAITING)
        self._echoes: Counter[str] = Counter()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._server.on_relayed = self._send
        listening = listen(self._client, self._subscribe, self._receive)
        tasks = [asyncio.create_task(it) for it in (listening, self._publish(), self._speaker.run())]
        try:
            yield
        finally:
            for task in tasks:
                await ended(task)

    def _send(self, command: RelayedCommand) -> None:
        with suppress(asyncio.QueueFull):
            self._outgoing.put_nowait(command)

    async def _publish(self) -> None:
        while True:
            line = str(await self._outgoing.get())
            self._echoes[line] += 1  # before it comes back to us
            try:
                with translated(self._client):
                    await self._client.publish(self._name, line)
            except (Unavailable, Stop) as problem:
                self._is_echo(line)
                log.warning("A relayed command did not reach the channel of Redis", problem=str(problem))

    async def _subscribe(self, pubsub: Any) -> None:
        await pubsub.subscribe(self._name)
        self._echoes.clear()

    def _receive(self, message: Mapping[str, Any]) -> None:
        line: str = message["data"]
        if line.startswith(("RDATA ", "POSITION ")) or self._is_echo(line):  # the speaker's, or our own
            return
        try:
            command = parse(line.encode())
        except BadCommand as problem:
            log.info("Something on the channel of Redis is no command", problem=str(problem))
            return
        match command:
            case ReplicateCommand():
                self._speaker.replicate()
            case RelayedCommand():
                self._server.relay(command)

    def _is_echo(self, line: str) -> bool:
        """Whether it is one that we published and have not received yet; this call receives it."""
        count = self._echoes.pop(line, 0)
        if count > 1:
            self._echoes[line] = count - 1
        return count > 0
