"""Real connections to a real server: what they are told, and what happens to those that behave badly."""

import asyncio
import random
import socket
import struct
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import cast

import psutil
import pytest

from tests.app.lines.given import MIB, NOWHERE, LineClient, client, no_facts, served
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.lines.conversation import KeepAlive
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import A_TURN, LineServer, LineServerConfig
from tidemark.app.read_side import metrics
from tidemark.app.read_side.opened import ReadSide, ReadSideConfig

BRISK = LineServerConfig(keep_alive=KeepAlive(interval=0.2, timeout=0.6), tick=0.05)


def test_server_says_its_name_then_ping() -> None:
    """The first two lines are SERVER and PING, before the client says anything."""
    with served(NOWHERE, LineServerConfig(name="example.org")) as address, client(address) as one:
        assert one.line() == "SERVER example.org"
        word, _, time_ms = (one.line() or "").partition(" ")
        assert word == "PING"
        assert abs(int(time_ms) / 1000 - time.time()) < 5


def test_replicate_is_answered_with_every_position(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """One POSITION per stream and writer, each `new new`, backward streams with their sign."""
    pipeline.publish(stream("s", advance("a", 0, 7), advance("b", 0, 4)), stream("back", advance("w", 0, -3)))
    with served(servers) as address, client(address, "NAME me", "PING 1", "REPLICATE") as one:
        assert one.lines(3) == ["POSITION back w -3 -3", "POSITION s a 7 7", "POSITION s b 4 4"]
        assert one.quiet(0.3)


def test_moves_without_rows_make_clients_fetch_and_empty_ones_do_not(
    pipeline: Pipeline, servers: ReadSideConfig
) -> None:
    """Where rows are not at hand `new new` is said, where nothing is `prev new`; one POSITION for each move."""
    pipeline.move("w", 0, 2)
    with served(servers) as address, client(address, "REPLICATE") as one:
        assert one.said() == "POSITION s w 2 2"
        pipeline.move("w", 2, 4)
        pipeline.move("w", 4, 6, empty=2)
        pipeline.move("w", 6, 7, facts=0, unseen=1)
        pipeline.move("w", 7, 8, facts=0, skipped=1)
        assert one.lines(4) == ["POSITION s w 4 4", "POSITION s w 4 6", "POSITION s w 7 7", "POSITION s w 8 8"]
        assert one.quiet(0.3)


def test_new_streams_and_writers_are_told(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Who asked once hears of streams that did not exist then."""
    with served(servers) as address, client(address, "REPLICATE") as one:
        pipeline.move("w", 0, 2)
        assert one.said() == "POSITION s w 2 2"
        pipeline.publish(stream("s", advance("v", 0, 3, empty=3), linear=2))
        assert one.said() == "POSITION s v 2 3"


def test_nothing_of_streams_before_replicate(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Who did not ask hears no positions; once it asks, where all stand now, and again when it asks again."""
    with served(servers) as address, client(address, "REPLICATE") as other, client(address, "NAME x") as one:
        pipeline.move("w", 0, 2)
        assert other.said() == "POSITION s w 2 2"
        assert one.quiet(0.2)
        for _ in range(2):
            one.send("REPLICATE")
            assert one.said() == "POSITION s w 2 2"


def test_client_that_comes_back_learns_what_it_missed(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Nothing is resent: the POSITION after a reconnect is beyond where the client stands, so it fetches."""
    with served(servers) as address:
        pipeline.move("w", 0, 2)
        with client(address, "REPLICATE") as one:
            assert one.said() == "POSITION s w 2 2"
        pipeline.move("w", 2, 5)
        with client(address, "REPLICATE") as one:
            assert one.said() == "POSITION s w 5 5"


RELAYED = [
    "USER_SYNC worker1 @a:b start 1500000000000",
    "CLEAR_USER_SYNC worker1",
    "FEDERATION_ACK master 1234",
    "REMOTE_SERVER_UP example.org",
    'USER_IP {"user": "@a:b"}',
    "LOCK_RELEASED worker1 name key",
    "NEW_ACTIVE_TASK 17",
    "CANCEL_TASK 17",
]


def test_relayed_commands_reach_all_others() -> None:
    """All of them go to every other connection in their order, whether it sent REPLICATE or not, and never back."""
    with served(NOWHERE) as address, client(address) as one, client(address, "REPLICATE") as two, client(address) as me:
        assert all(it.line() == "SERVER tidemark" for it in (one, two, me))
        me.send(*RELAYED)
        assert one.lines(len(RELAYED)) == two.lines(len(RELAYED)) == RELAYED
        assert me.quiet(0.1)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"HELLO\n", "no command 'HELLO'"),
        (b"RDATA s w 1 {}\n", "RDATA is for the server to say"),
        (b"\x00\x01\x02\n", "control characters"),
        (b"\xff\xff\n", "not UTF-8"),
        (b"x" * 2000, "longer than 1000 bytes"),
        (b"NAME " + b"x" * 2000 + b"\n", "longer than 1000 bytes"),
    ],
)
def test_bad_line_is_answered_with_error_and_the_end(sent: bytes, problem: str) -> None:
    """Malformed, binary and oversized lines: one ERROR that says what was wrong, then the connection closes."""
    with served(NOWHERE, LineServerConfig(longest=1000)) as address, client(address) as one:
        one.socket.sendall(sent)
        said = one.said()
        assert said
        assert said.startswith("ERROR ")
        assert problem in said
        assert one.said() is None


def test_half_line_is_not_acted_on() -> None:
    """What has no newline yet is no command, also when the connection ends there."""
    with served(NOWHERE) as address, client(address) as one:
        other = LineClient(address)
        other.socket.sendall(b"REMOTE_SERVER_UP exam")
        other.close()
        assert one.quiet(0.2)


def test_pings_come_and_silence_ends_a_connection_that_sent_one() -> None:
    """A PING comes whenever nothing else did; who sent one and then nothing is left, who sent none stays."""
    with served(NOWHERE, BRISK) as address, client(address) as person, client(address, "PING 1") as one:
        began = time.monotonic()
        while one.line() is not None:
            pass
        assert 0.5 < time.monotonic() - began < 5
        assert person.line() == "SERVER tidemark"
        times = [int((person.line() or "").removeprefix("PING ")) for _ in range(4)]
        assert max(b - a for a, b in pairwise(times)) < 1000  # 200, but for what a busy machine adds


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
        served(NOWHERE, LineServerConfig(unread=200_000)) as address,
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
        served(NOWHERE, LineServerConfig(unread_by_all=2_000_000, tick=0.05)) as address,
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
    """However much one client sends at once, the event loop looks after all else every few hundred lines."""

    async def flood() -> None:
        hub = Hub(cast(ReadSide, None), no_facts().tail, MIB)
        server = LineServer(hub, LineServerConfig())
        listening = socket.create_server(("127.0.0.1", 0))
        async with server.serving(listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"\n" * 100_000)
            begun = done = taken()
            while done - begun < 100_000:
                await asyncio.sleep(0)
                assert taken() - done <= A_TURN
                done = taken()
            writer.close()

    asyncio.run(flood())


def taken() -> float:
    return next(sample.value for family in metrics.LINES_IN.collect() for sample in family.samples)


def test_relaying_counts_as_what_it_costs() -> None:
    """A line that goes to every client is not one line's work: the loop goes round after each."""

    async def flood() -> None:
        hub = Hub(cast(ReadSide, None), no_facts().tail, MIB)
        server = LineServer(hub, LineServerConfig())
        relayed = list[object]()
        server.on_relayed = relayed.append
        listening = socket.create_server(("127.0.0.1", 0))
        async with server.serving(listening):
            crowd = [await asyncio.open_connection(*listening.getsockname()) for _ in range(A_TURN)]
            crowd[0][1].write(b"USER_IP x\n" * 20)
            done = 0
            while done < 20:
                await asyncio.sleep(0)
                assert len(relayed) - done <= 2
                done = len(relayed)
            for _, writer in crowd:
                writer.close()

    asyncio.run(flood())


def test_clients_are_told_that_the_server_stops() -> None:
    """The last line is ERROR, and then the connection ends."""
    with ExitStack() as stack:
        with served(NOWHERE) as address:
            one = stack.enter_context(client(address, "NAME x"))
            assert one.line() == "SERVER tidemark"
        assert (one.said(), one.line()) == ("ERROR server stopping", None)


def test_no_more_connections_than_allowed() -> None:
    """One too many is told so and closed; when another leaves there is room again."""
    with served(NOWHERE, LineServerConfig(connections=1)) as address:
        with client(address) as one, client(address) as two:
            assert one.line() == "SERVER tidemark"
            assert (two.line() or "").startswith("ERROR as many clients")
            assert two.line() is None

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
