"""What people who watch are sent, with servers that are stopped."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from tests.app.sidecar.given import At, SidecarClient, moved, sidecar
from tests.fix_servers import away, deaf
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.sidecar.app import AppConfig
from tidemark.app.sidecar.service import Limits
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import RedisServer
from tidemark.streaming.core.effects import LateCompletion


class Watching:
    """A client's side of one connection."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._data = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))

    def look(self) -> tuple[list[Any], Any]:
        """The streams of one look, and the pipeline, which ends it."""
        streams: list[Any] = []
        for data in self._data:
            if data["kind"] == "pipeline":
                return streams, data
            streams.append(data)
        raise AssertionError("the connection ended")

    def next_of(self, stream: str) -> Any:
        """The stream when it is told the next time."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for data in self.look()[0]:
                if data["stream"] == stream:
                    return data
        raise AssertionError(f"nothing was told of {stream}")


@contextmanager
def watching(client: SidecarClient) -> Iterator[Watching]:
    with client.stream("GET", "/v1/watch") as answer:
        assert answer.status_code == 200, answer.read()
        yield Watching(answer.iter_lines())


def test_all_streams_at_first_and_then_what_changed(pipeline: Pipeline, client: SidecarClient) -> None:
    """Every stream once, with where each writer stands and what is missing; then only those that moved."""
    quiet = moved("quiet", 3, w=At(0, 3))
    pipeline.publish(quiet, moved("s", 7, first=At(0, 9, pending=12, transactions=("pid 7",)), second=At(0, 7)))
    with watching(client) as watch:
        streams, told = watch.look()
        assert [it["stream"] for it in streams] == ["quiet", "s"]
        found = streams[1]
        assert (found["linear"], found["allocated"], found["source"]) == (7, 12, "redis")
        gap = {"low": 9, "top": 11, "since": "2026-09-21T14:13:20Z"}
        assert found["writers"][0] == {
            "writer": "first",
            "epoch": 1,
            "retired": False,
            "position": 9,
            "reach": 12,
            "waiting": 1,
            "gaps": [gap],
            "hidden": 0,
            "transactions": ["pid 7"],
            "deferred": False,
            "gone": 0,
            "last_seen": None,
        }
        assert (told["owner"], told["problems"], told["dead_letters"]) == ("test", [], [])
        pipeline.publish(moved("s", 12, first=At(9, 12), second=At(7, 12)))
        found = watch.next_of("s")
        while found["writers"][0]["gaps"]:  # the line may be told before what Postgres says of gaps
            found = watch.next_of("s")
        assert (found["linear"], found["allocated"]) == (12, 12)


def test_who_comes_later_is_told_everything(pipeline: Pipeline, client: SidecarClient) -> None:
    """Each begins with all that there is, whenever it comes; the looks are shared."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    with watching(client) as one:
        one.look()
        with watching(client) as two:
            assert [it["linear"] for it in two.look()[0]] == [7]


def test_late_completions_of_a_stream(pipeline: Pipeline, client: SidecarClient) -> None:
    """How many, and when the newest came."""
    pipeline.publish(replace(moved("s", 9, w=At(0, 9)), late=[LateCompletion("w", 1, 3, 4, 1, "skipped")]))
    with watching(client) as watch:
        late = watch.look()[0][0]["late"]
        assert late["count"] == 1


def test_servers_that_are_away_are_named(
    pipeline: Pipeline, client: SidecarClient, redis_server: RedisServer, postgres: PostgresServer
) -> None:
    """While neither answers, the last positions stay and say so; a watcher is not cut off."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    with watching(client) as watch:
        watch.look()
        with away(redis_server):
            assert watch.next_of("s")["source"] == "postgres"
            with away(postgres):
                found = watch.next_of("s")
                assert (found["source"], found["linear"]) == ("memory", 7)
                _, told = watch.look()
                assert len(told["problems"]) == 2
                assert told["dead_letters"] is None
        while watch.look()[1]["problems"]:
            pass


def test_a_deaf_server_does_not_slow_the_looks(
    pipeline: Pipeline, client: SidecarClient, redis_server: RedisServer
) -> None:
    """How long a look waited for an answer is not how much there is to look at: the next comes as soon as ever."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    with watching(client) as watch:
        watch.look()
        with deaf(redis_server):
            while not watch.look()[1]["problems"]:
                pass
            waited_for = time.monotonic()
            watch.look()
            assert time.monotonic() - waited_for < 10


def test_pipeline_alone(pipeline: Pipeline, client: SidecarClient) -> None:
    """How the pipeline is can be asked without watching."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    told = client.json("/v1/pipeline")
    assert told["owner"] == "test"
    assert told["lease_seconds"] > 0
    assert told["quiet_seconds"] < 60


def test_place_is_free_when_a_watcher_left(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Watchers count towards the limit while they are there."""
    with sidecar(servers, AppConfig(limits=Limits(open_requests=1))) as client:
        with watching(client) as watch:
            watch.look()
            assert client.get("/v1/watch").status_code == 429
        eventually(lambda: client.held_open("watch") == 0)
