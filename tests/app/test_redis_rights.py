"""The rights in Redis that docs/deploying.md asks for, held to what pipeline, readers and sidecars do there."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.app.lines.given import client as line_client
from tests.app.lines.given import served
from tests.app.sidecar.given import At, moved, sidecar
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.lines.channel import Channel
from tidemark.app.lines.speaker import ChannelConfig
from tidemark.app.read_side.opened import ReadSideConfig
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.reader import Advance, Positions, Standing
from tidemark.sinks.redis.publish import Redis, RedisConfig

PAGE = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text()
RIGHTS = {user.strip(): rights.split() for user, rights in re.findall(r"^([a-z ]+)(~tidemark.*)$", PAGE, re.MULTILINE)}
NAME = "name"  # of the channel, as the page has it

As = Callable[[str], str]


@pytest.fixture
def as_user(redis_url: str, keys: Any) -> Iterator[As]:
    """The URL of Redis for who has the rights of a line of the page. Nothing is denied to any of them."""
    made: list[str] = []

    def url(user: str) -> str:
        made.append(f"user{len(made)}")
        keys.execute_command("ACL", "SETUSER", made[-1], "on", ">secret", "resetkeys", "resetchannels", *RIGHTS[user])
        return redis_url.replace("://", f"://{made[-1]}:secret@")

    keys.acl_log_reset()
    yield url
    # What redis-py says of itself is an administrator's word in Redis 6, and it minds no refusal.
    denied = [entry for entry in keys.acl_log() if entry["object"] != "client"]
    keys.acl_deluser(*made)
    assert denied == []


def test_the_page_names_the_rights_of_all() -> None:
    """One line for each kind of process."""
    assert [*RIGHTS] == ["pipeline", "reader", "sidecar", "speaker on name"]


def publish(as_user: As, store: Postgres, lease: Lease) -> None:
    """What a pipeline does: publish, fill Redis again, forget writers."""
    with Redis(RedisConfig(as_user("pipeline"))) as shown:
        pipeline = Pipeline(store, shown, lease)
        pipeline.publish(moved("s", 7, w=At(0, 7)), moved("t", 2, a=At(0, 3), b=At(0, 2)))
        pipeline.restarted(shown).refill()
        pipeline.publish(moved("s", 8, w=At(7, 8)))


def test_pipeline_and_readers_may_do_what_they_do(as_user: As, store: Postgres, lease: Lease, redis_url: str) -> None:
    """A pipeline publishes and fills Redis again; a reader gets positions, waits and follows."""
    publish(as_user, store, lease)
    with Positions(as_user("reader")) as positions:
        assert isinstance(found := positions.get("s"), Standing)
        assert found.linear == 8
        positions.wait("s", 8, timeout=60)
        assert isinstance(first := next(positions.follow("s", since="m0")), Advance)
        assert first.id == 7


@pytest.mark.parametrize("channel", [None, NAME])
def test_sidecars_may_do_what_they_do(
    as_user: As, store: Postgres, lease: Lease, dsn: str, keys: Any, channel: str | None
) -> None:
    """They answer, follow, relay to each other, and speak on a channel."""
    user = "sidecar" if channel is None else "speaker on name"
    servers = ReadSideConfig(as_user(user), dsn)
    publish(as_user, store, lease)
    with ExitStack() as stack:
        http = stack.enter_context(sidecar(servers))
        assert http.json("/v1/streams/s")["source"] == "redis"
        assert [it["id"] for it in http.json("/v1/streams/s/advances")["moves"]][-1:] == [8]
        told = stack.enter_context(http.stream("GET", "/v1/events")).iter_text()
        assert any("snapshot" in text for text in told)
        config = None if channel is None else ChannelConfig(channel)
        one, two = (
            stack.enter_context(
                served(servers, beside=lambda it, hub, server: Channel(hub, server, it.live.client, config).open())
            )
            for _ in range(2)
        )
        first, other = (stack.enter_context(line_client(address)) for address in (one, two))
        name = channel or "tidemark:lines:tidemark"
        eventually(lambda: keys.pubsub_numsub(name)[0][1] == 2)
        assert all(it.line() for it in (first, other))
        first.send("REPLICATE")
        assert first.lines(3)[0] == "POSITION s w 8 8"
        first.send("USER_IP a")
        assert other.said() == "USER_IP a"
        if channel:
            eventually(lambda: keys.exists(f"tidemark:lines:{{{channel}}}:told"))
