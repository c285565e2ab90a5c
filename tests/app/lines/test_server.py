"""Real connections to a real server: what they are told, and what happens to those that behave badly."""

import time
from contextlib import ExitStack
from itertools import pairwise
from statistics import median

import pytest

from tests.app.lines.given import NO_POSITION, RELAYED, LineClient, client, served
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tidemark.app.lines.server import KeepAlive, LineServerConfig
from tidemark.app.read_side import ReadSideConfig

BRISK = LineServerConfig(keep_alive=KeepAlive(interval_seconds=0.2, timeout_seconds=0.6), tick_seconds=0.05)


def test_server_says_its_name_then_ping() -> None:
    """The first two lines are SERVER and PING, before the client says anything."""
    with served(NO_POSITION, LineServerConfig(name="example.org")) as address, client(address) as one:
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


def test_relayed_commands_reach_all_others() -> None:
    """All of them go to every other connection in their order, whether it sent REPLICATE or not, and never back."""
    with (
        served(NO_POSITION) as address,
        client(address) as one,
        client(address, "REPLICATE") as two,
        client(address) as me,
    ):
        assert all(it.line() == "SERVER tidemark" for it in (one, two, me))
        me.send(*RELAYED)
        assert one.lines(len(RELAYED)) == two.lines(len(RELAYED)) == RELAYED
        assert me.quiet(0.1)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"HELLO\n", "unknown command 'HELLO'"),
        (b"RDATA s w 1 {}\n", "RDATA, which is a command of the server"),
        (b"\x00\x01\x02\n", "control characters"),
        (b"\xff\xff\n", "not UTF-8"),
        (b"x" * 2000, "longer than 1000 bytes"),
        (b"NAME " + b"x" * 2000 + b"\n", "longer than 1000 bytes"),
    ],
)
def test_bad_line_is_answered_with_error_and_the_end(sent: bytes, problem: str) -> None:
    """Malformed, binary and oversized lines: one ERROR that says what was wrong, then the connection closes."""
    with served(NO_POSITION, LineServerConfig(max_line_bytes=1000)) as address, client(address) as one:
        one.socket.sendall(sent)
        said = one.said()
        assert said
        assert said.startswith("ERROR ")
        assert problem in said
        assert one.said() is None


def test_half_line_is_not_acted_on() -> None:
    """What has no newline yet is no command, also when the connection ends there."""
    with served(NO_POSITION) as address, client(address) as one:
        other = LineClient(address)
        other.socket.sendall(b"REMOTE_SERVER_UP exam")
        other.close()
        assert one.quiet(0.2)


def test_pings_come_and_silence_ends_a_connection_that_sent_one() -> None:
    """A PING comes whenever nothing else did; who sent one and then nothing is left, who sent none stays."""
    began = time.monotonic()
    with served(NO_POSITION, BRISK) as address, client(address) as person, client(address, "PING 1") as one:
        while one.line() is not None:
            pass
        assert time.monotonic() - began > 0.5
        assert person.line() == "SERVER tidemark"
        times = [int((person.line() or "").removeprefix("PING ")) for _ in range(4)]
        # 200, but for what a busy machine adds to some of them
        assert median(b - a for a, b in pairwise(times)) < 1000


def test_clients_are_told_that_the_server_stops() -> None:
    """The last line is ERROR, and then the connection ends."""
    with ExitStack() as stack:
        with served(NO_POSITION) as address:
            one = stack.enter_context(client(address, "NAME x"))
            assert one.line() == "SERVER tidemark"
        assert (one.said(), one.line()) == ("ERROR server stopping", None)
