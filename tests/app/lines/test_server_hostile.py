"""Clients that send or read too much, or what nobody understands: others notice nothing of it."""

import asyncio
import random
import socket
import struct
import time
from contextlib import ExitStack
from typing import cast

import psutil
import pytest

from tests.app.lines.given import MIB, NO_POSITION, RELAYED, LineClient, client, no_facts, served
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LINES_PER_ITERATION, PAUSE_FACTOR, LineServer, LineServerConfig
from tidemark.app.read_side import ReadSide, ReadSideConfig, metrics
from tidemark.app.serving.tls_listener import ListenerConfig
from tidemark.streaming.wire.line_protocol import PositionCommand


def is_gone(client: LineClient) -> bool:
    """Whether the server has cut the connection."""
    try:
        client.send("NAME still here")
    except OSError:
        return True
    return False


def test_client_that_never_reads_is_dropped() -> None:
    """It is cut off at the bound of its buffer, the memory stays, and who reads is told everything."""
    process = psutil.Process()
    with (
        served(NO_POSITION, LineServerConfig(max_unread_bytes=200_000)) as address,
        client(address, "REPLICATE", receive_buffer=4096) as deaf,
        client(address, "REPLICATE") as one,
    ):
        sender = LineClient(address)
        before, text = process.memory_info().rss, "x" * 50_000
        for number in range(200):
            sender.send(f"USER_IP {number} {text}")
            assert one.said() == f"USER_IP {number} {text}"
        assert process.memory_info().rss - before < 30_000_000
        sender.close()
        eventually(lambda: is_gone(deaf))


def test_clients_that_read_nothing_fill_no_memory_together() -> None:
    """Where all of them have more unread than they may together, those with the most are dropped."""
    with (
        served(NO_POSITION, LineServerConfig(max_total_unread_bytes=2_000_000, tick_seconds=0.05)) as address,
        client(address, "REPLICATE") as one,
        ExitStack() as crowd,
    ):
        deaf = [crowd.enter_context(client(address, "REPLICATE", receive_buffer=4096)) for _ in range(4)]
        with client(address) as sender:
            for number in range(200):
                text = f"USER_IP {number} {'x' * 50_000}"
                sender.send(text)
                assert one.said() == text
        eventually(lambda: any(map(is_gone, deaf)))
        assert one.quiet(0.2)


def test_flood_of_lines_has_its_turns() -> None:
    """However much one client sends at once, the event loop looks after all else every hundred lines, and has turns
    without any in between."""

    async def flood() -> None:
        hub = Hub(cast(ReadSide, None), no_facts().tail, MIB)
        server = LineServer(hub, LineServerConfig())
        listening = socket.create_server(("127.0.0.1", 0))
        async with server.serving(listening, ListenerConfig()):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"\n" * 20_000)
            begun = done = taken()
            rested = 0
            while done - begun < 20_000:
                await asyncio.sleep(0)
                assert taken() - done <= LINES_PER_ITERATION
                rested += taken() == done
                done = taken()
            assert rested > 20_000 / LINES_PER_ITERATION
            writer.close()

    asyncio.run(flood())


def taken() -> float:
    return next(sample.value for family in metrics.LINES_RECEIVED.collect() for sample in family.samples)


def test_client_that_asks_for_positions_without_end_takes_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions may be many. The event loop rests after it wrote them, and others get theirs too."""
    asked: list[float] = []

    def positions(_: Hub) -> list[PositionCommand]:
        asked.append(time.monotonic())
        time.sleep(0.05)
        return [PositionCommand("s", "w", 1, 1)]

    async def started(_: Hub) -> None:
        pass

    monkeypatch.setattr(Hub, "positions", positions)
    monkeypatch.setattr(Hub, "wait_until_started", started)
    with served(NO_POSITION) as address, client(address) as flooding, client(address) as one:
        begun = time.monotonic()
        for _ in range(10):
            flooding.send(b"\n".join([b"REPLICATE"] * 500))
            time.sleep(0.1)
        one.send("REPLICATE")
        assert one.said() == "POSITION s w 1 1"
        passed = time.monotonic() - begun
        assert len(asked) <= passed / (0.05 * (1 + PAUSE_FACTOR)) + 2


def test_relaying_counts_as_what_it_costs() -> None:
    """A line that goes to every client is not one line's work: the loop goes round after each."""

    async def flood() -> None:
        hub = Hub(cast(ReadSide, None), no_facts().tail, MIB)
        server = LineServer(hub, LineServerConfig())
        relayed = list[object]()
        server.on_relayed = relayed.append
        listening = socket.create_server(("127.0.0.1", 0))
        async with server.serving(listening, ListenerConfig()):
            crowd = [await asyncio.open_connection(*listening.getsockname()) for _ in range(LINES_PER_ITERATION)]
            crowd[0][1].write(b"USER_IP x\n" * 20)
            done = 0
            while done < 20:
                await asyncio.sleep(0)
                assert len(relayed) - done <= 2
                done = len(relayed)
            for _, writer in crowd:
                writer.close()

    asyncio.run(flood())


def test_no_more_connections_than_allowed() -> None:
    """One too many is told so and closed; when another leaves there is room again. A connection that never sent a line
    gives way."""
    with served(NO_POSITION, LineServerConfig(max_connections=1)) as address:
        before = taken()
        with client(address) as silent, client(address, "NAME one") as one:
            assert silent.line() == "SERVER tidemark"
            assert (silent.said() or "").startswith("ERROR this sidecar has reached its limit of clients")
            assert one.line() == "SERVER tidemark"
            eventually(lambda: taken() > before)
            two = LineClient(address)
            assert (two.line() or "").startswith("ERROR this sidecar has reached its limit of clients")
            assert two.line() is None
            two.close()

        def served_again() -> bool:
            with client(address) as three:
                return three.line() == "SERVER tidemark"

        eventually(served_again)


def test_ten_thousand_fuzzed_lines(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Whatever is sent, the server answers with ERROR or does as it is told, and others notice nothing of it."""
    pipeline.move("w", 0, 1)
    draw = random.Random(5)
    words = [*RELAYED, "PING 1", "NAME x", "REPLICATE", "SERVER a", "RDATA s w 1 {}", "POSITION s w 1 1", "ERROR x", ""]

    def fuzzed() -> bytes:
        line = bytearray(draw.choice(words).encode() if draw.random() < 0.7 else draw.randbytes(draw.randint(0, 80)))
        for _ in range(draw.randint(0, 2)):
            if line and draw.random() < 0.5:
                line[draw.randrange(len(line))] = draw.randrange(256)
        return bytes(line)

    def torn(data: bytes) -> None:
        """Sent in two pieces; the server may have left meanwhile."""
        cut = draw.randint(0, len(data))
        with LineClient(address).socket as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                for piece in (data[:cut], data[cut:]):
                    sock.sendall(piece)
            except OSError:
                return

    with served(servers) as address, client(address, "REPLICATE") as one:
        assert one.said() == "POSITION s w 1 1"
        for _ in range(200):
            torn(b"".join(fuzzed() + b"\n" for _ in range(50)))
        pipeline.move("w", 1, 2)
        while (said := one.said()) != "POSITION s w 2 2":
            assert said
            assert said.split(" ")[0] in {line.split(" ")[0] for line in RELAYED}
        with client(address, "REPLICATE") as two:
            assert two.said() == "POSITION s w 2 2"
