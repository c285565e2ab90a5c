"""A way to a server that can be cut: for one process, while all others reach the server."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tidemark.app.stack.processes import LOOPBACK


class Way:
    """Leads to `port` of this machine from `here`. Cut, it ends what goes over it, and lets nothing in."""

    def __init__(self, port: int) -> None:
        self.here = 0
        self._port = port
        self._open = True
        self._travellers: set[asyncio.StreamWriter] = set()
        self._begun = threading.Event()

    @contextmanager
    def leading(self) -> Iterator["Way"]:
        thread = threading.Thread(target=asyncio.run, args=[self._serve()])
        thread.start()
        self._begun.wait()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)
            thread.join()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._lead, LOOPBACK, 0)
        self.here = server.sockets[0].getsockname()[1]
        self._begun.set()
        await self._ended.wait()
        server.close()
        for writer in [*self._travellers]:
            writer.transport.abort()

    @contextmanager
    def cut(self) -> Iterator[None]:
        self._open = False
        for writer in [*self._travellers]:
            self._loop.call_soon_threadsafe(writer.transport.abort)
        try:
            yield
        finally:
            self._open = True

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        both = {writer}
        with suppress(OSError, asyncio.CancelledError):
            if self._open:
                there, thither = await asyncio.open_connection(LOOPBACK, self._port)
                both.add(thither)
                self._travellers |= both
                await asyncio.gather(_carried(reader, thither), _carried(there, writer))
        self._travellers -= both
        for each in both:
            each.transport.abort()


async def _carried(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(65536):
            writer.write(some)
            await writer.drain()
    writer.close()
