"""The line protocol on a Redis channel, one command per message, between sidecars and their clients.

Every sidecar relays commands between the channel and its clients, so that a command reaches the clients of all
sidecars. On a configured channel, one sidecar, the leader, also announces positions. Commands are not resent: a command
that is sent while Redis is down is lost, which the protocol allows.

The leader answers REPLICATE. It has a lease in Redis, and publishes announcements by a script that checks the lease. So
two sidecars never announce at the same time, even if one of them was frozen and continues later. The script also stores
the announced positions of writers for the next leader. The next leader begins with a POSITION for every writer, which
makes subscribers at a lower position fetch the missing rows.
"""

import asyncio
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.resources import files
from typing import Any

import msgspec
from redis.asyncio.lock import Lock
from redis.exceptions import LockNotOwnedError, RedisError

from tidemark.app.lines.hub import FORGET_INTERVAL_SECONDS, Hub
from tidemark.app.lines.rows import AnnouncedPositions, Announcement, Writer
from tidemark.app.lines.server import LineServer
from tidemark.app.logs import RepeatedLog
from tidemark.app.read_side import metrics
from tidemark.app.read_side.redis_reader import listen
from tidemark.common.errors import BadCommand, Stop, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.tasks import cancel_until_done
from tidemark.sinks.reader import translate_errors
from tidemark.sinks.redis.client import channel_in_database, database_of, hash_tag, lines_channel
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand, RelayedCommand, ReplicateCommand, parse

log = get_logger(__name__)

LINES_PER_CALL = 500  # about; a call of the script blocks other clients of Redis
ANSWER_INTERVAL_SECONDS = 0.5  # between two answers to REPLICATE; an answer is for all REPLICATE commands before it

_SCRIPT = files("tidemark.app.lines").joinpath("announce.lua").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """A configured channel.

    Attributes:
        channel: the name of the Redis channel.
        lease_seconds: the time to live of the lease. If the leader is killed, no sidecar announces until the lease
            expires.
    """

    channel: str
    lease_seconds: float = 3.0


class _LeadershipLost(Exception):
    """This sidecar no longer has the lease."""


