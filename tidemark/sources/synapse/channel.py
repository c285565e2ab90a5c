"""Receives the lines of Synapse's replication channel on Redis in a thread, and reports possible losses of lines.

A line is a command of a worker, such as the worker's position or a row. Redis does not store lines. So lines that are
sent during an outage of Redis or of the connection are lost. Lines that were sent just before an outage may be lost.
After each subscription, the thread reports a possible loss, and requests the positions of all workers.
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

MAX_MESSAGES = 200_000
"""The largest number of messages that `take` has not returned. Above this number, all messages are discarded, and a
loss is reported."""
_PING_SECONDS, _TIMEOUT_SECONDS = 5.0, 15.0
"""Seconds between two pings of Redis, and seconds without a message after which the thread connects again."""
_RECONNECT_SECONDS = 1.0
"""Seconds between two attempts to connect."""


class ChannelEvent(Enum):
    """An event that changes how the bridge must interpret the positions that follow."""

    LOSS = "loss"
    """Lines may be lost, or another process, such as a worker that has started, has requested all positions."""
    REQUESTED = "requested"
    """The line with which this bridge requests the positions of all workers was received."""


ChannelMessage = PositionCommand | RdataCommand | ChannelEvent


class SynapseChannel:
    """The client of the channel. A thread receives lines from `__enter__` to `__exit__`. `__exit__` waits up to 10 s
    for the end of the thread.

    Only one other thread may call `take` and `request_positions`.

    Attributes:
        line_count: the number of received lines.
        is_connected: whether the channel is subscribed now.
    """

    def __init__(self, make_client: Callable[[], Any], name: str, halt: threading.Event) -> None:
        """
        Args:
            make_client: makes a redis-py client that has timeouts.
            name: the name of the channel, which is Synapse's server_name.
            halt: ends the thread. `__exit__` sets this event.
        """
        self._make_client = make_client
        self.name = name
        self._halt = halt
        self._messages: deque[ChannelMessage] = deque()
        self._own_requests = set[str]()
        """REPLICATE lines that this bridge has sent and not received."""
        self._lock = threading.Lock()
        self._request_pending = threading.Event()
        self._client: Any = None
        self._thread = threading.Thread(target=self._run_thread, name="synapse-channel", daemon=True)
        self._failure: BaseException | None = None
        self.line_count = 0
        self.is_connected = False

    def __enter__(self) -> "SynapseChannel":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._halt.set()
        self._thread.join(10)

    def take(self) -> list[ChannelMessage]:
        """Remove and return the messages since the last call, in order. Does not wait.

        If the thread has ended by an error, raises the error.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            received = [*self._messages]
            self._messages.clear()
        return received

    def request_positions(self) -> None:
        """Let the thread request the positions of all workers, after the next subscription if there is none now.
        Returns at once."""
        self._request_pending.set()

    def _run_thread(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            self._failure = error

    def _run(self) -> None:
        problem = ""
        while not self._halt.is_set():
            try:
                self._client = self._make_client()
                with self._client.pubsub() as subscription:
                    self._listen(subscription)
                problem = ""
            except (redis.RedisError, OSError) as error:
                if problem != (problem := str(error)):
                    log.warning(
                        "Synapse's replication channel is unavailable; trying again",
                        channel=self.name,
                        problem=problem,
                    )
            finally:
                self.is_connected = False
                with suppress(redis.RedisError, OSError):
                    if self._client is not None:
                        self._client.close()
            self._halt.wait(_RECONNECT_SECONDS)

    def _listen(self, subscription: Any) -> None:
        subscription.subscribe(self.name)
        received_at = pinged_at = time.monotonic()
        while not self._halt.is_set():
            message = subscription.get_message(timeout=0.2)
            now = time.monotonic()
            if message is not None:
                received_at = now
                if message["type"] == "subscribe":
                    log.info("Subscribed to Synapse's replication channel", channel=self.name)
                    self._report_loss()
                    self.is_connected = True
                    self._send_request()
                elif message["type"] == "message":
                    self._receive(message["data"])
            if self._request_pending.is_set() and self.is_connected:
                self._send_request()
            if now - pinged_at >= _PING_SECONDS:
                subscription.ping()
                pinged_at = now
            if now - received_at >= _TIMEOUT_SECONDS:
                raise redis.TimeoutError(f"Redis has sent nothing for {_TIMEOUT_SECONDS:.0f} s")

    def _send_request(self) -> None:
        """Send a REPLICATE line. Workers ignore the second word of the line. With this word, the bridge recognises its
        own line."""
        self._request_pending.clear()
        line = f"REPLICATE {uuid.uuid4().hex}"
        self._own_requests.add(line)
        self._client.publish(self.name, line)

    def _report_loss(self) -> None:
        """Replace all messages that were not taken with `ChannelEvent.LOSS`, and forget the bridge's own requests."""
        with self._lock:
            self._own_requests.clear()
            self._messages.clear()
            self._messages.append(ChannelEvent.LOSS)

    def _receive(self, line: str | bytes) -> None:
        self.line_count += 1
        text = line if isinstance(line, str) else line.decode(errors="replace")
        try:
            command = ReplicateCommand() if text.split(" ", 1)[0] == "REPLICATE" else parse(text.encode())
        except BadCommand:
            return  # a line of a newer Synapse, or of another program
        if isinstance(command, ReplicateCommand):
            received: ChannelMessage = ChannelEvent.REQUESTED if text in self._own_requests else ChannelEvent.LOSS
            self._own_requests.discard(text)
        elif isinstance(command, PositionCommand | RdataCommand):
            received = command
        else:
            return
        with self._lock:
            self._messages.append(received)
        if len(self._messages) > MAX_MESSAGES:
            self._report_loss()
            self.request_positions()
