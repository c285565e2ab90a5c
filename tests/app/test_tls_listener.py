"""How connections are taken: many at once, and handshakes that never end."""

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from typing import cast

import pytest
import uvloop

from tests.app.lines.given import NO_POSITION, Address, served
from tests.fix_tls import Authority
from tidemark.app.serving import tls_listener
from tidemark.app.serving.tls_listener import Certificate, HandshakesConfig, ListenerConfig, client_tls_context
from tidemark.app.stack.processes import LOOPBACK


class _Taken(asyncio.Protocol):
    """`made` holds the transports of all connections that were taken."""

    made: list[asyncio.Transport]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(cast(asyncio.Transport, transport))


def _taking(check: Callable[[list[asyncio.Transport], list[socket.socket]], Awaitable[None]]) -> None:
    """Run `check` with 300 clients that connected before the first of them was taken."""

    async def serve() -> None:
        made = _Taken.made = []
        with closing(socket.create_server((LOOPBACK, 0), backlog=1024)) as listening, ExitStack() as stack:
            crowd = [
                stack.enter_context(socket.create_connection(listening.getsockname(), timeout=60)) for _ in range(300)
            ]
            server = ListenerConfig().serve(listening, _Taken)
            try:
                await check(made, crowd)
            finally:
                server.close()
                for transport in made:
                    transport.abort()
                for each in crowd:  # until the server has let it go, taken or not
                    await asyncio.to_thread(_over, each)

    uvloop.run(serve())


def test_who_comes_behind_a_crowd_is_taken_soon() -> None:
    """Connections that come at once are taken many at a turn of the event loop, and not one: a probe that came last
    does not wait for as many turns as others came before it."""

    async def check(made: list[asyncio.Transport], crowd: list[socket.socket]) -> None:
        turns, most = 0, 0
        while len(made) < len(crowd) and turns < 100:
            before = len(made)
            await asyncio.sleep(0)
            most = max(most, len(made) - before)
            turns += 1
        assert len(made) == len(crowd)
        assert most <= 2 * tls_listener.ACCEPTS_PER_ITERATION

    _taking(check)


def test_small_answers_are_not_held_back() -> None:
    """Each connection sends what is written at once, however little it is (TCP_NODELAY)."""

    async def check(made: list[asyncio.Transport], crowd: list[socket.socket]) -> None:
        while len(made) < len(crowd):
            await asyncio.sleep(0)
        for transport in made:
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    _taking(check)


def test_who_is_not_taken_yet_is_let_go_at_the_end() -> None:
    """A server that closes in the middle of a crowd leaves no connection behind, half open or forgotten."""

    async def check(made: list[asyncio.Transport], crowd: list[socket.socket]) -> None:
        while not made:
            await asyncio.sleep(0)
        assert len(made) < len(crowd)

    _taking(check)


def _no_more_files(*_: object) -> tuple[socket.socket, object]:
    raise OSError(24, "Too many open files")


def test_a_process_out_of_files_takes_connections_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it may open none it waits a moment and does not go round and round; then those who wait are taken."""

    async def check(made: list[asyncio.Transport], crowd: list[socket.socket]) -> None:
        tries = 0

        def refused(*given: object) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            return _no_more_files(*given)

        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", refused)
            for _ in range(1000):
                await asyncio.sleep(0)
        assert not made
        assert 0 < tries < 100
        while len(made) < len(crowd):
            await asyncio.sleep(0.01)

    _taking(check)


def _certificate(authority: Authority) -> Certificate:
    issued = authority.issue(LOOPBACK)
    return Certificate(issued.certificate, issued.key)


def _connected(address: Address, authority: Authority) -> ssl.SSLSocket:
    raw = socket.create_connection(address, timeout=60)
    return client_tls_context(authority.ca_file).wrap_socket(raw, server_hostname=LOOPBACK)


def _over(connection: socket.socket) -> bool:
    """Whether the server has ended it."""
    try:
        return connection.recv(100) == b""
    except (ConnectionResetError, BrokenPipeError):
        return True


def test_handshakes_that_say_nothing_keep_nobody_out(authority: Authority) -> None:
    """Past the bound the oldest of them gives way, and at last all do; whoever shook hands before is left alone."""
    acceptor = ListenerConfig(_certificate(authority), HandshakesConfig(max_open=3, timeout_seconds=1.5))
    with served(NO_POSITION, acceptor=acceptor) as address, ExitStack() as stack:
        honest = stack.enter_context(_connected(address, authority))
        assert honest.recv(7) == b"SERVER "
        silent = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(20)]
        assert _over(silent[0])
        another = stack.enter_context(_connected(address, authority))
        assert another.recv(7) == b"SERVER "
        assert all(_over(each) for each in silent)
        honest.sendall(b"PING 1\nNONSENSE\n")
        with honest.makefile("rb") as lines:
            assert any(line.startswith(b"ERROR ") for line in lines)


def test_whoever_speaks_no_tls_is_sent_away(authority: Authority) -> None:
    """Noise, or a client without TLS, ends its own connection alone."""
    acceptor = ListenerConfig(_certificate(authority))
    with served(NO_POSITION, acceptor=acceptor) as address:
        for said in (b"REPLICATE\n", b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000)):
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(said)
                while not _over(connection):
                    """What TLS says of it."""
