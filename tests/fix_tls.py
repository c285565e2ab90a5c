"""Certificates, and TLS in front of servers whose binaries along with us have none: the handshake is real."""

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tidemark.app.stack.processes import LOOPBACK

SSL_REQUEST = bytes.fromhex("0000000804d2162f")  # how a client of Postgres asks for TLS


@dataclass(frozen=True)
class Pem:
    """Files: a certificate with its chain, its key in the form PKCS#8, and both in one."""

    certificate: Path
    key: Path
    both: Path


class Authority:
    """Signs certificates; `ca_file` is what others trust it by."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca = trustme.CA()
        self.ca_file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str) -> Pem:
        """For the host or user `name`."""
        leaf = self._ca.issue_cert(name, common_name=name)
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        secret = load_pem_private_key(leaf.private_key_pem.bytes(), password=None)
        key = secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        pem = Pem(*(self._directory / f"{name}.{part}.pem" for part in ("crt", "key", "both")))
        for path, content in ((pem.certificate, chain), (pem.key, key), (pem.both, key + chain)):
            path.write_bytes(content)
        return pem

    def server_context(self) -> ssl.SSLContext:
        pem = self.issue(LOOPBACK)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pem.certificate, pem.key)
        return context


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that signed nothing of what the servers have."""
    return Authority(tmp_path_factory.mktemp("stranger"))


class Front:
    """A port that speaks TLS and hands what it is told to `target`, a port that does not."""

    def __init__(self, target: int, context: ssl.SSLContext, preface: bytes) -> None:
        self._target = target
        self._context = context
        self._preface = preface
        self.port = 0

    async def serve(self, ready: Callable[[], None], ending: asyncio.Event) -> None:
        early = None if self._preface else self._context
        async with await asyncio.start_server(self._client, LOOPBACK, 0, ssl=early) as server:
            self.port = server.sockets[0].getsockname()[1]
            ready()
            await ending.wait()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._hand_on(reader, writers)
            for each in writers:
                each.close()
                with suppress(OSError):
                    await each.wait_closed()
        except asyncio.CancelledError:
            # The front ends: no time for the other side to agree to the end of TLS.
            for each in writers:
                each.transport.abort()
            raise

    async def _hand_on(self, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]) -> None:
        [writer] = writers
        if self._preface:
            if await reader.readexactly(len(self._preface)) != self._preface:
                return
            writer.write(b"S")
            await writer.start_tls(self._context)
        behind, back = await asyncio.open_connection(LOOPBACK, self._target)
        writers.append(back)
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(reader, back))
            both.create_task(_pump(behind, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until there is no more, or the front ends."""
    try:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


@contextmanager
def tls_front(target: int, authority: Authority, preface: bytes = b"") -> Iterator[int]:
    """The port of a `Front`; with a `preface` the client says that first, in clear, and is answered `S`."""
    front = Front(target, authority.server_context(), preface)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(front.serve(ready.set, ending))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield front.port
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
