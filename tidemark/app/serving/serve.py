"""`tidemark sidecar`: runs the read side, the HTTP server and the line protocol in one process.

The HTTP server (`app.sidecar`) and the line protocol (`app.lines`) share one read side. No other module imports both.
"""

import asyncio
import gc
import logging
import math
import os
import resource
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import uvicorn

from tidemark.app.connections import is_loopback, local_host_names, parse_host_port
from tidemark.app.lines.channel import Channel, ChannelConfig
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LineServer, LineServerConfig
from tidemark.app.logs import shutdown_event
from tidemark.app.read_side import ReadSide, ReadSideConfig, open_read_side
from tidemark.app.serving.tls_listener import Certificate, HandshakesConfig, ListenerConfig
from tidemark.app.settings import Settings
from tidemark.app.sidecar.admission import AdmissionConfig, create_protocol_factory
from tidemark.app.sidecar.app import AppConfig, create_app
from tidemark.app.sidecar.service import Limits
from tidemark.common.errors import BadSetting, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.tasks import cancel_until_done
from tidemark.sources.kafka_lookup import Tail

log = get_logger(__name__)

RESERVED_FILES = 192  # for probes, refused clients, Redis, Postgres, Kafka and Python
MIN_CONNECTIONS_PER_KIND = 8


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The largest numbers of clients that the process serves. Each connection is an open file.

    Attributes:
        connections: HTTP connections.
        open_requests: long-running HTTP requests.
        line_connections: connections of the line protocol.
        handshakes: concurrent TLS handshakes; 0 without TLS.
    """

    connections: int
    open_requests: int
    line_connections: int
    handshakes: int = 0

    @property
    def file_count(self) -> int:
        """The number of open files that the process needs."""
        return self.connections + self.line_connections + self.handshakes + RESERVED_FILES


def fit_limits(file_limit: int, desired: ClientLimits) -> ClientLimits:
    """Reduce the limits in `desired` by a common factor, so that the process needs at most `file_limit` open files.
    Returns `desired` if no reduction is necessary. Pure.

    Raises:
        BadSetting: the file limit is too low for `MIN_CONNECTIONS_PER_KIND` connections of each kind.
    """
    if desired.file_count <= file_limit:
        return desired

    def reduce(count: int) -> int:
        return count * (file_limit - RESERVED_FILES) // (desired.file_count - RESERVED_FILES)

    limits = ClientLimits(
        reduce(desired.connections),
        reduce(desired.open_requests),
        reduce(desired.line_connections),
        reduce(desired.handshakes),
    )
    minimum = min(MIN_CONNECTIONS_PER_KIND, desired.connections, desired.line_connections)
    if min(limits.connections, limits.line_connections) < minimum:
        scaled = minimum * (desired.file_count - RESERVED_FILES)
        needed = RESERVED_FILES + math.ceil(scaled / min(desired.connections, desired.line_connections))
        raise BadSetting(
            "TIDEMARK_SIDECAR_MAX_CONNECTIONS",
            f"the process may open {file_limit} files, of which {RESERVED_FILES} are reserved for probes and servers;"
            f" raise the limit of open files to at least {needed} (ulimit -n, or LimitNOFILE of systemd)",
        )
    return replace(limits, open_requests=max(1, limits.open_requests))


def raise_file_limit(desired: ClientLimits) -> ClientLimits:
    """Raise this process's limit of open files to `desired.file_count`, or to the hard limit if that is lower. Logs the
    result.

    Returns:
        `desired`, or lower limits of clients if the limit of open files is too low for `desired`.

    Raises:
        BadSetting: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = desired.file_count if hard == resource.RLIM_INFINITY else min(desired.file_count, hard)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    file_limit = desired.file_count if soft == resource.RLIM_INFINITY else soft
    limits = fit_limits(file_limit, desired)
    if limits != desired:
        log.warning(
            "The limit of open files is low: serving fewer clients than configured; raise the limit (ulimit -n, or"
            " LimitNOFILE of systemd)",
            files=file_limit,
            needed=desired.file_count,
            connections=limits.connections,
            open_requests=limits.open_requests,
            lines=limits.line_connections,
        )
    else:
        log.info("Open files", allowed=file_limit, needed=desired.file_count)
    return limits


SHUTDOWN_TIMEOUT_SECONDS = 3  # for requests to end after SIGTERM
# How long a thread that decodes history may block the event loop; Python's default is 0.005.
SWITCH_INTERVAL_SECONDS = 0.0005
# Python's first threshold is 700. The objects of the read side have no reference cycles, and a full collection blocks
# the event loop.
GC_THRESHOLDS = 20_000, 20, 50
EXIT_TIMEOUT_SECONDS = 6.0  # after SIGTERM, the longest wait for threads that query servers


class StoppableServer(uvicorn.Server):
    """Serves HTTP on listening sockets until `stop` is called. Handles no signals.

    After `stop`, the server accepts no clients, and sets the event `stopping`. `run` returns when all requests have
    ended, or after `SHUTDOWN_TIMEOUT_SECONDS`.
    """

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event, listener_config: ListenerConfig) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._listener_config = listener_config

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own method would raise the signal again at the end, so the exit code would not be 0.
        yield

    def stop(self) -> None:
        """Begin to stop, and start the timer that ends the process if the stop takes too long. Thread-safe."""
        self.should_exit = True
        _exit_after_timeout()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await super().startup([])
        self.servers = [self._listener_config.serve(socket, self._new_connection) for socket in sockets]  # type: ignore[misc]

    def _new_connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


