"""Server-sent events, with sidecars that are restarted and servers that are stopped."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipResponder

from tests.app.sidecar.given import At, SidecarClient, moved, set_back, sidecar
from tests.fix_servers import away
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.read_side.snapshots import Snapshot, Snapshots
from tidemark.app.read_side.subscription import MAX_QUEUE_SECONDS, Listener, StreamAdded
from tidemark.app.sidecar.app import AppConfig
from tidemark.app.sidecar.event_stream import EventStream, encode_places
from tidemark.app.sidecar.service import Limits, ReconnectThrottle
from tidemark.app.stack.processes import RedisServer
from tidemark.sinks.postgres.history import PageBounds, StoredPage
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.reader.events import Place
from tidemark.sinks.redis.client import channel, key


@dataclass
class EventsHeard:
    """A client's side of one connection; `last_id` as a browser keeps it."""

    lines: Iterator[str]
    last_id: str = ""

    def next(self) -> tuple[str, Any]:
        """The next event: its name and data. Comments and bare IDs are no events."""
        name, data = "", ""
        for line in self.lines:
            field, _, text = line.partition(": ")
            match field:
                case "event":
                    name = text
                case "data":
                    data = text
                case "id":
                    self.last_id = text
                case "" if data:
                    return name, json.loads(data)
        raise AssertionError("the connection ended")

    def ranges(self, count: int) -> list[tuple[str, int, int]]:
        """The next `count` moves of writers."""
        found: list[tuple[str, int, int]] = []
        while len(found) < count:
            name, data = self.next()
            if name in {"advance", "reread"}:
                found.append((data["stream"], data["prev"], data["id"]))
        return found

    def line(self, linear: int) -> None:
        """Return once the line is told to be there: that is what comes last of a move."""
        while self.next() != ("linear", {"kind": "linear", "stream": "s", "linear": linear}):
            pass


