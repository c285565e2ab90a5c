"""The part of the sidecar's process that speaks the line protocol, put together from the settings."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from tidemark.app.lines.channel import Channel
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LineServer, Terms
from tidemark.app.lines.speaker import ChannelTerms
from tidemark.app.settings import Settings, is_loopback
from tidemark.app.sidecar.service import Service
from tidemark.sources.tail import Tail

log = structlog.get_logger(__name__)


@asynccontextmanager
async def lines(settings: Settings, service: Service, listening: socket.socket) -> AsyncIterator[None]:
    """Serve on a socket that listens, and on the channel of Redis where there is one."""

    def tail() -> Tail:
        return Tail(settings.kafka, settings.kafka_facts_topic)

    host, port = listening.getsockname()[:2]
    if not is_loopback(host):
        log.warning("Whoever reaches the line protocol may read, and send what is relayed", host=host, port=port)
    hub = Hub(service, tail, settings.sidecar_rows_mib << 20)
    server = LineServer(hub, Terms(settings.sidecar_name, settings.sidecar_tcp_connections))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub.open())
        await stack.enter_async_context(server.serving(listening))
        if settings.sidecar_channel is not None:
            channel = Channel(hub, server, service.live.client, ChannelTerms(settings.sidecar_channel))
            await stack.enter_async_context(channel.open())
        log.info("The line protocol listens", host=host, port=port, channel=settings.sidecar_channel)
        yield
