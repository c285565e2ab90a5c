"""Sidecars on one channel of a real Redis: who answers, what passes through, and what a death leaves."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from tests.app.lines.given import client, served
from tests.fix_servers import deaf
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.lines import channel as speaker_module
from tidemark.app.lines import hub as hub_module
from tidemark.app.lines.channel import ANSWER_INTERVAL_SECONDS, Channel, ChannelConfig
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LineServer, LineServerConfig
from tidemark.app.read_side import ReadSide, ReadSideConfig
from tidemark.app.stack.processes import RedisServer
from tidemark.common.environment import child_environment
from tidemark.sinks.postgres.database import migrate
from tidemark.sinks.redis.client import lines_channel

TERMS = ChannelConfig("example.org")


def connected(url: str) -> Any:
    """Any, because its types say that every answer may be awaitable."""
    return redis.Redis.from_url(url, decode_responses=True)


class ChannelWorker:
    """A client that knows only this dialect."""

    def __init__(self, url: str) -> None:
        self.redis = connected(url)
        self._pubsub = self.redis.pubsub()
        self._pubsub.subscribe(TERMS.channel)
        assert self._pubsub.get_message(timeout=60)["type"] == "subscribe"  # confirmed

    def says(self, line: str) -> None:
        self.redis.publish(TERMS.channel, line)
        assert self.hears() == line

    def hears(self, seconds: float = 60.0) -> str | None:
        message = self._pubsub.get_message(timeout=seconds)
        return None if message is None else str(message["data"])

    def hears_last(self, line: str) -> list[str]:
        """Everything up to `line`, without it."""
        found: list[str] = []
        while (heard := self.hears()) != line:
            assert heard is not None, found
            found.append(heard)
        return found


@pytest.fixture
def worker(redis_url: str) -> Iterator[ChannelWorker]:
    made = ChannelWorker(redis_url)
    yield made
    made.redis.close()


def spoken(read_side: ReadSide, hub: Hub, server: LineServer) -> AbstractAsyncContextManager[None]:
    return Channel(hub, server, read_side.redis_reader.client, TERMS).open()


@contextmanager
def speaking(servers: ReadSideConfig, worker: ChannelWorker) -> Iterator[tuple[str, int]]:
    """A sidecar that has begun to speak."""
    with served(servers, companion=spoken) as address:
        eventually(lambda: worker.redis.exists(f"tidemark:lines:{{{TERMS.channel}}}:leader"))
        yield address


def test_replicate_is_answered_by_one_sidecar(
    pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker
) -> None:
    """However many run, each position comes once."""
    pipeline.publish(stream("s", advance("a", 0, 7), advance("b", 0, 4)))
    with speaking(servers, worker), served(servers, companion=spoken):
        assert worker.hears_last("POSITION s b 4 4")[-1] == "POSITION s a 7 7"
        worker.says("REPLICATE")
        assert [worker.hears(), worker.hears()] == ["POSITION s a 7 7", "POSITION s b 4 4"]
        assert worker.hears(0.5) is None


def test_many_who_ask_at_once_get_few_answers(
    pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker
) -> None:
    """No storm: one answer is for all who asked before it."""
    pipeline.move("w", 0, 7)
    with speaking(servers, worker):
        worker.hears_last("POSITION s w 7 7")
        began = time.monotonic()
        for _ in range(100):
            worker.redis.publish(TERMS.channel, "REPLICATE")
        answers = 0
        while (line := worker.hears(1.0)) is not None:
            answers += line != "REPLICATE"
        assert 1 <= answers <= 2 + (time.monotonic() - began) / ANSWER_INTERVAL_SECONDS


def test_moves_are_said_once(pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker) -> None:
    """By whichever sidecar speaks, joined, while two run."""
    pipeline.move("w", 0, 1)
    with speaking(servers, worker), served(servers, companion=spoken):
        worker.hears_last("POSITION s w 1 1")
        pipeline.move("w", 1, 3, empty=2)
        pipeline.move("w", 3, 4)
        assert [worker.hears(), worker.hears()] == ["POSITION s w 1 3", "POSITION s w 4 4"]
        assert worker.hears(0.3) is None


def test_tokens_of_a_backward_stream_rise(pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker) -> None:
    """On the channel, as workers have it among themselves."""
    pipeline.move("w", 0, -1)
    with speaking(servers, worker):
        worker.hears_last("POSITION s w 1 1")
        pipeline.move("w", -1, -3, empty=2)
        pipeline.move("w", -3, -4)
        assert [worker.hears(), worker.hears()] == ["POSITION s w 1 3", "POSITION s w 4 4"]


def test_relayed_commands_pass_in_both_directions(servers: ReadSideConfig, worker: ChannelWorker) -> None:
    """From a connection to the channel and to the connections of other sidecars, and back; nobody hears an echo."""
    with (
        speaking(servers, worker) as one,
        served(servers, companion=spoken) as two,
        client(one) as first,
        client(one) as companion,
        client(two) as other,
    ):
        assert all(it.line() == "SERVER tidemark" for it in (first, companion, other))
        listening = eventually(lambda: worker.redis.pubsub_numsub(TERMS.channel)[0][1] == 3)
        assert listening
        first.send("REMOTE_SERVER_UP a.example")
        assert worker.hears() == companion.said() == other.said() == "REMOTE_SERVER_UP a.example"
        worker.says("USER_IP b")
        assert first.said() == companion.said() == other.said() == "USER_IP b"
        worker.says("NAME is not for others")
        worker.says("this is no command")
        assert worker.hears(0.2) is None
        assert first.quiet(0.1)
        assert companion.quiet(0.1)
        assert other.quiet(0.1)


def relayed(read_side: ReadSide, hub: Hub, server: LineServer) -> AbstractAsyncContextManager[None]:
    """Where no channel was asked for."""
    return Channel(hub, server, read_side.redis_reader.client, None).open()


def listeners(worker: ChannelWorker, name: str, count: int) -> None:
    """Wait until so many sidecars that are called `name` hear each other."""
    channel = lines_channel(name)
    eventually(lambda: worker.redis.pubsub_numsub(channel)[0][1] == count)


def test_relayed_commands_reach_the_clients_of_every_sidecar(servers: ReadSideConfig, worker: ChannelWorker) -> None:
    """Also where no channel was asked for; each other client hears them once, and those of another server never."""
    another = LineServerConfig(name="another")
    with (
        served(servers, companion=relayed) as one,
        served(servers, companion=relayed) as two,
        served(servers, another, companion=relayed) as three,
        client(one) as first,
        client(one) as companion,
        client(two) as other,
        client(three) as stranger,
    ):
        listeners(worker, "tidemark", 2)
        listeners(worker, "another", 1)
        assert all(it.line() for it in (first, companion, other, stranger))
        first.send("USER_SYNC w @a:b start 1 DEVICE", "REPLICATE")
        assert companion.said() == other.said() == "USER_SYNC w @a:b start 1 DEVICE"
        other.send("USER_IP b")
        assert first.said() == companion.said() == "USER_IP b"
        assert other.quiet(0.2)
        assert companion.quiet(0.1)
        assert stranger.quiet(0.1)
        assert worker.hears(0.1) is None


def test_databases_of_one_redis_do_not_hear_each_other(
    pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker, another_database: str
) -> None:
    """Pub/sub knows no databases: of two installations with the same names each says its own positions alone, and
    passes on what its own clients send."""
    migrate(another_database)
    companion = ReadSideConfig(f"{str(servers.redis).removesuffix('/0')}/7", another_database)
    pipeline.move("w", 0, 7)
    with (
        speaking(servers, worker) as one,
        served(companion, companion=spoken) as two,
        client(one) as first,
        client(two) as other,
    ):
        eventually(lambda: worker.redis.pubsub_numsub(f"{TERMS.channel}/7")[0][1] == 1)
        worker.hears_last("POSITION s w 7 7")
        assert all(it.line() for it in (first, other))
        worker.redis.publish(f"{TERMS.channel}/7", "USER_IP c")
        assert other.said() == "USER_IP c"
        pipeline.move("w", 7, 8)
        first.send("USER_IP b")
        assert {worker.hears(), worker.hears()} == {"POSITION s w 8 8", "USER_IP b"}
        assert worker.hears(0.2) is None
        assert first.quiet(0.1)
        assert other.quiet(0.1)
    with (
        served(servers, companion=relayed) as one,
        served(companion, companion=relayed) as two,
        client(one) as first,
        client(two) as other,
    ):
        listeners(worker, "tidemark", 1)
        eventually(lambda: worker.redis.pubsub_numsub("tidemark:lines:tidemark/7")[0][1] == 1)
        assert all(it.line() for it in (first, other))
        first.send("USER_IP b")
        assert other.quiet(0.3)


def test_relayed_commands_do_not_grow_old(
    servers: ReadSideConfig, worker: ChannelWorker, redis_server: RedisServer
) -> None:
    """What was sent while Redis did not answer is not passed on when it does: others would take it for news. Clients of
    the same sidecar have it at once."""
    with (
        capture_logs() as logs,
        served(servers, companion=relayed) as one,
        served(servers, companion=relayed) as two,
        client(one) as first,
        client(one) as companion,
        client(two) as other,
    ):
        listeners(worker, "tidemark", 2)
        assert all(it.line() for it in (first, companion, other))
        with deaf(redis_server):
            first.send(*(f"USER_IP {number}" for number in range(100)))
            assert companion.lines(100)[-1] == "USER_IP 99"
            eventually(lambda: any("do not reach" in line["event"] for line in logs))
        listeners(worker, "tidemark", 2)
        first.send("USER_IP new")
        heard = [other.said()]
        while heard[-1] != "USER_IP new":
            heard.append(other.said())
        assert len(heard) <= 3


def test_speaker_that_ends_gives_its_place_away(
    pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker
) -> None:
    """At once, and the successor begins with where writers stand."""
    pipeline.move("w", 0, 1)
    with speaking(servers, worker):
        worker.hears_last("POSITION s w 1 1")
    assert not worker.redis.exists(f"tidemark:lines:{{{TERMS.channel}}}:leader")
    pipeline.move("w", 1, 5)
    with speaking(servers, worker):
        assert worker.hears() == "POSITION s w 5 5"


def test_writers_that_left_are_forgotten(
    pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the speaker, in what it leaves to its successor, and in answers; one that comes back is announced again."""
    monkeypatch.setattr(hub_module, "FORGET_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(speaker_module, "FORGET_INTERVAL_SECONDS", 0.1)
    told = f"tidemark:lines:{{{TERMS.channel}}}:announced"
    pipeline.publish(stream("s", advance("old", 0, 5), advance("w", 0, 7), linear=7))
    with speaking(servers, worker):
        eventually(lambda: set(worker.redis.hgetall(told)) == {"s old", "s w"})
        pipeline.publish(stream("s", dropped_writers=["old"], linear=7))
        eventually(lambda: worker.redis.publish(TERMS.channel, "REPLICATE") and worker.redis.hkeys(told) == ["s w"])
        pipeline.publish(stream("s", advance("old", 5, 8), linear=7))
        worker.hears_last("POSITION s old 8 8")
        assert worker.redis.hgetall(told) == {"s old": "8", "s w": "7"}


def test_redis_that_lost_its_data_silences_nobody(
    pipeline: Pipeline, servers: ReadSideConfig, worker: ChannelWorker
) -> None:
    """The lease is gone with it: it is taken anew, and positions are said again."""
    pipeline.move("w", 0, 1)
    with speaking(servers, worker):
        worker.hears_last("POSITION s w 1 1")
        worker.redis.flushall()
        pipeline.mirror.refill()
        pipeline.move("w", 1, 2)
        worker.hears_last("POSITION s w 2 2")


@contextmanager
def process(variables: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "tidemark.app.cli", "sidecar"],
            env=child_environment(variables),
            stdout=output,
            stderr=output,
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def test_killed_speaker_leaves_no_hole(
    pipeline: Pipeline, redis_url: str, dsn: str, worker: ChannelWorker, tmp_path: Path
) -> None:
    """Two real sidecars, one killed by SIGKILL while it speaks and positions move: a client that follows the rules of
    the protocol has heard or fetched every ID, none twice, and REPLICATE is answered by the other."""
    variables = {
        "TIDEMARK_HOME": str(tmp_path),
        "TIDEMARK_REDIS_URL": redis_url,
        "TIDEMARK_POSTGRES_DSN": dsn,
        "TIDEMARK_SIDECAR_PORT": "0",
        "TIDEMARK_LINES_LISTEN": "127.0.0.1:0",
        "TIDEMARK_LINES_REDIS_CHANNEL": TERMS.channel,
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }

    def speaks(log: Path) -> bool:
        return "This sidecar is now the leader" in log.read_text()

    logs = [tmp_path / "one", tmp_path / "two"]
    with process(variables, logs[0]) as one, process(variables, logs[1]) as two:
        pipeline.move("w", 0, 1)
        eventually(lambda: any(map(speaks, logs)))
        speaker = one if speaks(logs[0]) else two
        at, stands = 1, -1
        for turn in range(40):
            at += 1
            pipeline.move("w", at - 1, at, empty=1) if at % 2 else pipeline.move("w", at - 1, at)
            if turn == 10:
                speaker.send_signal(signal.SIGKILL)
            while (line := worker.hears(0.05)) is not None:
                stands = followed(line, stands)
        deadline = time.monotonic() + 60
        worker.redis.publish(TERMS.channel, "REPLICATE")
        while stands < at:
            assert time.monotonic() < deadline, stands
            if line := worker.hears(0.2):
                stands = followed(line, stands)
        eventually(lambda: all(map(speaks, logs)))


def followed(line: str, stands: int) -> int:
    """Where a client is after `line`, that fetches what it lacks; -1 before its first POSITION."""
    word, *rest = line.split(" ")
    if word != "POSITION":
        assert word == "REPLICATE", json.dumps(line)
        return stands
    prev, new = int(rest[2]), int(rest[3])
    assert stands in {-1, prev} or prev == new, f"{line!r} does not join {stands}"
    assert new >= stands, "it went back"
    return new
