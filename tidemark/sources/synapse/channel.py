"""Receives Synapse's replication channel on Redis in a thread: announcements of workers, and possible losses of lines.

The subscription is confirmed before the first request. Redis does not store lines, so lines that were sent during an
outage of Redis or of the connection are lost, and lines that were sent just before may be lost, too. The thread reports
that, and asks all workers for their positions.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

import redis

from tidemark.common.errors import BadCommand
from tidemark.common.log import get_logger
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand, ReplicateCommand, parse

log = get_logger(__name__)

MOST_LINES = 200_000
_PING_EVERY, _SILENCE = 5.0, 15.0
_PAUSE = 1.0


class ChannelEvent(Enum):
    """An event of the channel. `LOSS`: lines may be lost, or a worker has started; all workers were asked for their
    positions. `ASKED`: this bridge has asked for positions without a loss of lines, so the same processes answer."""

    LOSS = "loss"
    ASKED = "asked"


ChannelMessage = PositionCommand | RdataCommand | ChannelEvent


class SynapseChannel:
    """The client of the channel. Its thread runs from `__enter__` to `__exit__`. Only one other thread may call `take`
    and `ask`.
    """

    def __init__(self, make: Callable[[], Any], name: str, halt: threading.Event) -> None:
        """`make` returns a client of redis-py with its own time-outs."""
        self._make = make
        self.name = name
        self._halt = halt
        self._received: deque[ChannelMessage] = deque()
        self._asked = set[str]()
        self._lock = threading.Lock()
        self._asking = threading.Event()
        self._client: Any = None
        self._thread = threading.Thread(target=self._listen_on, name="synapse-channel", daemon=True)
        self._failure: BaseException | None = None
        self.lines = 0
        self.connected = False

    def __enter__(self) -> "SynapseChannel":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._halt.set()
        self._thread.join(10)

    def take(self) -> list[ChannelMessage]:
        """The messages since the last call, in order. Raises the unexpected error by which the thread has ended."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            received = [*self._received]
            self._received.clear()
        return received

    def ask(self) -> None:
        """Ask all workers for their positions soon."""
        self._asking.set()

    def _listen_on(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            self._failure = error

    def _run(self) -> None:
        problem = ""
        while not self._halt.is_set():
            try:
                self._client = self._make()
                with self._client.pubsub() as subscription:
                    self._listen(subscription)
                problem = ""
            except (redis.RedisError, OSError) as error:
                if problem != (problem := str(error)):
                    log.warning("Synapse's replication channel is not subscribed", channel=self.name, problem=problem)
            finally:
                self.connected = False
                with suppress(redis.RedisError, OSError):
                    if self._client is not None:
                        self._client.close()
            self._halt.wait(_PAUSE)

    def _listen(self, subscription: Any) -> None:
        subscription.subscribe(self.name)
        alive = pinged = time.monotonic()
        while not self._halt.is_set():
            message = subscription.get_message(timeout=0.2)
            now = time.monotonic()
            if message is not None:
                alive = now
                if message["type"] == "subscribe":
                    log.info("Listening to Synapse", channel=self.name)
                    self._report_loss()
                    self.connected = True
                    self._ask()
                elif message["type"] == "message":
                    self._receive(message["data"])
            if self._asking.is_set() and self.connected:
                self._ask()
            if now - pinged >= _PING_EVERY:
                subscription.ping()
                pinged = now
            if now - alive >= _SILENCE:
                raise redis.TimeoutError("no answer")

    def _ask(self) -> None:
        """Send a REPLICATE line that this bridge can recognise: workers read only its first word."""
        self._asking.clear()
        line = f"REPLICATE {uuid.uuid4().hex}"
        self._asked.add(line)
        self._client.publish(self.name, line)

    def _report_loss(self) -> None:
        with self._lock:
            self._asked.clear()
            self._received.clear()
            self._received.append(ChannelEvent.LOSS)

    def _receive(self, line: str | bytes) -> None:
        self.lines += 1
        text = line if isinstance(line, str) else line.decode(errors="replace")
        try:
            command = ReplicateCommand() if text.split(" ", 1)[0] == "REPLICATE" else parse(text.encode())
        except BadCommand:
            return  # a line of a newer Synapse, or of another program
        if isinstance(command, ReplicateCommand):
            received: ChannelMessage = ChannelEvent.ASKED if text in self._asked else ChannelEvent.LOSS
            self._asked.discard(text)
        elif isinstance(command, PositionCommand | RdataCommand):
            received = command
        else:
            return
        with self._lock:
            self._received.append(received)
        if len(self._received) > MOST_LINES:
            self._report_loss()
            self.ask()