class ChannelLeader:
    """Tries to get the lease of the channel, and announces positions while this sidecar has the lease. For one event
    loop. `client`: a redis.asyncio client.
    """

    def __init__(self, hub: Hub, client: Any, config: ChannelConfig) -> None:
        self._hub = hub
        self._client = client
        self._config = config
        self._token = uuid.uuid4().hex
        self._keys = [f"tidemark:lines:{hash_tag(config.channel)}:{name}" for name in ("leader", "announced")]
        self._lock = Lock(client, self._keys[0], timeout=config.lease_seconds, blocking=False, thread_local=False)
        self._publish_script = client.register_script(_SCRIPT)
        self._announcements: deque[Announcement] = deque()
        self._wake = asyncio.Event()
        self._are_positions_requested = False  # whether a REPLICATE is not answered yet
        self._positions_sent_at = 0.0

    def request_positions(self) -> None:
        """Send all positions soon, or when this sidecar becomes the leader."""
        self._are_positions_requested = True
        self._wake.set()

    async def run(self) -> None:
        """Try to get the lease, and lead the channel while this sidecar has the lease. Tries again after an error of
        Redis, and after a loss of the lease. Does not return.
        """
        problem = None
        while True:
            try:
                with translate_errors(self._client):
                    if await self._lock.acquire(token=self._token):
                        await self._lead()
                problem = None
            except _LeadershipLost:
                log.info("This sidecar no longer leads the Redis channel", channel=self._config.channel)
            except (Unavailable, Stop) as error:
                if problem is None:
                    log.warning("Cannot lead the Redis channel; trying again", problem=str(error))
                problem = error
            await asyncio.sleep(self._config.lease_seconds / 3)

    async def _lead(self) -> None:
        log.info(
            "This sidecar is now the leader: it sends announcements on the Redis channel", channel=self._config.channel
        )
        renewing = asyncio.create_task(self._renew())
        self._hub.subscribe(self._queue_announcements)
        metrics.CHANNEL_LEADER.set(1)
        try:
            announced = AnnouncedPositions(await self._stored_positions())
            await self._hub.wait_until_started()
            self._announcements.clear()  # the positions that are sent next include them
            await self._send_positions(announced)
            checked_at = -FORGET_INTERVAL_SECONDS
            while not renewing.done():
                self._wake.clear()
                if time.monotonic() - checked_at >= FORGET_INTERVAL_SECONDS:
                    checked_at = time.monotonic()
                    await self._forget_removed_writers(announced)
                while self._announcements:
                    await self._publish(self._take_batch(announced))
                is_due = time.monotonic() - self._positions_sent_at >= ANSWER_INTERVAL_SECONDS
                if self._are_positions_requested and is_due:
                    await self._send_positions(announced)
                await self._wait_for_work(renewing)
            renewing.result()
        finally:
            metrics.CHANNEL_LEADER.set(0)
            self._hub.unsubscribe(self._queue_announcements)
            await cancel_until_done(renewing)
            await self._release()

    def _queue_announcements(self, announcements: Sequence[Announcement]) -> None:
        self._announcements.extend(announcements)
        self._wake.set()

    async def _wait_for_work(self, renewal_task: asyncio.Task[None]) -> None:
        waking = asyncio.ensure_future(self._wake.wait())
        pause = ANSWER_INTERVAL_SECONDS if self._are_positions_requested else None
        await asyncio.wait({waking, renewal_task}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_seconds / 3)
            try:
                await self._lock.reacquire()
            except LockNotOwnedError:
                raise _LeadershipLost from None

    async def _release(self) -> None:
        """Release the lease, so that the next leader need not wait until the lease expires."""
        try:
            await self._lock.release()
        except RedisError as problem:
            log.info("Could not release the lease of the channel; it expires by itself", problem=str(problem))

    async def _stored_positions(self) -> dict[Writer, int]:
        stored = await self._client.hgetall(self._keys[1])
        return {(stream, writer): int(id) for name, id in stored.items() for stream, writer in [name.split(" ")]}

    async def _send_positions(self, announced: AnnouncedPositions) -> None:
        self._are_positions_requested, self._positions_sent_at = False, time.monotonic()
        for chunk in _split_into_chunks(announced.reannounce(self._hub.positions())):
            await self._publish([chunk])

    def _take_batch(self, announced: AnnouncedPositions) -> list[Sequence[PositionCommand | RdataCommand]]:
        """Remove announcements from the queue, about `LINES_PER_CALL` lines of them, and return their commands. The
        commands of one announcement stay together.
        """
        batch: list[Sequence[PositionCommand | RdataCommand]] = []
        while self._announcements and sum(map(len, batch)) < LINES_PER_CALL:
            batch.append(announced.announce(self._announcements.popleft()))
        return batch

    async def _forget_removed_writers(self, announced: AnnouncedPositions) -> None:
        removed_writers = await self._hub.removed_writers(announced.positions)
        announced.forget(removed_writers)
        for start in range(0, len(removed_writers), LINES_PER_CALL):
            await self._run_script(
                [], [], [" ".join(writer) for writer in removed_writers[start : start + LINES_PER_CALL]]
            )

    async def _publish(self, commands: Iterable[Sequence[PositionCommand | RdataCommand]]) -> None:
        commands_sent = [command for group in commands for command in group]
        if not commands_sent:
            return
        positions = {
            f"{command.stream} {command.writer}": str(command.id) for command in commands_sent if command.id is not None
        }
        await self._run_script(
            [str(_with_positive_ids(command)) for command in commands_sent],
            [word for pair in positions.items() for word in pair],
            [],
        )
        metrics.LINES_SENT.inc(len(commands_sent))

    async def _run_script(self, lines: list[str], positions: list[str], removed_writers: list[str]) -> None:
        packed = msgspec.msgpack.encode((lines, positions, removed_writers))
        if not await self._publish_script(keys=self._keys, args=[self._token, self._config.channel, packed]):
            raise _LeadershipLost


def _split_into_chunks(positions: Sequence[PositionCommand]) -> Iterator[Sequence[PositionCommand]]:
    return (positions[start : start + LINES_PER_CALL] for start in range(0, len(positions), LINES_PER_CALL))


