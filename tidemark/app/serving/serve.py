"""`tidemark sidecar`: runs the read side, HTTP and the line protocol in one process.

The only module that imports both `app.sidecar` and `app.lines`, which share one read side.
"""

import asyncio
import gc
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import uvicorn

from tidemark.app.connections import THIS_MACHINE, host_port, is_loopback
from tidemark.app.lines.channel import Channel, ChannelConfig
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LineServer, LineServerConfig
from tidemark.app.logs import shutdown_event
from tidemark.app.read_side import ReadSide, ReadSideConfig, open_read_side
from tidemark.app.read_side.single_flight import cancel_until_done
from tidemark.app.serving.tls_listener import Certificate, HandshakesConfig, ListenerConfig
from tidemark.app.settings import Settings
from tidemark.app.sidecar.admission import AdmissionConfig, connection_class
from tidemark.app.sidecar.app import AppConfig, create_app
from tidemark.app.sidecar.service import Limits
from tidemark.common.errors import BadSetting, Unavailable
from tidemark.common.log import get_logger
from tidemark.sources.kafka_lookup import Tail

log = get_logger(__name__)

RESERVE = 192  # files for probes, refused clients, Redis, Postgres, Kafka and Python
MIN_CONNECTIONS = 8  # of each kind


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The numbers of clients that the process serves. Each connection is an open file.

    Attributes:
        connections: HTTP connections.
        open_requests: HTTP requests that may stay open.
        lines: connections of the line protocol.
        handshakes: concurrent TLS handshakes.
    """

    connections: int
    open_requests: int
    lines: int
    handshakes: int = 0


def fit_limits(allowed: int, desired: ClientLimits) -> ClientLimits:
    """The largest limits up to `desired` for which `allowed` files are enough. Each kind is reduced by the same factor.
    Pure.

    Raises:
        BadSetting: not even a few clients of each kind fit.
    """
    needed, left = desired.connections + desired.lines + desired.handshakes, allowed - RESERVE
    if needed <= left:
        return desired

    def cut(count: int) -> int:
        return count * left // needed

    limits = ClientLimits(*map(cut, (desired.connections, desired.open_requests, desired.lines, desired.handshakes)))
    if min(limits.connections, limits.lines) < min(MIN_CONNECTIONS, desired.connections, desired.lines):
        raise BadSetting(
            "TIDEMARK_SIDECAR_MAX_CONNECTIONS",
            f"the process may open {allowed} files, and {RESERVE} of them are reserved for probes and servers; raise"
            " the limit (ulimit -n, or LimitNOFILE of systemd)",
        )
    return replace(limits, open_requests=max(1, limits.open_requests))


def raise_file_limit(desired: ClientLimits) -> ClientLimits:
    """Raise the process's limit of open files as far as needed and possible, and return the limits that fit. Raises
    `BadSetting`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = desired.connections + desired.lines + desired.handshakes + RESERVE
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    allowed = needed if soft == resource.RLIM_INFINITY else soft
    served = fit_limits(allowed, desired)
    if served != desired:
        log.warning(
            "The limit of open files is low: serving fewer clients than configured; raise LimitNOFILE",
            files=allowed,
            needed=needed,
            connections=served.connections,
            open_requests=served.open_requests,
            lines=served.lines,
        )
    else:
        log.info("Open files", allowed=allowed, needed=needed)
    return served


LAST_SECONDS = 3  # seconds for open requests to end after SIGTERM
TURN_SECONDS = 0.0005  # seconds for which a thread that decodes history may block the event loop; 0.005 by default
# New objects until a garbage collection; 700 by default. The objects of the read side have no cycles, and a full
# collection blocks the event loop.
CYCLES = 20_000, 20, 50
HANGS_SECONDS = 6.0  # after SIGTERM; later the process does not wait for servers


class StoppedServer(uvicorn.Server):
    """Serves on listening sockets. After `end` it accepts no clients, sets `stopping`, and returns when all requests
    have ended, or after `LAST_SECONDS`. It handles no signals.
    """

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event, acceptor: ListenerConfig) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._acceptor = acceptor

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal again at its end, so that the exit code would not be 0.
        yield

    def end(self) -> None:
        """Begin to stop. Thread-safe."""
        self.should_exit = True
        _exit_at_last()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await super().startup([])
        self.servers = [self._acceptor.serve(listening, self._connection) for listening in sockets]  # type: ignore[misc]

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


def _exit_at_last() -> None:
    """End the process even if threads wait for a server: they have no state that must survive."""

    def end() -> None:
        log.warning("Stopped without waiting for servers that do not answer")
        os._exit(0)

    timer = threading.Timer(HANGS_SECONDS, end)
    timer.daemon = True
    timer.start()


