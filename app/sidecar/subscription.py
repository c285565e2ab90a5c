"""Listening to channels of Redis for as long as the process lives, through every loss of the connection."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from tidemark.sinks.reader.connection import translated
from tidemark.streaming.errors import Stop, Unavailable

PAUSE = 1.0  # seconds until a lost subscription is made again; less than the client's time-out


async def listen(
    client: Any, subscribe: Callable[[Any], Awaitable[None]], hear: Callable[[Mapping[str, Any]], None]
) -> NoReturn:
    """Call `subscribe` with redis-py's pub/sub of each connection, and `hear` with every message that comes.

    What is said while Redis is away is lost. For one event loop; end it with `app.sidecar.ending.ended`.
    """
    while True:
        with suppress(Unavailable, Stop), translated(client):
            await client.initialize()  # a Cluster's client picks one of its nodes
            async with client.pubsub() as heard:
                await subscribe(heard)
                while True:
                    message = await heard.get_message(ignore_subscribe_messages=True, timeout=PAUSE)
                    if message is not None:
                        hear(message)
        await asyncio.sleep(PAUSE)