def _with_positive_ids(command: PositionCommand | RdataCommand) -> PositionCommand | RdataCommand:
    """Copy the command with positive IDs. Synapse's workers expect positive IDs even for backward streams."""
    if isinstance(command, PositionCommand):
        return replace(command, prev=abs(command.prev), id=abs(command.id))
    return command if command.id is None else replace(command, id=abs(command.id))


MAX_QUEUED_COMMANDS = 10_000
MAX_QUEUED_CHARACTERS = 8 << 20  # of all commands together; one command may have 64 KiB


class Channel:
    """Connects a server to a Redis channel. For one event loop.

    Args:
        hub: the source of announcements.
        server: the server whose clients get the commands of the channel.
        client: a redis.asyncio client that decodes replies.
        config: the configured channel. None: the channel only relays commands between sidecars with the same server
            name and Redis database.
    """

    def __init__(self, hub: Hub, server: LineServer, client: Any, config: ChannelConfig | None) -> None:
        self._server = server
        self._client = client
        database = database_of(client)
        if config is not None:
            config = replace(config, channel=channel_in_database(config.channel, database))
        self._channel_name = lines_channel(server.config.name, database) if config is None else config.channel
        self._leader = None if config is None else ChannelLeader(hub, client, config)
        self._outgoing: asyncio.Queue[str] = asyncio.Queue(MAX_QUEUED_COMMANDS)
        self._queued_characters = 0
        self._echoes: Counter[bytes] = Counter()
        self._log = RepeatedLog(log)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._server.on_relayed = self._enqueue
        coroutines = [listen(self._client, self._subscribe, self._receive), self._publish()]
        if self._leader is not None:
            coroutines.append(self._leader.run())
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                await cancel_until_done(task)

    def _enqueue(self, command: RelayedCommand) -> None:
        line = str(command)
        if self._queued_characters + len(line) > MAX_QUEUED_CHARACTERS:
            return
        with suppress(asyncio.QueueFull):
            self._outgoing.put_nowait(line)
            self._queued_characters += len(line)

    async def _publish(self) -> None:
        problem = None
        while True:
            line = await self._outgoing.get()
            self._queued_characters -= len(line)
            if len(self._echoes) >= MAX_QUEUED_COMMANDS:  # no line returns if the Redis user may not subscribe
                self._echoes.clear()
            self._echoes[_digest(line)] += 1  # until Redis returns the line
            try:
                with translate_errors(self._client):
                    await self._client.publish(self._channel_name, line)
                problem = None
            except (Unavailable, Stop) as error:
                self._take_echo(line)
                if problem is None:
                    log.warning(
                        "Relayed commands do not reach other sidecars", channel=self._channel_name, problem=str(error)
                    )
                problem = error
                # Drop the waiting commands, because they must not be sent late.
                self._outgoing, self._queued_characters = asyncio.Queue(MAX_QUEUED_COMMANDS), 0

    async def _subscribe(self, pubsub: Any) -> None:
        await pubsub.subscribe(self._channel_name)
        self._echoes.clear()

    def _receive(self, message: Mapping[str, Any]) -> None:
        line: str = message["data"]
        if line.startswith(("RDATA ", "POSITION ")) or self._take_echo(line):  # sent by the leader or by this process
            return
        try:
            command = parse(line.encode())
        except BadCommand as problem:
            self._log.write("info", "Ignored an invalid command on the Redis channel", problem=str(problem))
            return
        match command:
            case ReplicateCommand() if self._leader is not None:
                self._leader.request_positions()
            case RelayedCommand():
                self._server.relay(command)

    def _take_echo(self, line: str) -> bool:
        """Forget one publication of the line by this process that Redis has not returned yet. Returns False if there is
        none: then another process published the line.
        """
        digest = _digest(line)
        count = self._echoes.pop(digest, 0)
        if count > 1:
            self._echoes[digest] = count - 1
        return count > 0


def _digest(line: str) -> bytes:
    """Hash a line. Hashes are stored instead of lines, because Redis may still have to return thousands of lines of up
    to 64 KiB.
    """
    return blake2b(line.encode(), digest_size=16).digest()
