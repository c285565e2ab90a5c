"""Accepts the connections of the sidecar: many at once, and with TLS if there is a certificate.

The server of uvloop accepts one connection per turn of the event loop, so a probe behind a thousand connections would
wait for a thousand turns. No server of asyncio bounds the number of handshakes or their time, or takes a new
certificate. So connections are accepted here. For one event loop.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tidemark.app.serving.eviction import IdleConnection, pick_victims
from tidemark.common.errors import BadSetting
from tidemark.common.file_watcher import FileWatcher
from tidemark.common.log import get_logger

log = get_logger(__name__)

CERTIFICATE, KEY, CA = (f"TIDEMARK_SIDECAR_{name}_FILE" for name in ("CERTIFICATE", "KEY", "CA"))


class Certificate:
    """The server's side of TLS: a certificate and its key in two PEM files, which are loaded again when they change.

    Raises `BadSetting` if the files cannot be used at the start. Later, the last pair stays in use.
    """

    def __init__(self, certificate: Path, key: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._contexts = FileWatcher("the certificate", (certificate, key), lambda: _loaded(certificate, key), now)

    def context(self) -> ssl.SSLContext:
        """For a new connection."""
        return self._contexts.content()


def _loaded(certificate: Path, key: Path) -> ssl.SSLContext:
    for variable, path in ((CERTIFICATE, certificate), (KEY, key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise _unreadable(variable, path, error) from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:
        raise BadSetting(CERTIFICATE, f"there is no certificate in {certificate}: PEM is expected") from None
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _KeyHasPassword:
        raise BadSetting(KEY, f"the key in {key} has a password: give a key without one") from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise BadSetting(KEY, f"the key in {key} is not that of the certificate in {certificate}") from None
        raise BadSetting(KEY, f"{certificate} and {key} cannot be used as a certificate and its key: {error}") from None
    return context


class _KeyHasPassword(Exception):
    pass


def _no_password() -> str:
    """In place of OpenSSL's question at the terminal."""
    raise _KeyHasPassword


def _unreadable(variable: str, path: Path, error: OSError) -> BadSetting:
    return BadSetting(variable, f"cannot read {path}: {error.strerror}")


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """The client's side of TLS: trusts the authority in a PEM file; without a file, the authorities of the system."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise BadSetting(CA, f"there is no certificate in {ca_file}: PEM is expected") from None
    except OSError as error:
        raise BadSetting(CA, f"cannot read {ca_file}: {error.strerror}") from None


AT_ONCE = 64  # connections that are accepted in one turn of the event loop
ENCRYPTED_AT_ONCE = 8  # connections with TLS, whose handshake takes a millisecond
_SHUTDOWN_SECONDS = 1.0  # for a client to close TLS
_EXHAUSTED_SECONDS = 0.1  # to wait if the process may open no more files

Connect = Callable[[], asyncio.Protocol]
"""Makes the protocol of a connection, as `loop.create_server` asks for it."""


@dataclass(frozen=True)
class HandshakesConfig:
    """`open` at the same time, each for `seconds` at most."""

    open: int = 1000
    seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """With TLS if there is a certificate."""

    certificate: Certificate | None = None
    bounds: HandshakesConfig = field(default_factory=HandshakesConfig)

    def serve(self, listening: socket.socket, connect: Connect) -> "TlsListener":
        """Serve on a listening socket, in the running event loop."""
        return TlsListener(listening, connect, self.certificate, self.bounds)


class TlsListener:
    """Accepts connections, and serves them once their TLS handshake is done. Past the bound of open handshakes, the
    oldest ones of the address with the most are cancelled."""

    def __init__(
        self, listening: socket.socket, connect: Connect, certificate: Certificate | None, bounds: HandshakesConfig
    ) -> None:
        self._listening = listening
        self._connect = connect
        self._certificate = certificate
        self._bounds = bounds
        self._open: dict[asyncio.Task[None], IdleConnection[asyncio.Task[None]]] = {}
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        listening.settimeout(0)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no more, and cancel open handshakes. Connections stay open. May be called again."""
        if self._closed:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._certificate is not None:
            for handshake in [*self._open]:
                handshake.cancel()

    @property
    def _closed(self) -> bool:
        return self._listening.fileno() < 0

    async def wait_closed(self) -> None:
        """For uvicorn, which closes its servers."""

    def _accept(self) -> None:
        for _ in range(AT_ONCE if self._certificate is None else ENCRYPTED_AT_ONCE):
            try:
                connection, (address, *_) = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(
                    _EXHAUSTED_SECONDS, self._loop.add_reader, self._listening, self._accept
                )
                return
            connection.settimeout(0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._is_full:
                for oldest in pick_victims([*self._open.values()], self._bounds.open):
                    del self._open[oldest]
                    oldest.cancel()
            handshake = self._loop.create_task(self._handshake(connection))
            self._open[handshake] = IdleConnection(handshake, address, self._loop.time())
            handshake.add_done_callback(partial(self._handshake_ended, connection))

    @property
    def _is_full(self) -> bool:
        return self._certificate is not None and len(self._open) >= self._bounds.open

    def _handshake_ended(self, connection: socket.socket, handshake: asyncio.Task[None]) -> None:
        self._open.pop(handshake, None)
        if handshake.cancelled():  # perhaps before it started
            connection.close()

    async def _handshake(self, connection: socket.socket) -> None:
        """A connection that is not TLS, has no common version, disconnects or is slow is closed without an answer."""
        certificate, seconds = self._certificate, self._bounds.seconds
        with suppress(OSError):
            if certificate is not None:
                await self._loop.connect_accepted_socket(
                    self._connect,
                    connection,
                    ssl=certificate.context(),
                    ssl_handshake_timeout=seconds,
                    ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
                )
                return
            # Never cancelled: it takes one turn of the loop, and uvloop would leave the connection open.
            transport, _ = await self._loop.connect_accepted_socket(self._connect, connection)
            if self._closed:
                transport.abort()
