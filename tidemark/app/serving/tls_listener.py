"""Accepts the connections of the sidecar: many per turn of the event loop, and with TLS if there is a certificate.

uvloop's server accepts one connection per turn of the event loop, so a probe after a thousand connections would wait
for a thousand turns. asyncio's servers do not limit the number or duration of handshakes, and cannot reload a
certificate. So this module accepts connections itself. For one event loop.

A certificate is loaded again when its file changes, because certificates rotate while a process runs. If every slot is
taken, a client is evicted. Clients are identified by address; for IPv6 by the first 64 bits, because a client usually
controls a whole /64 network.
"""

import asyncio
import socket
import ssl
import time
from asyncio import Future
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from heapq import nsmallest
from ipaddress import IPv6Address, ip_address
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from tidemark.common.errors import BadSetting
from tidemark.common.log import get_logger

log = get_logger(__name__)

CHECK_EVERY = 1.0  # seconds

T = TypeVar("T")

_Version = tuple[int, int, int] | None


class FileWatcher(Generic[T]):
    """Reloads the content of files when they change. For one thread.

    The constructor raises the `BadSetting` of `load`. Later, the last content stays in use while `load` fails, and the
    first failure is logged.

    Args:
        what: the name of the content, for the log.
        files: the files to watch. Links are followed, because container platforms replace files by links.
        load: reads the files. Raises `BadSetting`.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self, name: str, files: Sequence[Path], load: Callable[[], T], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = name
        self._files = files
        self._load = load
        self._now = now
        self._checked_at = now()
        self._has_failed = False
        self._versions = self._current_versions()
        self._content = load()

    def content(self) -> T:
        """The current content. The files are checked at most once a second."""
        if self._now() - self._checked_at >= CHECK_EVERY:
            self._checked_at = self._now()
            self._check()
        return self._content

    def _check(self) -> None:
        versions = self._current_versions()
        if versions == self._versions:
            self._has_failed = False
            return
        try:
            self._content, self._versions = self._load(), versions
        except BadSetting as problem:  # also raised between the changes of two files
            if not self._has_failed:
                log.warning(f"Could not reload {self._what}; the last content stays in use", problem=str(problem))
            self._has_failed = True
        else:
            self._has_failed = False
            log.info(f"Reloaded {self._what}", files=[str(file) for file in self._files])

    def _current_versions(self) -> list[_Version]:
        return [_version(file) for file in self._files]


def _version(file: Path) -> _Version:
    """The version of a file; None if it does not exist or is not accessible."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


EVICTION_DIVISOR = 64  # one of this many slots is freed at once
FAIR_SHARE_DIVISOR = 4  # one of this many slots is the fair share of an address


@lru_cache(4096)
def network_of(address: str) -> str:
    """The identity of a client: an IPv4 address, or the first 64 bits of an IPv6 address; other text unchanged."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:255]
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return f"{IPv6Address(int(parsed) >> 64 << 64)}/64"


@dataclass(frozen=True, slots=True)
class IdleConnection(Generic[T]):
    """An idle connection. `since`: seconds of a monotonic clock."""

    connection: T
    address: str
    since: float


def pick_victims(waiting: Sequence[IdleConnection[T]], places: int) -> list[T]:
    """Connections to evict when every slot is taken: the oldest idle ones of the address with the most idle
    connections.

    Empty if there are none. With many slots, several at once, so that a flood of connections needs few searches.
    """
    if not waiting:
        return []
    [(network, _)] = Counter(network_of(other.address) for other in waiting).most_common(1)
    of_network = (other for other in waiting if network_of(other.address) == network)
    return [
        other.connection
        for other in nsmallest(max(1, places // EVICTION_DIVISOR), of_network, key=lambda other: other.since)
    ]


class NoFreeSlot(Exception):
    """Every slot is taken, and the requesting address already has its share."""


class SlotPool(Generic[T]):
    """A fixed number of slots, shared fairly by address. For one thread.

    While slots are free, every client gets one. If all are taken, an address that has less than a quarter of the slots,
    or less than half of what another address has, gets the newest slot of the address with the most slots.

    Holders are compared by identity, as keys of a dict.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._holders: dict[str, dict[T, None]] = {}
        self._networks: dict[T, str] = {}

    def __len__(self) -> int:
        return self._taken

    def take(self, client: T, address: str, first: Callable[[T], bool] = lambda _: False) -> T | None:
        """Give a slot to a client until `leave`.

        Args:
            client: the connection or request that gets the slot.
            address: its address.
            first: of the address that loses a slot, the oldest client for which this is true is evicted, else the
                newest one. An address with its full share can only replace its own client for which this is true.

        Returns:
            The evicted client, which has lost its slot. None if a slot was free.

        Raises:
            NoFreeSlot: no client is evicted for this address.
        """
        network, evicted = network_of(address), None
        if self._taken >= self.limit:
            evicted = self._victim(self._holders.get(network, {}), first)
            self.leave(evicted)
        self._holders.setdefault(network, {})[client] = None
        self._networks[client] = network
        self._taken += 1
        return evicted

    def leave(self, client: T) -> None:
        """Free the slot of the client. May be called again, and for a client that was evicted."""
        network = self._networks.pop(client, None)
        if network is None:
            return
        holders = self._holders[network]
        del holders[client]
        self._taken -= 1
        if not holders:
            del self._holders[network]

    def _victim(self, own: dict[T, None], first: Callable[[T], bool]) -> T:
        largest = max(self._holders.values(), key=len, default=own)
        share = self.limit // FAIR_SHARE_DIVISOR
        if len(own) < len(largest) // 2 or len(own) < share < len(largest):
            return next(filter(first, largest), next(reversed(largest)))
        # Evict another address only if this one has less than its share.
        of_all = chain(own, *self._holders.values()) if len(own) < share else own
        for candidate in filter(first, of_all):
            return candidate
        raise NoFreeSlot


