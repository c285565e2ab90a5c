"""The long poll, on servers that come, go and lose their data."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from tests.app.sidecar.given import At, SidecarClient, moved, set_back, sidecar
from tests.fix_servers import away
from tests.sinks.reader.given import Pipeline, later
from tests.waiting import eventually
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.sidecar.app import AppConfig
from tidemark.app.sidecar.service import Limits
from tidemark.app.stack.processes import RedisServer

WAIT = "/v1/streams/s/wait"


def test_wait_ends_when_the_stream_is_there(pipeline: Pipeline, client: SidecarClient) -> None:
    """At once where it is reached already; else soon after the position is published."""
    pipeline.publish(moved("s", 3, w=At(0, 3, pending=9)))
    assert client.json(WAIT, params={"token": "m3"})["token"] == "m3"
    began = time.monotonic()
    with later(0.3, lambda: pipeline.publish(moved("s", 9, w=At(3, 9)))):
        assert client.json(WAIT, params={"token": "m9", "timeout": 20})["token"] == "m9"
    assert time.monotonic() - began < 3


def test_wait_that_is_over_tells_where_it_stands(pipeline: Pipeline, client: SidecarClient) -> None:
    """412 with the current state; 0 seconds only looks."""
    pipeline.publish(moved("s", 3, w=At(0, 3, pending=9)))
    found = client.json(WAIT, 412, params={"token": "m8", "timeout": 0})
    assert (found["type"], found["stream"]["token"]) == ("urn:tidemark:problem:not-yet", "m3")


def test_token_beyond_anything_allocated_is_waited_for_to_the_timeout(
    pipeline: Pipeline, client: SidecarClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay or the pipeline may have lag. 412 says how far the stream is, and what has not arrived."""
    monkeypatch.setattr("tidemark.app.sidecar.operations.GRACE_SECONDS", 0.1)
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    found = client.json(WAIT, 412, params={"token": "m10", "timeout": 0.5})
    assert (found["type"], found["stream"]["token"]) == ("urn:tidemark:problem:not-yet", "m3")
    assert "it is at m3, and the highest ID in the records that Tidemark has read is 3: " in found["detail"]
    with later(0.6, lambda: pipeline.publish(moved("s", 10, w=At(3, 10)))):
        assert client.json(WAIT, params={"token": "m10", "timeout": 20})["token"] == "m10"


def test_answer_after_the_timeout_names_the_blocker(pipeline: Pipeline, client: SidecarClient) -> None:
    """The detail of 412 is for people: it names the writer that blocks the position."""
    pipeline.publish(moved("s", 3, w=At(0, 3, pending=9)))
    found = client.json(WAIT, 412, params={"token": "m8", "timeout": 0.2})
    assert "s did not reach m8 in " in found["detail"]
    assert "it is at m3" in found["detail"]
    assert "its linear position is blocked by w (" in found["detail"]


def test_a_token_carries_what_was_told_to_another_sidecar(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """A client that meets two in turn is never told less: each waits until it is as far as the other one was."""
    linear, token = 0, "m0"
    with sidecar(servers) as one, sidecar(servers) as two:
        for at, asked in enumerate((one, two, two, one, two, one), start=1):
            pipeline.publish(moved("s", at, w=At(at - 1, at)))
            answer = asked.json(f"/v1/streams/s/wait?token={token}&timeout=50")
            assert answer["linear"] >= linear
            linear, token = answer["linear"], answer["token"]


def test_unknown_stream_is_not_waited_for(pipeline: Pipeline, client: SidecarClient) -> None:
    """404 at once: it is more likely mistyped than about to be made."""
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    found = client.json("/v1/streams/t/wait", 404, params={"token": "m3", "timeout": 60})
    assert found["type"] == "urn:tidemark:problem:unknown-stream"


@pytest.mark.parametrize("query", ["", "token=7", "token=m-1", "token=m1&timeout=-1", "token=m1&timeout=nan"])
def test_wait_for_what_cannot_be_read(pipeline: Pipeline, client: SidecarClient, query: str) -> None:
    """400: no token, no ID, no time."""
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    assert client.json(f"{WAIT}?{query}", 400)["type"] == "urn:tidemark:problem:bad-request"


def test_wait_goes_on_without_redis(pipeline: Pipeline, client: SidecarClient, redis_server: RedisServer) -> None:
    """A stopped Redis does not end a wait: what Postgres commits counts."""
    pipeline.publish(moved("s", 3, w=At(0, 3, pending=9)))
    with away(redis_server):
        with later(0.3, lambda: pipeline.commit(moved("s", 9, w=At(3, 9)))):
            found = client.json(WAIT, params={"token": "m9", "timeout": 20})
        assert (found["token"], found["source"]) == ("m9", "postgres")


def test_redis_that_went_back_makes_no_token_one_of_the_future(
    pipeline: Pipeline, servers: ReadSideConfig, redis_url: str
) -> None:
    """Postgres has come to 9, so a sidecar that finds a Redis at 3 neither waits for 9 nor refuses it."""
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    with set_back(redis_url, "s"):
        pipeline.publish(moved("s", 9, w=At(3, 9)))
    with sidecar(servers) as client:
        assert client.json(WAIT, params={"token": "m9", "timeout": 20})["token"] == "m9"


def test_fifty_who_wait_for_a_thousand_writers_share_each_reading(
    pipeline: Pipeline, client: SidecarClient, redis_url: str
) -> None:
    """Each is told as soon as it is there, and Redis is asked about once a move, not once for each who waits."""
    writers = {f"w{number}": number + 2 for number in range(1000)}
    pipeline.publish(moved("s", 1, **{writer: At(0, id, pending=5000) for writer, id in writers.items()}))
    waited_for = "m1" + "".join(f"~{writer}.{id + (writer == 'w0')}" for writer, id in writers.items())
    with redis.Redis.from_url(redis_url) as keys, ThreadPoolExecutor(50) as clients:
        answers = [clients.submit(client.get, WAIT, params={"token": waited_for}) for _ in range(50)]
        eventually(lambda: client.held_open("wait") == 50)
        keys.config_resetstat()
        for at in range(1002, 1010):  # moves that reach nobody's token
            pipeline.publish(moved("s", 1, w999=At(at - 1, at, pending=5000)))
        pipeline.publish(moved("s", 1, w0=At(2, 3, pending=5000)))
        assert {answer.result().status_code for answer in answers} == {200}
        read = keys.info("commandstats")["cmdstat_hgetall"]["calls"]
    assert read < 40, read


def test_only_so_many_are_held_open(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Past the limit a wait is refused at once; a place is free again when one ended."""
    pipeline.publish(moved("s", 3, w=At(0, 3, pending=9)))
    with sidecar(servers, AppConfig(limits=Limits(open_requests=1, wait_seconds=0.8))) as client:
        found: list[Any] = []

        def ask() -> None:
            found.append(client.get(WAIT, params={"token": "m9", "timeout": 3600}).status_code)

        with later(0, ask):
            eventually(lambda: client.held_open("wait") == 1)
            assert client.json(WAIT, 429, params={"token": "m9"})["type"] == "urn:tidemark:problem:busy"
        assert found == [412]
        assert client.json(WAIT, params={"token": "m3"})["linear"] == 3
