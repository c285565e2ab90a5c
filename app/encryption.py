"""TLS of the sidecar: its certificate, which may rotate, and the handshake before a connection is served.

asyncio's own servers bound neither the number of handshakes nor their time, and never take up another certificate; so
connections are accepted here. For one event loop.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from tidemark.app.crowd import Waiting, crowding
from tidemark.streaming.errors import BadSetting

log = structlog.get_logger(__name__)

CERTIFICATE, KEY, CA = (f"TIDEMARK_SIDECAR_{name}_FILE" for name in ("CERTIFICATE", "KEY", "CA"))
LOOK_EVERY = 1.0  # seconds
_SHUTDOWN_SECONDS = 1.0  # for a client to agree to the end of TLS
_EXHAUSTED_SECONDS = 0.1  # to wait where the process may open no more files

Connect = Callable[[], asyncio.Protocol]
"""Makes the protocol of a connection, as `loop.create_server` asks for it."""


class Certificate:
    """The server's side of TLS by two PEM files, which are read again when they change.

    Raises `BadSetting` where they cannot be used at the start; later, the last pair stays.
    """

    def __init__(self, certificate: Path, key: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._files = certificate, key
        self._now = now
        self._looked = now()
        self._complained = False
        self._version = self._stat()
        self._context = _loaded(*self._files)

    def context(self) -> ssl.SSLContext:
        """For a connection that is new."""
        if self._now() - self._looked >= LOOK_EVERY:
            self._looked = self._now()
            self._refresh()
        return self._context

    def _refresh(self) -> None:
        try:
            version = self._stat()
            if version != self._version:
                self._context, self._version = _loaded(*self._files), version
                log.info("Read the certificate again", file=str(self._files[0]))
            self._complained = False
        except BadSetting as problem:  # also between the change of the one file and that of the other
            if not self._complained:
                log.warning("Could not read the certificate again; the last one stays", problem=str(problem))
            self._complained = True

    def _stat(self) -> list[tuple[int, int, int]]:
        return [_version(variable, path) for variable, path in zip((CERTIFICATE, KEY), self._files, strict=True)]


def _version(variable: str, path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()  # through links: that is how container platforms swap files
    except OSError as error:
        raise _unreadable(variable, path, error) from None
    return found.st_mtime_ns, found.st_size, found.st_ino


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
    except _Encrypted:
        raise BadSetting(KEY, f"the key in {key} has a password: it is expected without one") from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise BadSetting(KEY, f"the key in {key} is not that of the certificate in {certificate}") from None
        raise BadSetting(KEY, f"{certificate} and {key} cannot be used as a certificate and its key: {error}") from None
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    """In place of OpenSSL's question at the terminal."""
    raise _Encrypted


def _unreadable(variable: str, path: Path, error: OSError) -> BadSetting:
    return BadSetting(variable, f"cannot read {path}: {error.strerror}")


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """The client's side: whom the authority in a PEM file has signed; without one, the system's authorities."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise BadSetting(CA, f"there is no certificate in {ca_file}: PEM is expected") from None
    except OSError as error:
        raise BadSetting(CA, f"cannot read {ca_file}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class HandshakesConfig:
    """`open` at once, each of which takes `seconds` at most."""

    open: int = 1000
    seconds: float = 5.0


class Accepting(Protocol):
    """What takes connections, as an `asyncio.Server` does."""

    def close(self) -> None:
        """Take nobody any more; connections are left alone."""

    async def wait_closed(self) -> None: ...


class EncryptedServer:
    """Accepts connections, and serves them once their handshake is done. Past the bound of open handshakes the oldest
    of whoever has most of them gives way."""

    def __init__(
        self, listening: socket.socket, connect: Connect, certificate: Certificate, bounds: HandshakesConfig
    ) -> None:
        self._listening = listening
        self._connect = connect
        self._certificate = certificate
        self._bounds = bounds
        self._open: dict[asyncio.Task[None], Waiting[asyncio.Task[None]]] = {}
        listening.settimeout(0)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Take nobody any more, and end the handshakes that are open; connections are left alone."""
        self._accepting.cancel()
        self._listening.close()
        for handshake in [*self._open]:
            handshake.cancel()

    async def wait_closed(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._accepting

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(_EXHAUSTED_SECONDS)
                continue
            if len(self._open) >= self._bounds.open and (oldest := crowding([*self._open.values()])) is not None:
                del self._open[oldest]
                oldest.cancel()
            handshake = asyncio.create_task(self._shake_hands(connection))
            self._open[handshake] = Waiting(handshake, address, loop.time())
            handshake.add_done_callback(lambda done: self._open.pop(done, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        """What is no TLS, has no common version, goes away or is too slow ends without a word."""
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                connection,
                ssl=self._certificate.context(),
                ssl_handshake_timeout=self._bounds.seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )


@dataclass(frozen=True, slots=True)
class Acceptor:
    """How connections are taken: with TLS where there is a certificate."""

    certificate: Certificate | None = None
    bounds: HandshakesConfig = field(default_factory=HandshakesConfig)

    async def serve(self, listening: socket.socket, connect: Connect) -> Accepting:
        """On a socket that listens."""
        if self.certificate is None:
            return await asyncio.get_running_loop().create_server(connect, sock=listening, backlog=1024)
        return EncryptedServer(listening, connect, self.certificate, self.bounds)
