"""Sidecars among each other, and the line protocol on a channel of Redis, a command a message.

Every sidecar relays commands, in both directions, so that they reach the clients of all; positions are announced by one
alone, and only on a channel that was asked for (`speaker`). Nothing is resent: a command that came while Redis was away
is lost, as the protocol allows.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from tidemark.app.lines.channel_leader import ChannelConfig, ChannelLeader
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LineServer
from tidemark.app.logs import RepeatedLog
from tidemark.app.read_side.notifications import listen
from tidemark.app.read_side.single_flight import cancel_until_done
from tidemark.common.errors import BadCommand, Stop, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.reader import translated
from tidemark.sinks.redis.client import database_of, in_database, lines_channel
from tidemark.streaming.wire.line_protocol import RelayedCommand, ReplicateCommand, parse

log = get_logger(__name__)

WAITING = 10_000  # commands that may wait for Redis
WAITING_CHARACTERS = 8 << 20  # of all of these together: one command may have 64 KiB


class Channel:
    """For one event loop; `client` is of redis.asyncio and decodes what it reads. Without a `config` it is a channel of
    the sidecars' own, for what they relay: of those that call themselves by one name, in one database of Redis."""

    def __init__(self, hub: Hub, server: LineServer, client: Any, config: ChannelConfig | None) -> None:
        self._server = server
        self._client = client
        database = database_of(client)
        if config is not None:
            config = replace(config, channel=in_database(config.channel, database))
        self._name = lines_channel(server.config.name, database) if config is None else config.channel
        self._speaker = None if config is None else ChannelLeader(hub, client, config)
        self._outgoing: asyncio.Queue[str] = asyncio.Queue(WAITING)
        self._waiting = 0  # characters in the queue
        self._echoes: Counter[bytes] = Counter()
        self._log = RepeatedLog(log)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._server.on_relayed = self._send
        coroutines = [listen(self._client, self._subscribe, self._receive), self._publish()]
        if self._speaker is not None:
            coroutines.append(self._speaker.run())
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                await cancel_until_done(task)

    def _send(self, command: RelayedCommand) -> None:
        line = str(command)
        if self._waiting + len(line) > WAITING_CHARACTERS:
            return
        with suppress(asyncio.QueueFull):
            self._outgoing.put_nowait(line)
            self._waiting += len(line)

    async def _publish(self) -> None:
        problem = None
        while True:
            line = await self._outgoing.get()
            self._waiting -= len(line)
            if len(self._echoes) >= WAITING:  # we may publish, and not subscribe
                self._echoes.clear()
            self._echoes[_digest(line)] += 1  # before it comes back to us
            try:
                with translated(self._client):
                    await self._client.publish(self._name, line)
                problem = None
            except (Unavailable, Stop) as error:
                self._is_echo(line)
                if problem is None:
                    log.warning("Relayed commands do not reach other sidecars", channel=self._name, problem=str(error))
                problem = error
                # A server that is deaf must not make them old.
                self._outgoing, self._waiting = asyncio.Queue(WAITING), 0

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
            self._log.write("info", "Something on the channel of Redis is no command", problem=str(problem))
            return
        match command:
            case ReplicateCommand() if self._speaker is not None:
                self._speaker.replicate()
            case RelayedCommand():
                self._server.relay(command)

    def _is_echo(self, line: str) -> bool:
        """Whether it is one that we published and have not received yet; this call receives it."""
        digest = _digest(line)
        count = self._echoes.pop(digest, 0)
        if count > 1:
            self._echoes[digest] = count - 1
        return count > 0


def _digest(line: str) -> bytes:
    """What is kept of a published line until it comes back: thousands, of up to 64 KiB each, may be under way."""
    return blake2b(line.encode(), digest_size=16).digest()
