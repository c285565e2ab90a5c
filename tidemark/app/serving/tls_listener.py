"""Accepts the connections of the sidecar, with TLS if there is a certificate, and shares slots among clients.

uvloop's server accepts one connection per iteration of the event loop, so a probe after a thousand connections would
wait for a thousand iterations. asyncio's servers do not limit the number of handshakes, and cannot reload a
certificate. So this module accepts connections itself. For one event loop.

A certificate is loaded again when its file changes, because certificates rotate while a process runs. If every slot is
taken, a client is evicted. Clients are identified by IP address; for IPv6 by the first 64 bits, because a client
usually controls a whole /64 network.
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

FILE_CHECK_INTERVAL_SECONDS = 1.0  # between two checks of `FileWatcher` whether its files have changed

T = TypeVar("T")

_FileVersion = tuple[int, int, int] | None


class FileWatcher(Generic[T]):
    """Reloads the content of files when they change. For one thread.

    The constructor calls `load`, and raises its errors. If a later call of `load` raises `BadSetting`, the last content
    stays in use, and only the first of these errors is logged.

    Args:
        name: the name of the content, for the log.
        files: the files to watch. Links are followed, because container platforms replace files by links.
        load: reads the files. Raises `BadSetting`.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self, name: str, files: Sequence[Path], load: Callable[[], T], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._files = files
        self._load = load
        self._now = now
        self._checked_at = now()
        self._has_failed = False
        self._versions = self._current_versions()
        self._content = load()

    def content(self) -> T:
        """The current content. Checks at most once a second whether the files have changed. If they have changed, loads
        them again."""
        if self._now() - self._checked_at >= FILE_CHECK_INTERVAL_SECONDS:
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
        except BadSetting as problem:  # also if only one of two files has changed yet
            if not self._has_failed:
                log.warning(f"Could not reload {self._name}; the last content stays in use", problem=str(problem))
            self._has_failed = True
        else:
            self._has_failed = False
            log.info(f"Reloaded {self._name}", files=[str(file) for file in self._files])

    def _current_versions(self) -> list[_FileVersion]:
        return [_file_version(file) for file in self._files]


def _file_version(file: Path) -> _FileVersion:
    """The version of a file; None if the file does not exist or is not accessible."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


EVICTION_DIVISOR = 64  # an eviction frees 1/64 of the slots
FAIR_SHARE_DIVISOR = 4  # the fair share of an address is 1/4 of the slots


@lru_cache(4096)
def network_of(address: str) -> str:
    """The identity of a client: an IPv4 address, the first 64 bits of an IPv6 address, or else the first 255 characters
    of `address`.
    """
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
    """An idle connection. `address`: the client's IP address. `since`: when the connection became idle, in seconds of a
    monotonic clock."""

    connection: T
    address: str
    since: float


def pick_victims(idle_connections: Sequence[IdleConnection[T]], slots: int) -> list[T]:
    """Pick connections to evict when every slot is taken: the oldest idle connections of the client with the most idle
    connections. Closes nothing.

    Returns at most 1/64 of `slots` connections, and at least one, so that a flood of connections needs few searches.
    The list is empty if no connection is idle.
    """
    if not idle_connections:
        return []
    [(network, _)] = Counter(network_of(other.address) for other in idle_connections).most_common(1)
    candidates = (other for other in idle_connections if network_of(other.address) == network)
    oldest = nsmallest(max(1, slots // EVICTION_DIVISOR), candidates, key=lambda other: other.since)
    return [victim.connection for victim in oldest]


class NoFreeSlot(Exception):
    """Every slot is taken, and no client is evicted for the requesting address."""


class SlotPool(Generic[T]):
    """A fixed number of slots, shared fairly by address (`network_of`). For one thread.

    While slots are free, every client gets a slot. If all slots are taken, a new client may evict a client of the
    address with the most slots, called the largest address. `take` states which client. This happens in two cases:

    - The new client's address has less than half as many slots as the largest address.
    - The new client's address has less than a quarter of all slots, and the largest address has more than a quarter.

    In all other cases, a new client can evict only a client that `evict_first` prefers.
    Clients must be hashable, and are compared by identity.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken_count = 0
        self._clients_by_network: dict[str, dict[T, None]] = {}  # by network, oldest first
        self._network_by_client: dict[T, str] = {}

    def __len__(self) -> int:
        return self._taken_count

    def take(self, client: T, address: str, evict_first: Callable[[T], bool] = lambda _: False) -> T | None:
        """Give a slot to a client until `release`.

        Clients for which `evict_first` returns True are preferred for eviction. If the largest address must give up a
        slot, its oldest preferred client is evicted, or its newest client if it has no preferred client. Otherwise the
        new client evicts the oldest preferred client of its own address. If its address has no preferred client, and
        less than a quarter of all slots, the new client evicts a preferred client of any address.

        Args:
            client: the connection or request that gets the slot.
            address: the IP address of the client.
            evict_first: whether a client is preferred for eviction.

        Returns:
            The evicted client, which has lost its slot; the caller must close it. None if a slot was free.

        Raises:
            NoFreeSlot: no client is evicted for this address.
        """
        network, evicted = network_of(address), None
        if self._taken_count >= self.limit:
            evicted = self._pick_victim(self._clients_by_network.get(network, {}), evict_first)
            self.release(evicted)
        self._clients_by_network.setdefault(network, {})[client] = None
        self._network_by_client[client] = network
        self._taken_count += 1
        return evicted

    def release(self, client: T) -> None:
        """Free the slot of the client. Has no effect for a client without a slot."""
        network = self._network_by_client.pop(client, None)
        if network is None:
            return
        clients = self._clients_by_network[network]
        del clients[client]
        self._taken_count -= 1
        if not clients:
            del self._clients_by_network[network]

    def _pick_victim(self, own_clients: dict[T, None], evict_first: Callable[[T], bool]) -> T:
        """Choose the client to evict. `own_clients`: the clients of the address that needs a slot. Raises
        `NoFreeSlot`.
        """
        largest = max(self._clients_by_network.values(), key=len, default=own_clients)
        share = self.limit // FAIR_SHARE_DIVISOR
        if len(own_clients) < len(largest) // 2 or len(own_clients) < share < len(largest):
            return next(filter(evict_first, largest), next(reversed(largest)))
        # Evict a client of another address only if this address has less than its share.
        candidates = chain(own_clients, *self._clients_by_network.values()) if len(own_clients) < share else own_clients
        for candidate in filter(evict_first, candidates):
            return candidate
        raise NoFreeSlot