@asynccontextmanager
async def lines(
    settings: Settings,
    read_side: ReadSide,
    listening: socket.socket,
    stopping: asyncio.Event,
    acceptor: ListenerConfig,
    clients: int,
) -> AsyncIterator[None]:
    """Run the line protocol for `clients` clients: on a listening socket, between sidecars, and on the Redis channel if
    one is configured.
    """

    def tail() -> Tail:
        return Tail(settings.kafka, settings.kafka_facts_topic)

    host, port = listening.getsockname()[:2]
    if not is_loopback(host):
        log.warning(
            "The line protocol has no access control: its clients read and relay",
            host=host,
            port=port,
        )
    hub = Hub(read_side, tail, settings.lines_row_buffer_mib << 20)
    server = LineServer(hub, LineServerConfig(settings.lines_server_name, clients))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub.open())
        await stack.enter_async_context(server.serving(listening, acceptor))
        channel_config = None if settings.lines_redis_channel is None else ChannelConfig(settings.lines_redis_channel)
        await stack.enter_async_context(Channel(hub, server, read_side.redis_reader.client, channel_config).open())
        stop_task = asyncio.create_task(_stop_with(server, stopping))
        stack.push_async_callback(cancel_until_done, stop_task)
        log.info("The line protocol listens", host=host, port=port, channel=settings.lines_redis_channel)
        yield


async def _stop_with(server: LineServer, stopping: asyncio.Event) -> None:
    await stopping.wait()
    server.stop()


def _acceptor(settings: Settings, handshakes: int) -> ListenerConfig:
    """Raises `BadSetting`."""
    if settings.sidecar_certificate_file is None or settings.sidecar_key_file is None:
        return ListenerConfig()
    certificate = Certificate(settings.sidecar_certificate_file, settings.sidecar_key_file)
    return ListenerConfig(certificate, HandshakesConfig(open=handshakes))


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `Stop` if a person must act."""
    sys.setswitchinterval(TURN_SECONDS)
    gc.set_threshold(*CYCLES)
    readers = None if settings.readers_dsn is None else settings.readers
    servers = ReadSideConfig(settings.redis, settings.postgres, settings.policy_defaults, readers)
    encrypted = settings.sidecar_certificate_file is not None
    client_limits = raise_file_limit(
        ClientLimits(
            settings.sidecar_max_connections,
            settings.sidecar_max_open_requests,
            settings.lines_max_connections,
            HandshakesConfig.open if encrypted else 0,
        )
    )
    limits = Limits(client_limits.open_requests, settings.sidecar_max_wait_seconds, settings.metrics_max_streams)
    hosts = settings.sidecar_names or (THIS_MACHINE if is_loopback(settings.sidecar_host) else ())
    config = AppConfig(settings.sidecar_tokens_file, settings.sidecar_origins, hosts, limits, settings.sidecar_banner)
    acceptor = _acceptor(settings, client_limits.handshakes)
    stopping = asyncio.Event()
    asyncio.run(_require_access(servers))
    # uvicorn's messages reach the client or Tidemark's log in another way.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with (
        listening_socket("TIDEMARK_SIDECAR_PORT", settings.sidecar_host, settings.sidecar_port) as listening,
        listening_socket("TIDEMARK_LINES_LISTEN", *host_port(settings.lines_listen)) as lines_listening,
    ):
        host, port = listening.getsockname()[:2]
        if config.tokens_file is None and not is_loopback(host):
            log.warning("Every client may read; set TIDEMARK_SIDECAR_TOKENS_FILE to require a token")

        def companion(read_side: ReadSide) -> AbstractAsyncContextManager[None]:
            return lines(settings, read_side, lines_listening, stopping, acceptor, client_limits.lines)

        uvicorn_config = uvicorn.Config(
            create_app(servers, config, stopping, companion),
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            proxy_headers=False,  # `connection_class` handles them before a request waits
            http=connection_class(AdmissionConfig(client_limits.connections, trusted_proxies=settings.sidecar_proxies)),
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        log.info("The sidecar listens", host=host, port=port, tls=acceptor.certificate is not None)
        server = StoppedServer(uvicorn_config, stopping, acceptor)
        shutdown_event(server.end)
        gc.freeze()  # objects loaded at start-up live as long as the process
        server.run(sockets=[listening])
    log.info("Stopped")


async def _require_access(servers: ReadSideConfig) -> None:
    """Raise `Stop` if a server answers and refuses this user. The sidecar serves while a server is down."""
    async with open_read_side(servers) as read_side:
        for ask in (read_side.redis_reader.ping, read_side.postgres_reader.check):
            with suppress(Unavailable):
                await ask()


def listening_socket(variable: str, host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        dual_stack = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=dual_stack)
    except OSError as error:
        raise BadSetting(variable, f"cannot listen on {host}:{port}: {error.strerror}") from None