class FairQueue:
    """Tasks that wait for a turn: round-robin by address, in order for each address. For one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, address: str, turn: "Future[None]") -> None:
        self._waiting.setdefault(network_of(address), deque()).append(turn)

    def start_next(self) -> bool:
        """Give the next task its turn. False: the task was cancelled. Call it only while a task waits."""
        network, turns = self._waiting.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._waiting[network] = turns
        if turn.done():  # cancelled
            return False
        turn.set_result(None)
        return True


CERTIFICATE, KEY, CA = (f"TIDEMARK_SIDECAR_{name}_FILE" for name in ("CERTIFICATE", "KEY", "CA"))


class Certificate:
    """The server's TLS context, from a certificate and its key in two PEM files, which are reloaded when they change.

    Raises `BadSetting` if the files cannot be used at the start. Later, the last pair stays in use.
    """

    def __init__(self, certificate: Path, key: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._contexts = FileWatcher("the certificate", (certificate, key), lambda: _loaded(certificate, key), now)

    def context(self) -> ssl.SSLContext:
        """The TLS context for a new connection."""
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
    """Raise instead of OpenSSL's password prompt."""
    raise _KeyHasPassword


def _unreadable(variable: str, path: Path, error: OSError) -> BadSetting:
    return BadSetting(variable, f"cannot read {path}: {error.strerror}")


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """The client's TLS context: trusts the authority in a PEM file; without a file, the system's authorities."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise BadSetting(CA, f"there is no certificate in {ca_file}: PEM is expected") from None
    except OSError as error:
        raise BadSetting(CA, f"cannot read {ca_file}: {error.strerror}") from None


AT_ONCE = 64  # connections that are accepted in one turn of the event loop
ENCRYPTED_AT_ONCE = 8  # the same with TLS, whose handshake takes 1 ms
_SHUTDOWN_SECONDS = 1.0  # for a client to close TLS
_EXHAUSTED_SECONDS = 0.1  # pause if the process has too many open files

Connect = Callable[[], asyncio.Protocol]
"""A protocol factory for connections, as for `loop.create_server`."""


@dataclass(frozen=True)
class HandshakesConfig:
    """The largest number of open handshakes, and the time limit of each in seconds."""

    open: int = 1000
    seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """The configuration of a listener. Uses TLS if there is a certificate."""

    certificate: Certificate | None = None
    bounds: HandshakesConfig = field(default_factory=HandshakesConfig)

    def serve(self, listening: socket.socket, connect: Connect) -> "TlsListener":
        """Serve on a listening socket, in the running event loop."""
        return TlsListener(listening, connect, self.certificate, self.bounds)


class TlsListener:
    """Accepts connections, and serves them after their TLS handshake. Beyond the limit of open handshakes, the oldest
    ones of the address with the most are cancelled.
    """

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
        """Accept no more connections, and cancel open handshakes. Other connections stay open. May be called again."""
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
        """Perform the handshake. A connection without TLS or a common version, or that is slow or closed, is closed
        without an answer.
        """
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
            # Never cancelled, because uvloop would leave the connection open; it takes one turn of the loop.
            transport, _ = await self._loop.connect_accepted_socket(self._connect, connection)
            if self._closed:
                transport.abort()
