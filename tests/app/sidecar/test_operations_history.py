"""What moved a stream and what holds it back, over HTTP, with lists that are lost and servers that are stopped."""

from itertools import pairwise
from typing import Any

import pytest

from tests.app.sidecar.given import At, SidecarClient, moved
from tests.fix_servers import away
from tests.sinks.reader.given import Pipeline
from tidemark.app.stack.servers import RedisServer


def pages(client: SidecarClient, since: str, limit: int) -> list[Any]:
    """Every move after `since`, page by page."""
    found: list[Any] = []
    while True:
        page = client.json("/v1/streams/s/advances", params={"since": since, "limit": limit})
        found += page["moves"]
        since = page["next"]
        if page["complete"]:
            return found


def grow(pipeline: Pipeline, upto: int) -> None:
    for id in range(1, upto + 1):
        pipeline.publish(moved("s", id, w=At(id - 1, id)))


def test_gaps_are_named_with_their_range_and_age(pipeline: Pipeline, client: SidecarClient) -> None:
    """All that is open, and how much there is where fewer are asked for."""
    pipeline.publish(moved("s", 7, first=At(0, 9, pending=12), second=At(0, 7, pending=20, transactions=("pid 7",))))
    found = client.json("/v1/streams/s/gaps")
    assert [(it["writer"], it["low"], it["top"]) for it in found["gaps"]] == [("first", 9, 11), ("second", 7, 19)]
    assert found["total"] == 2
    assert found["open_transactions"] == {"second": ["pid 7"]}
    assert len(client.json("/v1/streams/s/gaps?limit=1")["gaps"]) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_pages_join_without_a_hole(pipeline: Pipeline, client: SidecarClient, keys: Any, lost: bool) -> None:
    """Page after page each advance comes once with its evidence, also where Redis lost its list."""
    grow(pipeline, 7)
    if lost:
        keys.flushall()
    found = pages(client, "m0", 3)
    assert [(it["kind"], it["prev"], it["id"], it["facts"]) for it in found] == [
        ("advance", prev, id, 1) for prev, id in pairwise(range(8))
    ]


def test_page_begins_behind_a_token(pipeline: Pipeline, client: SidecarClient) -> None:
    """What the reader has read already does not come again."""
    grow(pipeline, 5)
    assert [it["id"] for it in pages(client, "m3", 100)] == [4, 5]
    assert pages(client, "m5", 100) == []


def test_stopped_redis_does_not_lose_the_history(
    pipeline: Pipeline, client: SidecarClient, redis_server: RedisServer
) -> None:
    """Postgres alone gives the same pages."""
    grow(pipeline, 5)
    before = pages(client, "m0", 2)
    with away(redis_server):
        assert pages(client, "m0", 2) == before


@pytest.mark.parametrize(
    "query", ["since=7", "since=m-7", "since=p", "since=pAAAA", "limit=0", "limit=many", "limit=10001"]
)
def test_parameter_that_cannot_be_read(pipeline: Pipeline, client: SidecarClient, query: str) -> None:
    """400 that names what was wrong, never a page from somewhere else."""
    grow(pipeline, 1)
    assert client.json(f"/v1/streams/s/advances?{query}", 400)["type"] == "urn:tidemark:problem:bad-request"


def test_history_of_nothing(client: SidecarClient) -> None:
    """A stream that does not exist has no history and no gaps."""
    for path in ("advances", "gaps"):
        assert client.json(f"/v1/streams/s/{path}", 404)["type"] == "urn:tidemark:problem:unknown-stream"