class FairQueue:
    """A queue of waiting tasks. Tasks are started round-robin by address; the tasks of one address in order. For one
    event loop.
    """

    def __init__(self) -> None:
        self._waiting_by_network: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting_by_network)

    def add(self, address: str, start: "Future[None]") -> None:
        """Add a task of a client at `address`. The task must await `start`, which `start_next` completes."""
        self._waiting_by_network.setdefault(network_of(address), deque()).append(start)

    def start_next(self) -> bool:
        """Remove the next task from the queue, and start it. Returns False if the task was cancelled. The queue must
        not be empty.
        """
        network, starts = self._waiting_by_network.popitem(last=False)
        start = starts.popleft()
        if starts:
            self._waiting_by_network[network] = starts
        if start.done():  # cancelled
            return False
        start.set_result(None)
        return True


CERTIFICATE_VARIABLE, KEY_VARIABLE, CA_VARIABLE = (
    f"TIDEMARK_SIDECAR_{name}_FILE" for name in ("CERTIFICATE", "KEY", "CA")
)


class Certificate:
    """The server's TLS context, from a certificate and its key in two PEM files. Changed files are loaded again.

    The constructor raises `BadSetting` if the files cannot be used. If a later load fails, the last pair stays in use.
    """

    def __init__(self, certificate: Path, key: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._contexts = FileWatcher("the certificate", (certificate, key), lambda: _tls_context(certificate, key), now)

    def context(self) -> ssl.SSLContext:
        """The TLS context for a new connection. May load the files again."""
        return self._contexts.content()


def _tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    for variable, path in ((CERTIFICATE_VARIABLE, certificate), (KEY_VARIABLE, key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise _unreadable(variable, path, error) from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:
        raise BadSetting(CERTIFICATE_VARIABLE, f"{certificate} contains no certificate in PEM format") from None
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _KeyHasPassword:
        raise BadSetting(KEY_VARIABLE, f"the key in {key} has a password; use a key without a password") from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise BadSetting(
                KEY_VARIABLE, f"the key in {key} does not belong to the certificate in {certificate}"
            ) from None
        raise BadSetting(
            KEY_VARIABLE, f"{certificate} and {key} cannot be used as a certificate and its key: {error}"
        ) from None
    return context


class _KeyHasPassword(Exception):
    pass


def _no_password() -> str:
    """Raise instead of OpenSSL's password prompt."""
    raise _KeyHasPassword


def _unreadable(variable: str, path: Path, error: OSError) -> BadSetting:
    return BadSetting(variable, f"cannot read {path}: {error.strerror}")


def client_tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Create the TLS context of a client. The context trusts the authorities in the PEM file `ca_file`; None: the
    authorities of the system.

    Raises:
        BadSetting: the file cannot be read, or contains no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise BadSetting(CA_VARIABLE, f"{ca_file} contains no certificate in PEM format") from None
    except OSError as error:
        raise BadSetting(CA_VARIABLE, f"cannot read {ca_file}: {error.strerror}") from None


ACCEPTS_PER_ITERATION = 4  # of the event loop; more would delay requests that have begun
TLS_ACCEPTS_PER_ITERATION = 2  # fewer, because a handshake takes 1 ms
_TLS_SHUTDOWN_SECONDS = 1.0  # for a client to close TLS
_ACCEPT_RETRY_SECONDS = 0.1  # the pause if the process has too many open files

ProtocolFactory = Callable[[], asyncio.Protocol]
"""Creates the protocol of a connection, as for `loop.create_server`."""


@dataclass(frozen=True)
class HandshakesConfig:
    """Limits of TLS handshakes: the largest number of concurrent handshakes, and the longest duration of each one."""

    max_open: int = 1000
    timeout_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """The configuration of a listener. Uses TLS if there is a certificate."""

    certificate: Certificate | None = None
    handshakes: HandshakesConfig = field(default_factory=HandshakesConfig)

    def serve(self, listening: socket.socket, factory: ProtocolFactory) -> "TlsListener":
        """Serve on a listening socket, in the running event loop."""
        return TlsListener(listening, factory, self.certificate, self.handshakes)


class TlsListener:
    """Accepts connections, and serves them after their TLS handshake. If the limit of handshakes is reached, the oldest
    handshakes of the address with the most handshakes are cancelled. Without a certificate there is no handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        factory: ProtocolFactory,
        certificate: Certificate | None,
        limits: HandshakesConfig,
    ) -> None:
        self._listening = listening
        self._factory = factory
        self._certificate = certificate
        self._limits = limits
        self._handshakes: dict[asyncio.Task[None], IdleConnection[asyncio.Task[None]]] = {}
        self._loop = asyncio.get_running_loop()
        self._retry_timer: asyncio.TimerHandle | None = None
        listening.settimeout(0)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no more connections, and cancel handshakes. Other connections stay open. May be called again."""
        if self._is_closed:
            return
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._certificate is not None:
            for handshake in [*self._handshakes]:
                handshake.cancel()

    @property
    def _is_closed(self) -> bool:
        return self._listening.fileno() < 0

    async def wait_closed(self) -> None:
        """Do nothing. uvicorn calls this method of its servers."""

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ITERATION if self._certificate is None else TLS_ACCEPTS_PER_ITERATION):
            try:
                connection, (address, *_) = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listening)
                self._retry_timer = self._loop.call_later(
                    _ACCEPT_RETRY_SECONDS, self._loop.add_reader, self._listening, self._accept
                )
                return
            connection.settimeout(0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._is_full:
                for oldest in pick_victims([*self._handshakes.values()], self._limits.max_open):
                    del self._handshakes[oldest]
                    oldest.cancel()
            handshake = self._loop.create_task(self._handshake(connection))
            self._handshakes[handshake] = IdleConnection(handshake, address, self._loop.time())
            handshake.add_done_callback(partial(self._on_handshake_done, connection))

    @property
    def _is_full(self) -> bool:
        return self._certificate is not None and len(self._handshakes) >= self._limits.max_open

    def _on_handshake_done(self, connection: socket.socket, handshake: asyncio.Task[None]) -> None:
        self._handshakes.pop(handshake, None)
        if handshake.cancelled():  # perhaps before the task started
            connection.close()

    async def _handshake(self, connection: socket.socket) -> None:
        """Perform the handshake, if there is a certificate, and pass the connection to its protocol. A connection whose
        handshake fails or takes too long is closed without an answer.
        """
        certificate, seconds = self._certificate, self._limits.timeout_seconds
        with suppress(OSError):
            if certificate is not None:
                await self._loop.connect_accepted_socket(
                    self._factory,
                    connection,
                    ssl=certificate.context(),
                    ssl_handshake_timeout=seconds,
                    ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS,
                )
                return
            # This task is not cancelled, because uvloop would leave the connection open. It takes one iteration.
            transport, _ = await self._loop.connect_accepted_socket(self._factory, connection)
            if self._is_closed:
                transport.abort()