@contextmanager
def heard(client: SidecarClient, last_id: str = "", **params: Any) -> Iterator[EventsHeard]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with client.stream("GET", "/v1/events", params=params, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield EventsHeard(answer.iter_lines())


def grow(pipeline: Pipeline, prev: int, upto: int, stream: str = "s") -> None:
    for id in range(prev + 1, upto + 1):
        pipeline.publish(moved(stream, id, w=At(id - 1, id)))


def test_snapshot_comes_first_then_every_move(pipeline: Pipeline, client: SidecarClient) -> None:
    """What stands there, then each advance with its evidence, then where the line is."""
    grow(pipeline, 0, 2)
    with heard(client) as events:
        name, data = events.next()
        assert (name, data["token"]) == ("snapshot", "m2")
        grow(pipeline, 2, 3)
        name, data = events.next()
        assert (name, data["kind"], data["writer"], data["prev"], data["id"]) == ("advance", "advance", "w", 2, 3)
        assert (data["facts"], data["linear"]) == (1, 3)
        assert events.next() == ("linear", {"kind": "linear", "stream": "s", "linear": 3})


def test_what_breaks_a_rule_on_a_list_is_counted(pipeline: Pipeline, client: SidecarClient, keys: Any) -> None:
    """While its stream is followed. Nothing is counted of what a pipeline writes."""

    def counted() -> dict[str, float]:
        lines = [
            it for it in client.get("/metrics").text.splitlines() if it.startswith("tidemark_sidecar_chain_errors")
        ]
        return {fault: float(value) for fault, _, value in (line.rpartition(" ") for line in lines) if "total" in fault}

    before, hole = counted(), 'tidemark_sidecar_chain_errors_total{fault="hole"}'
    grow(pipeline, 0, 2)
    with heard(client) as events:
        assert events.next()[0] == "snapshot"
        grow(pipeline, 2, 5)
        events.line(5)
        assert counted() == before
        foreign = {"writer": "w", "epoch": 1, "prev": 20, "id": 21, "facts": 1, "empty": 0, "unseen": 0, "skipped": 0}
        keys.xadd(key("s", "advances"), {"kind": "POSITION", "linear": 5, "batch": 9, "time": 1} | foreign)
        keys.publish(channel("s"), "POSITION s w 20 21")
        eventually(lambda: counted() == before | {hole: before[hole] + 1})


def test_only_streams_that_were_named(pipeline: Pipeline, client: SidecarClient) -> None:
    """Others are not told, and one that does not exist is a problem before the first event."""
    grow(pipeline, 0, 1)
    grow(pipeline, 0, 1, "t")
    with heard(client, stream="t") as events:
        assert events.next()[1]["stream"] == "t"
        grow(pipeline, 1, 2)
        grow(pipeline, 1, 2, "t")
        assert events.ranges(1) == [("t", 1, 2)]
    assert client.json("/v1/events?stream=nobody", 404)["type"] == "urn:tidemark:problem:unknown-stream"


@pytest.mark.parametrize("name", ["a%20b", "a%00b", "%1F", "x" * 256, ""])
def test_a_name_that_no_stream_can_have_is_no_stream(pipeline: Pipeline, client: SidecarClient, name: str) -> None:
    """Also beside one that there is: Postgres, which is asked for many at once, takes no NUL in a text."""
    grow(pipeline, 0, 1)
    answer = client.json(f"/v1/events?stream=s&stream={name}", 404)
    assert answer["type"] == "urn:tidemark:problem:unknown-stream"


def test_new_stream_is_told_to_who_follows_all(pipeline: Pipeline, client: SidecarClient) -> None:
    """A stream that appears later comes with its snapshot and then its moves."""
    with heard(client) as events:
        grow(pipeline, 0, 1, "new")
        name, data = events.next()
        assert (name, data["token"]) == ("snapshot", "m1")
        grow(pipeline, 1, 2, "new")
        assert events.ranges(1) == [("new", 1, 2)]


@pytest.mark.parametrize("lost", [False, True])
def test_another_sidecar_goes_on_without_a_hole(
    pipeline: Pipeline, servers: ReadSideConfig, keys: Any, lost: bool
) -> None:
    """Rule 3 up to the client: after a restart all that was missed comes, joined, also where Redis lost its list."""
    grow(pipeline, 0, 2)
    with sidecar(servers) as client, heard(client, stream="s") as events:
        events.next()
        grow(pipeline, 2, 4)
        assert events.ranges(2) == [("s", 2, 3), ("s", 3, 4)]
        events.line(4)
    grow(pipeline, 4, 7)
    if lost:
        keys.flushall()
    with sidecar(servers) as client, heard(client, events.last_id, stream="s") as again:
        assert again.ranges(3) == [("s", 4, 5), ("s", 5, 6), ("s", 6, 7)]
        pipeline.mirror.refill()
        grow(pipeline, 7, 8)
        assert again.ranges(1) == [("s", 7, 8)]


def test_stopped_redis_stops_no_events(pipeline: Pipeline, client: SidecarClient, redis_server: RedisServer) -> None:
    """While Redis is away the moves come from Postgres, each once, and afterwards from Redis again."""
    grow(pipeline, 0, 2)
    with heard(client, stream="s") as events:
        events.next()
        grow(pipeline, 2, 3)
        assert events.ranges(1) == [("s", 2, 3)]
        with away(redis_server):
            made, applied = pipeline.commit(moved("s", 4, w=At(3, 4)))
            assert events.ranges(1) == [("s", 3, 4)]
        pipeline.mirror.publish(made, applied)
        grow(pipeline, 4, 5)
        assert events.ranges(1) == [("s", 4, 5)]


def test_lost_hints_delay_no_events_for_long(pipeline: Pipeline, client: SidecarClient, keys: Any) -> None:
    """A move whose hint nobody heard is told all the same."""
    grow(pipeline, 0, 1)
    with heard(client, stream="s") as events:
        events.next()
        keys.client_kill_filter(_type="pubsub")
        grow(pipeline, 1, 2)
        assert events.ranges(1) == [("s", 1, 2)]


def test_idle_streams_are_looked_at_together(pipeline: Pipeline, client: SidecarClient, keys: Any) -> None:
    """Fifty streams that nothing happens in cost Redis one transaction a second, not fifty."""
    pipeline.publish(*(moved(f"s{number}", 1, w=At(0, 1)) for number in range(50)))

    def calls(command: str) -> int:
        stats = keys.info("commandstats").get(f"cmdstat_{command}")
        return stats["calls"] if stats else 0

    with heard(client) as events:
        for _ in range(50):
            events.next()
        pipeline.publish(moved("s0", 2, w=At(1, 2)))
        assert events.ranges(1) == [("s0", 1, 2)]
        keys.config_resetstat()
        eventually(lambda: calls("hgetall") >= 100)  # two looks; the stream that moved may be read by itself, too
        assert calls("exec") < 10


def test_clients_of_everything_that_come_at_once_are_read_for_together(
    pipeline: Pipeline, servers: ReadSideConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are, each stream is read and told in the same words to all who came while others waited."""
    pipeline.publish(*(moved(f"s{number}", 1, w=At(0, 1)) for number in range(150)))
    asked: list[int] = []
    all_came = threading.Event()
    get = Snapshots.get

    async def noted(self: Snapshots, streams: Collection[str]) -> list[Snapshot]:
        asked.append(len(streams))
        while not all_came.is_set():
            await asyncio.sleep(0.01)
        return await get(self, streams)

    def told(client: SidecarClient) -> set[str]:
        with heard(client) as events:
            return {events.next()[1]["stream"] for _ in range(150)}

    monkeypatch.setattr(Snapshots, "get", noted)
    with sidecar(servers) as client, ThreadPoolExecutor(10) as pool:
        found = [pool.submit(told, client) for _ in range(10)]
        eventually(lambda: client.held_open("events") == 10)
        all_came.set()
        assert all(it.result() == {f"s{number}" for number in range(150)} for it in found)
    assert sum(asked) <= 3 * 150


def test_two_clients_hear_the_same(pipeline: Pipeline, client: SidecarClient) -> None:
    """Each begins with its own snapshot; what one heard before the other came is not told twice."""
    grow(pipeline, 0, 1)
    with heard(client) as one:
        one.next()
        grow(pipeline, 1, 2)
        assert one.ranges(1) == [("s", 1, 2)]
        with heard(client) as two:
            assert two.next()[1]["token"] == "m2"
            grow(pipeline, 2, 3)
            assert one.ranges(1) == two.ranges(1) == [("s", 2, 3)]


def test_clients_do_not_come_back_at_the_same_moment(pipeline: Pipeline, client: SidecarClient) -> None:
    """Each is told another time (`retry`) after which it shall ask again, from 1 to 3 s."""
    grow(pipeline, 0, 1)
    told = set()
    for _ in range(8):
        with client.stream("GET", "/v1/events") as answer:
            told.add(next(answer.iter_lines()))
    times = [int(line.removeprefix("retry: ")) for line in told]
    assert len(times) > 1
    assert all(1000 <= time <= 3000 for time in times)


@pytest.mark.parametrize("last", ["17", "t", "t1", "t1.x", "t1.2.3", "t99999999999999999999.1", "t1.-5"])
def test_wrong_last_event_id_is_refused(client: SidecarClient, last: str) -> None:
    """An ID of somebody else's is a problem, not a silent beginning."""
    assert client.json("/v1/events", 400, headers={"Last-Event-ID": last})["type"] == "urn:tidemark:problem:bad-request"


def test_redis_that_went_back_delays_no_events_for_long(
    pipeline: Pipeline, servers: ReadSideConfig, redis_url: str
) -> None:
    """What a failover of Redis lost is told from Postgres, with its evidence, and what follows then joins it."""
    grow(pipeline, 0, 2)
    with sidecar(servers) as client, heard(client, stream="s") as events:
        events.next()
        with set_back(redis_url, "s"):
            committed = [pipeline.commit(moved("s", id, w=At(id - 1, id))) for id in (3, 4)]
        assert events.ranges(2) == [("s", 2, 3), ("s", 3, 4)]
        for made, applied in committed:
            pipeline.mirror.publish(made, applied)
        grow(pipeline, 4, 5)
        assert events.ranges(1) == [("s", 4, 5)]


def grow_many(pipeline: Pipeline, count: int, prev: int, first: int = 0) -> None:
    pipeline.publish(*(moved(f"s{number}", prev + 1, w=At(prev, prev + 1)) for number in range(first, count)))


def told(events: EventsHeard, wanted: set[tuple[str, int, int]]) -> None:
    """Return once all these moves came, of which some may have come before."""
    while wanted:
        wanted -= set(events.ranges(1))


def marked(events: EventsHeard) -> str:
    """The next ID that is another than the last."""
    before = events.last_id
    for line in events.lines:
        if line.startswith("id: "):
            events.last_id = line.removeprefix("id: ")
            if events.last_id != before:
                return events.last_id
    raise AssertionError("the connection ended")


def test_many_streams_are_resumed_by_a_short_id(pipeline: Pipeline, servers: ReadSideConfig, keys: Any) -> None:
    """However many streams there are, with whatever names, the ID is short, and another sidecar goes on from there
    without a hole: streams that appeared meanwhile and a Redis that lost its data included."""
    long = "s" * 255
    pipeline.publish(moved(long, 1, w=At(0, 1)))
    grow_many(pipeline, 30, 0)
    with sidecar(servers) as client, heard(client) as events:
        assert {events.next()[0] for _ in range(31)} == {"snapshot"}
        grow_many(pipeline, 30, 1)
        told(events, {(f"s{number}", 1, 2) for number in range(30)})
        last = marked(events)
        assert len(last) < 50
    grow_many(pipeline, 30, 2)
    pipeline.publish(moved(long, 2, w=At(1, 2)), moved("new", 1, w=At(0, 1)))
    grow_many(pipeline, 10, 3)
    keys.flushall()
    with sidecar(servers) as client, heard(client, last) as again:
        wanted = {(f"s{number}", 2, 3) for number in range(30)} | {(f"s{number}", 3, 4) for number in range(10)}
        told(again, wanted | {(long, 1, 2), ("new", 0, 1)})
        pipeline.mirror.refill()
        grow_many(pipeline, 10, 4)
        told(again, {(f"s{number}", 4, 5) for number in range(10)})


def test_mark_waits_for_what_redis_was_not_given(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Rule 3 up to the client: no ID stands for a move that it was not told."""
    grow_many(pipeline, 12, 0)
    with sidecar(servers) as client, heard(client) as events:
        for _ in range(12):
            events.next()
        first = marked(events)
        pipeline.commit(moved("s3", 2, w=At(1, 2)))  # and the pipeline dies
        name, data = events.next()
        assert events.last_id == first
        assert (name, data["stream"], data["prev"], data["id"]) == ("advance", "s3", 1, 2)
        assert marked(events) != first


@pytest.mark.parametrize("last", ["t1.0", "t1.999999999999999"])
def test_mark_that_is_not_known_begins_with_snapshots(pipeline: Pipeline, client: SidecarClient, last: str) -> None:
    """One of before all that is kept, or of another database: the client is told where everything stands."""
    grow_many(pipeline, 12, 0)
    with heard(client, last) as events:
        assert {events.next()[0] for _ in range(12)} == {"snapshot"}


def test_too_much_that_was_missed_is_told_as_snapshots(
    pipeline: Pipeline, servers: ReadSideConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was away for long is told where all stands, in place of each move in between."""
    grow_many(pipeline, 12, 0)
    with sidecar(servers) as client, heard(client) as events:
        last = marked(events)
    grow_many(pipeline, 12, 1)
    monkeypatch.setattr("tidemark.app.read_side.replay.MAX_MOVES", 11)
    with sidecar(servers) as client, heard(client, last) as again:
        assert {again.next()[0] for _ in range(12)} == {"snapshot"}


@dataclass(frozen=True)
class PageAsked:
    """What Postgres was asked for: at most `most` moves of a stream beyond where writer `w` stands."""

    stream: str
    place: int
    most: int


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[PageAsked]:
    """Every page of the past that Postgres is asked for from now on."""
    found: list[PageAsked] = []
    page_after = Postgres.page_after

    def noted(self: Postgres, stream: str, standing: Callable[[str], int], late: int, bounds: PageBounds) -> StoredPage:
        found.append(PageAsked(stream, standing("w"), bounds.limit))
        return page_after(self, stream, standing, late, bounds)

    monkeypatch.setattr(Postgres, "page_after", noted)
    return found


def beginning(stream: str = "s") -> str:
    """The ID of who has nothing yet."""
    return encode_places({stream: Place()})


def test_those_who_come_back_together_are_read_for_once(
    pipeline: Pipeline, servers: ReadSideConfig, dsn: str, asked: list[PageAsked]
) -> None:
    """Twenty clients at nearly the same place wait for a few readings, and each is told what it missed itself."""
    lasts = []
    with sidecar(servers) as client:
        for id in range(1, 21):
            grow(pipeline, id - 1, id)
            with heard(client, stream="s") as events:
                lasts.append(marked(events))
    grow(pipeline, 20, 22)

    def resumed(client: SidecarClient, place: int) -> list[tuple[str, int, int]]:
        with heard(client, lasts[place - 1], stream="s") as events:
            return events.ranges(22 - place)

    with sidecar(servers) as client, ThreadPoolExecutor(20) as pool, psycopg.connect(dsn) as maintenance:
        maintenance.execute("lock table tidemark.packed_advances in access exclusive mode")
        found = [pool.submit(resumed, client, place) for place in range(1, 21)]
        eventually(lambda: client.held_open("events") == 20)
        maintenance.rollback()
        for place, ranges in enumerate(found, 1):
            assert ranges.result() == [("s", id, id + 1) for id in range(place, 22)]
    assert len(asked) < 10


def test_nobody_is_read_for_who_has_gone(
    pipeline: Pipeline, servers: ReadSideConfig, dsn: str, asked: list[PageAsked]
) -> None:
    """Twenty clients begin and leave while Postgres is busy with one: it is asked no more for them, and who stays is
    told all, from where it stands itself."""
    grow_many(pipeline, 20, 0)
    with sidecar(servers) as client, psycopg.connect(dsn) as maintenance:
        maintenance.execute("lock table tidemark.packed_advances in access exclusive mode")
        with heard(client, beginning("s0"), stream="s0"):
            eventually(lambda: asked)
            with ExitStack() as crowd:
                for number in range(1, 20):
                    crowd.enter_context(heard(client, beginning(f"s{number}"), stream=f"s{number}"))
                eventually(lambda: client.held_open("events") == 20)
            eventually(lambda: client.held_open("events") == 1)
        eventually(lambda: client.held_open("events") == 0)
        with heard(client, beginning("s1"), stream="s1") as one:
            maintenance.rollback()
            assert one.ranges(1) == [("s1", 0, 1)]
    assert {it.stream for it in asked} == {"s0", "s1"}


def test_page_that_was_told_is_told_again_from_memory(
    pipeline: Pipeline, servers: ReadSideConfig, asked: list[PageAsked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever resumes where others did a moment ago costs Postgres no reading of that page; each is told every move,
    what came since included."""
    monkeypatch.setattr("tidemark.app.read_side.replay.PAGE_EVENTS", 5)
    grow(pipeline, 0, 12)
    with sidecar(servers) as client:
        for upto in range(12, 18):
            with heard(client, beginning(), stream="s") as events:
                assert events.ranges(upto) == [("s", id, id + 1) for id in range(upto)]
                events.line(upto)
            grow(pipeline, upto, upto + 1)
    assert [it.place for it in asked].count(0) == 1


def test_pages_of_the_past_grow_with_patience(
    pipeline: Pipeline, servers: ReadSideConfig, asked: list[PageAsked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may go after the first page is read for no farther; who stays is read for by twice as much each time."""
    monkeypatch.setattr("tidemark.app.read_side.replay.PAGE_EVENTS", 2)
    monkeypatch.setattr("tidemark.app.read_side.replay.MAX_ADVANCES_PER_QUERY", 8)
    grow(pipeline, 0, 20)
    with sidecar(servers) as client, heard(client, beginning(), stream="s") as events:
        assert events.ranges(20) == [("s", id, id + 1) for id in range(20)]
    assert [it.most for it in asked][:4] == [2, 4, 8, 8]


def test_who_comes_back_soon_is_told_from_memory(
    pipeline: Pipeline, servers: ReadSideConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of one stream and of many, who were away while it moved, cost no reading of the past, nor one of where
    streams stand that are known; they are told every move, and where they stand then."""
    for read in ("page_after", "full_changes_since"):
        monkeypatch.setattr(Postgres, read, lambda *_: pytest.fail("the past was read"))
    grow(pipeline, 0, 1)
    grow_many(pipeline, 12, 0)
    with sidecar(servers) as client:
        with heard(client, stream="s") as one, heard(client) as many:
            last = marked(one)
            for _ in range(13):
                many.next()
            mark = marked(many)
        eventually(lambda: client.held_open("events") == 0)
        grow(pipeline, 1, 3)
        grow_many(pipeline, 12, 1)
        monkeypatch.setattr(Snapshots, "get", lambda *_: pytest.fail("a snapshot was read"))
        with heard(client, last, stream="s") as one, heard(client, mark) as many:
            assert one.ranges(2) == [("s", 1, 2), ("s", 2, 3)]
            one.line(3)
            assert one.last_id != last
            told(many, {("s", 1, 2), ("s", 2, 3)} | {(f"s{number}", 1, 2) for number in range(12)})
            assert marked(many) != mark
            grow(pipeline, 3, 4)
            assert one.ranges(1) == [("s", 3, 4)]
            told(many, {("s", 3, 4)})


def test_who_comes_and_goes_waits(
    pipeline: Pipeline, servers: ReadSideConfig, asked: list[PageAsked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too many ended young, the next ones wait, and cost nothing meanwhile: neither Postgres nor those who are
    there, nor probes. What lived for longer counts for nothing."""
    for name, value in {
        "RECONNECTS_WITHOUT_DELAY": 2,
        "FORGOTTEN_PER_SECOND": 0.0,
        "DELAY_SECONDS": 60.0,
        "MAX_DELAY_SECONDS": 60.0,
    }.items():
        monkeypatch.setattr(ReconnectThrottle, name, value)
    grow(pipeline, 0, 1)
    with sidecar(servers) as client, heard(client) as events:
        assert events.next()[0] == "snapshot"
        with monkeypatch.context() as patient:
            patient.setattr(ReconnectThrottle, "SHORT_LIVED_SECONDS", 0.0)
            for _ in range(5):
                with heard(client):
                    pass
            eventually(lambda: client.held_open("events") == 1)
        for _ in range(3):
            with heard(client):
                pass
        eventually(lambda: client.held_open("events") == 1)
        with pytest.raises(httpx.ReadTimeout):
            client.get("/v1/events?stream=s", headers={"Last-Event-ID": beginning()}, timeout=0.5)
        assert client.get("/readyz").status_code == 200
        assert (client.held_open("events"), asked) == (1, [])
        assert "tidemark_sidecar_events_paused_total 0.0" not in client.get("/metrics").text
        grow(pipeline, 1, 2)
        assert events.ranges(1) == [("s", 1, 2)]


def test_churn_is_forgiven() -> None:
    """By address, and soon: whoever waits does so for a second at most, and no longer than the crowd goes on."""
    clock = [0.0]
    churn = ReconnectThrottle(lambda: clock[0])
    for _ in range(ReconnectThrottle.RECONNECTS_WITHOUT_DELAY):
        churn.count_ended_stream("a", clock[0])
    assert churn.delay_seconds("a") == 0
    for _ in range(1000):
        churn.count_ended_stream("a", clock[0])
    assert (churn.delay_seconds("a"), churn.delay_seconds("b")) == (ReconnectThrottle.MAX_DELAY_SECONDS, 0)
    clock[0] += (
        ReconnectThrottle.MAX_DELAY_SECONDS / ReconnectThrottle.DELAY_SECONDS / ReconnectThrottle.FORGOTTEN_PER_SECOND
    )
    assert churn.delay_seconds("a") == 0
    churn.count_ended_stream("a", clock[0] - ReconnectThrottle.SHORT_LIVED_SECONDS)
    assert churn.delay_seconds("a") == 0


def test_place_is_free_when_a_client_left(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """The limit counts clients that are there, not those that were."""
    grow(pipeline, 0, 1)
    with sidecar(servers, AppConfig(limits=Limits(open_requests=1))) as client:
        for _ in range(3):
            with heard(client) as events:
                events.next()
                assert client.get("/v1/events").status_code == 429
            eventually(lambda: client.held_open("events") == 0)


def test_open_stream_of_events_holds_no_compressor(pipeline: Pipeline, client: SidecarClient) -> None:
    """Every browser says that it takes gzip; a compressor for events, which are not compressed, is 256 KB for each."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    with client.stream("GET", "/v1/events?stream=s", headers={"Accept-Encoding": "gzip"}) as answer:
        assert next(answer.iter_lines())
        gc.collect()  # what answers of before have left
        assert not [it for it in gc.get_objects() if isinstance(it, GZipResponder)]


def test_open_stream_of_events_takes_few_tasks() -> None:
    """That of its request, one that sends and one that looks whether the client is there: a task is a kilobyte and
    more, and there are thousands of streams."""

    async def texts() -> AsyncIterator[bytes]:
        yield b"event: line\n\n"
        await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(_: Any) -> None:
        pass

    async def serve() -> int:
        app = Starlette()
        app.state.service = SimpleNamespace(stop_signal=asyncio.get_running_loop().create_future())
        before = len(asyncio.all_tasks())
        streams = [EventStream(texts(), Listener().disconnect_signal, ExitStack()) for _ in range(10)]
        serving = [asyncio.create_task(it({"type": "http", "app": app}, receive, send)) for it in streams]
        await asyncio.sleep(0.01)
        taken = len(asyncio.all_tasks()) - before
        app.state.service.stop_signal.set_result(None)
        await asyncio.gather(*serving)
        return taken

    assert asyncio.run(serve()) <= 30


def test_client_that_does_not_read_is_left() -> None:
    """Where something waits for too long the client is dropped, although its connection takes nothing, and its place is
    free."""
    left: list[str] = []

    async def texts() -> AsyncIterator[bytes]:
        yield b"event: line\n\n"

    async def stuck(_: Any) -> None:
        await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def serve() -> None:
        clock = iter((0.0, MAX_QUEUE_SECONDS / 2, MAX_QUEUE_SECONDS + 1))
        listener = Listener(now=lambda: next(clock))
        held = ExitStack()
        held.callback(left.append, "gone")
        stream = EventStream(texts(), listener.disconnect_signal, held)
        app = Starlette()
        app.state.service = SimpleNamespace(stop_signal=asyncio.get_running_loop().create_future())
        serving = asyncio.create_task(stream({"type": "http", "app": app}, receive, stuck))
        for _ in range(3):
            assert not listener.disconnect_signal.done()
            listener.put("s", StreamAdded())
        await asyncio.wait_for(serving, 60)

    asyncio.run(serve())
    assert left == ["gone"]
