"""Sidecars among each other, and the line protocol on a channel of Redis, one command a message.

Every sidecar relays commands, in both directions, so that they reach the clients of all sidecars. One sidecar alone
announces positions, and only on a channel that is configured (`channel_leader`). Nothing is resent: a command that
comes while Redis is down is lost, as the protocol allows.
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

MAX_QUEUED = 10_000  # commands that wait for Redis
MAX_QUEUED_CHARACTERS = 8 << 20  # of all of them together: one command may have 64 KiB


class Channel:
    """For one event loop. `client` is of redis.asyncio and decodes what it reads.

    Without a `config`, the channel is for relayed commands alone: of the sidecars with one server name, in one database
    of Redis.
    """

    def __init__(self, hub: Hub, server: LineServer, client: Any, config: ChannelConfig | None) -> None:
        self._server = server
        self._client = client
        database = database_of(client)
        if config is not None:
            config = replace(config, channel=in_database(config.channel, database))
        self._name = lines_channel(server.config.name, database) if config is None else config.channel
        self._leader = None if config is None else ChannelLeader(hub, client, config)
        self._outgoing: asyncio.Queue[str] = asyncio.Queue(MAX_QUEUED)
        self._queued = 0  # characters in the queue
        self._echoes: Counter[bytes] = Counter()
        self._log = RepeatedLog(log)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._server.on_relayed = self._send
        coroutines = [listen(self._client, self._subscribe, self._receive), self._publish()]
        if self._leader is not None:
            coroutines.append(self._leader.run())
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                await cancel_until_done(task)

    def _send(self, command: RelayedCommand) -> None:
        line = str(command)
        if self._queued + len(line) > MAX_QUEUED_CHARACTERS:
            return
        with suppress(asyncio.QueueFull):
            self._outgoing.put_nowait(line)
            self._queued += len(line)

    async def _publish(self) -> None:
        problem = None
        while True:
            line = await self._outgoing.get()
            self._queued -= len(line)
            if len(self._echoes) >= MAX_QUEUED:  # this user may publish but not subscribe
                self._echoes.clear()
            self._echoes[_digest(line)] += 1  # before it comes back
            try:
                with translated(self._client):
                    await self._client.publish(self._name, line)
                problem = None
            except (Unavailable, Stop) as error:
                self._is_echo(line)
                if problem is None:
                    log.warning("Relayed commands do not reach other sidecars", channel=self._name, problem=str(error))
                problem = error
                # Commands must not wait until they are old.
                self._outgoing, self._queued = asyncio.Queue(MAX_QUEUED), 0

    async def _subscribe(self, pubsub: Any) -> None:
        await pubsub.subscribe(self._name)
        self._echoes.clear()

    def _receive(self, message: Mapping[str, Any]) -> None:
        line: str = message["data"]
        if line.startswith(("RDATA ", "POSITION ")) or self._is_echo(line):  # from the leader, or from this process
            return
        try:
            command = parse(line.encode())
        except BadCommand as problem:
            self._log.write("info", "Ignored an invalid command on the Redis channel", problem=str(problem))
            return
        match command:
            case ReplicateCommand() if self._leader is not None:
                self._leader.replicate()
            case RelayedCommand():
                self._server.relay(command)

    def _is_echo(self, line: str) -> bool:
        """Whether this process published the line and has not received it yet. This call counts as receiving it."""
        digest = _digest(line)
        count = self._echoes.pop(digest, 0)
        if count > 1:
            self._echoes[digest] = count - 1
        return count > 0


def _digest(line: str) -> bytes:
    """What is stored of a published line until it comes back: thousands of lines of up to 64 KiB may be on the way."""
    return blake2b(line.encode(), digest_size=16).digest()