def _exit_after_timeout() -> None:
    """Start a timer that ends the process after `EXIT_TIMEOUT_SECONDS`, even if threads still wait for a server. These
    threads have no state to save.
    """

    def exit_now() -> None:
        log.warning("Stopped without waiting for servers that do not answer")
        os._exit(0)

    timer = threading.Timer(EXIT_TIMEOUT_SECONDS, exit_now)
    timer.daemon = True
    timer.start()


@asynccontextmanager
async def serve_lines(
    settings: Settings,
    read_side: ReadSide,
    listening: socket.socket,
    stopping: asyncio.Event,
    listener_config: ListenerConfig,
    max_connections: int,
) -> AsyncIterator[None]:
    """Run the line protocol during the block: on a listening socket, between sidecars, and on the Redis channel, if a
    channel is configured. Clients are disconnected when `stopping` is set.
    """

    def open_tail() -> Tail:
        return Tail(settings.kafka, settings.kafka_facts_topic)

    host, port = listening.getsockname()[:2]
    if not is_loopback(host):
        log.warning(
            "The line protocol has no access control: every client may read positions and send commands to others",
            host=host,
            port=port,
        )
    hub = Hub(read_side, open_tail, settings.lines_row_buffer_mib << 20)
    server = LineServer(hub, LineServerConfig(settings.lines_server_name, max_connections))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub.open())
        await stack.enter_async_context(server.serving(listening, listener_config))
        channel_config = None if settings.lines_redis_channel is None else ChannelConfig(settings.lines_redis_channel)
        await stack.enter_async_context(Channel(hub, server, read_side.redis_reader.client, channel_config).open())
        stop_task = asyncio.create_task(_stop_when_set(server, stopping))
        stack.push_async_callback(cancel_until_done, stop_task)
        log.info("The line protocol listens", host=host, port=port, channel=settings.lines_redis_channel)
        yield


async def _stop_when_set(server: LineServer, stopping: asyncio.Event) -> None:
    await stopping.wait()
    server.stop()


def _listener_config(settings: Settings, max_handshakes: int) -> ListenerConfig:
    """Create the configuration of the listeners. Raises `BadSetting` if the certificate or its key cannot be used."""
    if settings.sidecar_certificate_file is None or settings.sidecar_key_file is None:
        return ListenerConfig()
    certificate = Certificate(settings.sidecar_certificate_file, settings.sidecar_key_file)
    return ListenerConfig(certificate, HandshakesConfig(max_open=max_handshakes))


def run(settings: Settings) -> None:
    """Run the sidecar until SIGTERM or SIGINT. Raises `Stop` if a person must decide, for example if a setting is wrong
    or a server refuses this user."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.set_threshold(*GC_THRESHOLDS)
    readers = None if settings.readers_dsn is None else settings.readers
    servers = ReadSideConfig(settings.redis, settings.postgres, settings.policy_defaults, readers)
    uses_tls = settings.sidecar_certificate_file is not None
    client_limits = raise_file_limit(
        ClientLimits(
            settings.sidecar_max_connections,
            settings.sidecar_max_open_requests,
            settings.lines_max_connections,
            HandshakesConfig.max_open if uses_tls else 0,
        )
    )
    limits = Limits(client_limits.open_requests, settings.sidecar_max_wait_seconds, settings.metrics_max_streams)
    hosts = settings.sidecar_hosts or local_host_names(settings.sidecar_host)
    config = AppConfig(settings.sidecar_tokens_file, settings.sidecar_origins, hosts, limits, settings.sidecar_banner)
    listener_config = _listener_config(settings, client_limits.handshakes)
    stopping = asyncio.Event()
    asyncio.run(_require_access(servers))
    # Not logged: uvicorn's error messages also reach the client or Tidemark's log.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with (
        open_listening_socket("TIDEMARK_SIDECAR_PORT", settings.sidecar_host, settings.sidecar_port) as listening,
        open_listening_socket("TIDEMARK_LINES_LISTEN", *parse_host_port(settings.lines_listen)) as lines_listening,
    ):
        host, port = listening.getsockname()[:2]
        if config.tokens_file is None and not is_loopback(host):
            log.warning("Every client may read positions; set TIDEMARK_SIDECAR_TOKENS_FILE to require a token")

        def companion(read_side: ReadSide) -> AbstractAsyncContextManager[None]:
            return serve_lines(
                settings, read_side, lines_listening, stopping, listener_config, client_limits.line_connections
            )

        uvicorn_config = uvicorn.Config(
            create_app(servers, config, stopping, companion),
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            proxy_headers=False,  # `create_protocol_factory` handles them before a request waits
            http=create_protocol_factory(
                AdmissionConfig(client_limits.connections, trusted_proxies=settings.sidecar_proxies)
            ),
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
        )
        log.info("The sidecar listens", host=host, port=port, tls=listener_config.certificate is not None)
        server = StoppableServer(uvicorn_config, stopping, listener_config)
        shutdown_event(server.stop)
        gc.freeze()  # objects loaded at start-up live as long as the process
        server.run(sockets=[listening])
    log.info("Stopped")


async def _require_access(servers: ReadSideConfig) -> None:
    """Raise `Stop` if a server refuses this user. A server that is down is no error, because the sidecar can start
    without the server."""
    async with open_read_side(servers) as read_side:
        for check in (read_side.redis_reader.ping, read_side.postgres_reader.check):
            with suppress(Unavailable):
                await check()


def open_listening_socket(variable: str, host: str, port: int) -> socket.socket:
    """Listen on a TCP address; if `host` is `::`, also for IPv4. Port 0 selects a free port. `variable`: the setting
    with the address, for the error. Raises `BadSetting` if the process cannot listen on the address.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        dual_stack = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=dual_stack)
    except OSError as error:
        raise BadSetting(variable, f"cannot listen on {host}:{port}: {error.strerror}") from None
