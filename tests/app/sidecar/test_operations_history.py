"""What moved a stream and what holds it back, over HTTP, with lists that are lost and servers that are stopped."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from tests.app.sidecar.given import At, SidecarClient, moved
from tests.fix_servers import away
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.stack.processes import RedisServer
from tidemark.sinks.postgres.history import PageBounds, StoredPage
from tidemark.sinks.postgres.store import Postgres


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


def test_what_was_put_off_is_told(pipeline: Pipeline, client: SidecarClient, dsn: str) -> None:
    """Of whom records wait in Kafka for room, which of those are on their way back, and which are gone."""
    pipeline.publish(moved("s", 7, first=At(0, 9, pending=12, deferred=True), second=At(0, 7)))
    pipeline.publish(moved("t", 7, first=At(0, 7)))
    with psycopg.connect(dsn) as sql:
        sql.execute(
            "insert into tidemark.requeues (stream, writer, epoch, partition, next, last, gone, problem)"
            " values ('s', 'second', 1, 0, 9, 8, 3, 'retention')"
        )
    found = client.json("/v1/streams/s/gaps")
    assert found["deferred"] == [{"writer": "first", "epoch": 1}]
    [requeued] = found["requeued"]
    assert (requeued["writer"], requeued["gone"], requeued["problem"]) == ("second", 3, "retention")
    other = client.json("/v1/streams/t/gaps")
    assert (other["deferred"], other["requeued"]) == ([], [])
    with client.stream("GET", "/v1/watch") as watch:
        line = next(it for it in watch.iter_lines() if '"stream":"s"' in it)
    writers = json.loads(line.removeprefix("data: "))["writers"]
    assert [(it["deferred"], it["gone"]) for it in writers] == [(True, 0), (True, 3)]


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


def test_page_of_many_writers_asks_postgres_for_no_more(
    pipeline: Pipeline, client: SidecarClient, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of an answer is the one of the statement: 50 writers do not make a small page a large reading."""
    for id in range(1, 5):
        pipeline.publish(moved("s", id, **{f"w{number}": At(id - 1, id) for number in range(50)}))
    asked: list[PageBounds] = []
    page_after = Postgres.page_after

    def noted(self: Postgres, *arguments: Any) -> StoredPage:
        asked.append(arguments[-1])
        return page_after(self, *arguments)

    monkeypatch.setattr(Postgres, "page_after", noted)
    assert len(client.json("/v1/streams/s/advances?limit=1")["moves"]) == 1
    assert [it.limit for it in asked] == [1]
    found = pages(client, "m0", 7)
    assert len({(it["writer"], it["prev"]) for it in found}) == len(found) == 200
    assert {it.limit for it in asked[1:]} == {7}


def test_slow_history_is_no_outage(
    pipeline: Pipeline, client: SidecarClient, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that Postgres is not done with in time is told so, as 504; everybody else is answered by it meanwhile."""
    grow(pipeline, 3)
    monkeypatch.setattr("tidemark.sinks.reader.history.STATEMENT_TIMEOUT_SECONDS", 0.2)
    with psycopg.connect(dsn) as maintenance:
        maintenance.execute("lock table tidemark.packed_advances in access exclusive mode")
        problem = client.json("/v1/streams/s/advances", 504)
        assert problem["type"] == "urn:tidemark:problem:slow"
        assert client.json("/readyz")["problems"] == []
        assert 'server_up{server="postgres"} 1.0' in client.get("/metrics").text
    assert len(pages(client, "m0", 100)) == 3


def test_those_who_read_the_past_keep_nobody_waiting(pipeline: Pipeline, client: SidecarClient, dsn: str) -> None:
    """While ten clients wait for a history that does not come, Postgres answers all other questions."""
    grow(pipeline, 3)
    with ThreadPoolExecutor(10) as pool, psycopg.connect(dsn) as maintenance:
        maintenance.execute("lock table tidemark.packed_advances in access exclusive mode")
        asking = [pool.submit(client.get, "/v1/streams/s/advances") for _ in range(10)]
        waiting = (
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        )
        with psycopg.connect(dsn, autocommit=True) as sql:
            eventually(lambda: sql.execute(waiting).fetchone() != (0,))
        assert client.json("/v1/pipeline")["problems"] == []
        assert client.json("/v1/streams/s/gaps")["total"] == 0
        maintenance.rollback()
        assert {it.result().status_code for it in asking} == {200}


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
