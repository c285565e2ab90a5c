"""Snapshots over HTTP, with servers that lose their data or are really stopped."""

from pathlib import Path
from typing import Any

import pytest

from tests.app.sidecar.given import At, SidecarClient, moved, set_back, sidecar
from tests.fix_servers import away
from tests.sinks.reader.given import Pipeline
from tests.streaming.builders import Shard, behind_a_dead_writer
from tests.waiting import eventually
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.sidecar.app import AppConfig
from tidemark.app.sidecar.service import Limits
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import RedisServer
from tidemark.sinks.redis.client import STREAMS_KEY, key


def test_all_that_is_known_of_a_stream(pipeline: Pipeline, client: SidecarClient) -> None:
    """Line, vector, token, epochs, who retired, what is pending, who holds it back and since when, from where."""
    pipeline.publish(moved("s", 7, first=At(0, 9, pending=12, transactions=("pid 7",)), second=At(0, 7)))
    found = client.json("/v1/streams/s")
    assert found.pop("age_seconds") < 60
    assert found.pop("details_age_seconds") < 60
    assert found == {
        "stream": "s",
        "state": "known",
        "linear": 7,
        "vector": {"first": 9, "second": 7},
        "token": "m7~first.9",
        "epochs": {"first": 1, "second": 1},
        "retired": [],
        "pending": 1,
        "blockers": [{"writer": "first", "epoch": 1, "low": 9, "top": 11, "since": "2026-09-21T14:13:20Z"}],
        "linear_lag": {
            "ids": 5,
            "since": None,
            "blockers": [
                {
                    "writer": "second",
                    "epoch": 1,
                    "reason": "silent",
                    "position": 7,
                    "since": None,
                    "last_seen": None,
                }
            ],
            "blocker_count": 1,
        },
        "last_seen": {},
        "open_transactions": {"first": ["pid 7"]},
        "source": "redis",
    }


def test_a_dead_writer_is_named_without_a_gap(pipeline: Pipeline, client: SidecarClient) -> None:
    """The stream and its gaps say for whom the line waits, since when, and when that writer was last seen."""
    pipeline.publish(Shard().left_by_a_dead_writer())
    found, gaps = client.json("/v1/streams/events"), client.json("/v1/streams/events/gaps")
    seen = {"w1": "1970-01-01T00:00:01Z", "w2": "1970-01-01T00:00:02Z"}
    assert (found["blockers"], gaps["gaps"], found["last_seen"]) == ([], [], seen)
    assert found["linear_lag"] == gaps["linear_lag"]
    assert found["linear_lag"] == behind_a_dead_writer()


def test_redis_that_went_back_hides_nothing(pipeline: Pipeline, servers: ReadSideConfig, redis_url: str) -> None:
    """A failover of Redis lost what Postgres holds: also a sidecar that knew nothing of it tells all of it."""
    pipeline.publish(moved("s", 50, w=At(0, 50)))
    with set_back(redis_url, "s"):
        pipeline.publish(moved("s", 100, w=At(50, 100)))
    with sidecar(servers) as client:
        found = client.json("/v1/streams/s")
        assert (found["token"], found["vector"], found["source"]) == ("m100", {"w": 100}, "postgres")


def test_all_streams_are_listed(pipeline: Pipeline, client: SidecarClient) -> None:
    """Every stream by name, each as it would be told alone; none is no error."""
    assert client.json("/v1/streams") == {"streams": [], "next": None}
    pipeline.publish(moved("b", 2, w=At(0, 2)), moved("a", 1, w=At(0, 1)))
    assert [(it["stream"], it["token"]) for it in client.json("/v1/streams")["streams"]] == [("a", "m1"), ("b", "m2")]


def test_streams_come_in_pages(pipeline: Pipeline, client: SidecarClient) -> None:
    """Each page begins behind the one before, and the last one says that there is no more."""
    pipeline.publish(*(moved(name, 1, w=At(0, 1)) for name in "cabde"))
    pages: list[str] = []
    after: str | None = ""
    while after is not None:
        page = client.json("/v1/streams", params={"limit": 2, "after": after})
        pages.append("".join(it["stream"] for it in page["streams"]))
        after = page["next"]
    assert pages == ["ab", "cd", "e"]
    assert client.json("/v1/streams", 400, params={"limit": 0})["type"] == "urn:tidemark:problem:bad-request"


def test_long_answers_are_compressed_for_who_takes_it(pipeline: Pipeline, client: SidecarClient) -> None:
    """gzip where the client says so and it pays, and never for events, which must not wait for more."""
    pipeline.publish(*(moved(f"stream-{number}", 1, w=At(0, 1)) for number in range(30)))
    answer = client.get("/v1/streams", headers={"Accept-Encoding": "gzip"})
    assert (answer.headers["content-encoding"], len(answer.json()["streams"])) == ("gzip", 30)
    assert "content-encoding" not in client.get("/v1/streams", headers={"Accept-Encoding": "identity"}).headers
    with client.stream("GET", "/v1/events", headers={"Accept-Encoding": "gzip"}) as events:
        assert "content-encoding" not in events.headers


def test_sidecar_is_asked_by_its_names_alone(servers: ReadSideConfig) -> None:
    """A page of another site, whose name leads to this machine, reads nothing; probes may ask by any name."""
    with sidecar(servers, AppConfig(hosts=("127.0.0.1", "localhost", "::1"))) as client:
        for host in ("127.0.0.1:1", "LOCALHOST", "[::1]:80"):
            assert client.json("/v1/streams", headers={"Host": host})["streams"] == []
        for host in ("evil.example", "evil.example:80", "", "localhost.evil.example"):
            assert client.json("/v1/streams", 421, headers={"Host": host})["type"] == "urn:tidemark:problem:wrong-host"
        assert client.get("/livez", headers={"Host": "10.1.2.3:9480"}).status_code == 200


def test_answer_that_the_client_has_is_not_sent_again(pipeline: Pipeline, client: SidecarClient) -> None:
    """The same positions are 304 for who names their tag, whatever their age; a move is 200 with another tag."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    for path in ("/v1/streams", "/v1/streams/s"):
        had = client.get(path).headers["etag"]
        again = client.get(path, headers={"If-None-Match": f'"other", {had}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", had)
    had = client.get("/v1/streams/s").headers["etag"]
    pipeline.publish(moved("s", 8, w=At(7, 8)))
    new = client.get("/v1/streams/s", headers={"If-None-Match": had})
    assert (new.status_code, new.json()["linear"]) == (200, 8)
    assert new.headers["etag"] != had


def test_a_page_of_streams_has_another_tag_once_there_is_a_next_page(pipeline: Pipeline, client: SidecarClient) -> None:
    pipeline.publish(moved("a", 7, w=At(0, 7)))
    had = client.get("/v1/streams?limit=1").headers["etag"]
    pipeline.publish(moved("b", 7, w=At(0, 7)))
    new = client.get("/v1/streams?limit=1", headers={"If-None-Match": had})
    assert (new.status_code, [stream["stream"] for stream in new.json()["streams"]]) == (200, ["a"])
    assert new.json()["next"]


@pytest.mark.parametrize("name", ["nobody", "a%20b", "%00", "%FF%FE", "x" * 256])
def test_stream_that_does_not_exist(client: SidecarClient, name: str) -> None:
    """404 with a reason for people, whatever the name looks like."""
    answer = client.get(f"/v1/streams/{name}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:tidemark:problem:unknown-stream"


def test_any_name_can_be_asked_for(pipeline: Pipeline, client: SidecarClient) -> None:
    """A name with slashes and other letters is asked for in percent signs."""
    pipeline.publish(moved("a/b?ö", 3, w=At(0, 3)))
    assert client.json("/v1/streams/a%2Fb%3F%C3%B6")["stream"] == "a/b?ö"


def test_what_is_no_operation_is_a_problem_too(client: SidecarClient) -> None:
    """Every error of the server itself has the same form."""
    for answer, status in ((client.get("/nothing"), 404), (client.post("/v1/streams"), 405)):
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert answer.json()["status"] == status


def test_lines_that_it_answers_are_metrics_up_to_a_bound(pipeline: Pipeline, servers: ReadSideConfig) -> None:
    """Those that it was asked for just now: what it does not look at would seem to stand still."""
    pipeline.publish(moved("a", 7, web=At(0, 7)), moved("b", -3, web=At(0, -3)), moved("c", 1, web=At(0, 1)))

    def lines() -> set[str]:
        return {line for line in client.get("/metrics").text.splitlines() if line.startswith("tidemark_sink_")}

    with sidecar(servers, AppConfig(limits=Limits(metrics_streams=1))) as client:
        assert lines() == {"tidemark_sink_streams_omitted 0.0"}
        client.json("/v1/streams/b")
        named = 'tidemark_sink_linear_position{copy="sidecar",stream="b"} -3.0'
        assert lines() == {named, "tidemark_sink_streams_omitted 0.0"}
        client.json("/v1/streams/c")
        assert lines() == {named, "tidemark_sink_streams_omitted 1.0"}


def test_flushed_redis_is_covered_by_postgres(pipeline: Pipeline, client: SidecarClient, keys: Any) -> None:
    """While Redis is being filled again the positions come from Postgres: never 0, never less."""
    pipeline.publish(moved("s", 7, first=At(0, 9), second=At(0, 7)))
    assert client.json("/v1/streams/s")["source"] == "redis"
    keys.flushall()
    found = client.json("/v1/streams/s")
    assert (found["source"], found["token"]) == ("postgres", "m7~first.9")
    assert [it["stream"] for it in client.json("/v1/streams")["streams"]] == ["s"]


def test_half_filled_redis_hides_no_stream(pipeline: Pipeline, servers: ReadSideConfig, keys: Any) -> None:
    """A sidecar that starts while Redis is being filled again lists what Postgres knows, too."""
    pipeline.publish(moved("a", 1, w=At(0, 1)), moved("b", 2, w=At(0, 2)))
    keys.srem(STREAMS_KEY, "a")
    with sidecar(servers) as client:
        assert [it["stream"] for it in client.json("/v1/streams")["streams"]] == ["a", "b"]


def test_redis_that_went_back_is_not_believed(pipeline: Pipeline, client: SidecarClient, keys: Any) -> None:
    """Rule 2: a Redis that was restored from an older copy does not take an answer back."""
    pipeline.publish(moved("s", 7, first=At(0, 9), second=At(0, 7)))
    client.json("/v1/streams/s")
    keys.set(key("s", "linear"), 5)
    keys.hset(key("s", "positions"), "first", 6)
    assert client.json("/v1/streams/s")["token"] == "m7~first.9"


def test_servers_go_and_come_back(
    pipeline: Pipeline, client: SidecarClient, redis_server: RedisServer, postgres: PostgresServer
) -> None:
    """Redis stopped: Postgres answers. Both stopped: the last answer with its age. It is ready while it can answer."""
    pipeline.publish(moved("s", 7, first=At(0, 9), second=At(0, 7)))
    eventually(lambda: client.json("/v1/streams/s")["pending"] is not None)  # it comes from Postgres, which may be slow
    before = client.json("/v1/streams/s")
    assert client.json("/readyz") == {"ready": True, "problems": []}
    with away(redis_server):
        found = client.json("/v1/streams/s")
        assert (found["source"], found["token"], found["pending"]) == ("postgres", before["token"], before["pending"])
        health = client.json("/readyz")
        assert health["ready"]
        assert health["problems"][0].startswith("Redis at 127.0.0.1")
        with away(postgres):
            eventually(lambda: len(client.json("/readyz")["problems"]) == 2)
            assert client.json("/readyz")["ready"]
            found = client.json("/v1/streams/s")
            assert (found["source"], found["token"], found["state"]) == ("memory", before["token"], "known")
            assert found["age_seconds"] > 0
            assert client.json("/v1/streams")["streams"][0]["token"] == before["token"]
            assert client.json("/v1/streams/other", 503)["type"] == "urn:tidemark:problem:recovering"
            assert client.get("/livez").status_code == 200
            assert 'tidemark_sidecar_server_up{server="redis"} 0.0' in client.get("/metrics").text
    eventually(lambda: client.json("/v1/streams/s")["source"] == "redis")
    eventually(lambda: client.get("/readyz").json() == {"ready": True, "problems": []})


def test_sidecar_without_any_server_says_so(redis_url: str, dsn: str, redis_server: RedisServer) -> None:
    """A sidecar that starts while nothing answers runs, claims nothing, and answers as soon as a server is there."""
    nowhere = ReadSideConfig("redis://127.0.0.1:1/0", "postgresql://127.0.0.1:1/none")
    with sidecar(nowhere) as client:
        assert client.json("/v1/streams/s", 503)["type"] == "urn:tidemark:problem:recovering"
        assert client.json("/v1/streams", 503)["type"] == "urn:tidemark:problem:recovering"
        assert client.json("/readyz", 503)["ready"] is False
        assert client.get("/livez").status_code == 200


def test_only_who_has_a_token_may_read(servers: ReadSideConfig, tmp_path: Path) -> None:
    """With a file of tokens, everything about streams needs one; probes and the scrape do not."""
    (tmp_path / "tokens").write_text("sesame\n")
    with sidecar(servers, AppConfig(tokens_file=tmp_path / "tokens")) as client:
        refused = client.get("/v1/streams")
        assert (refused.status_code, refused.json()["type"]) == (401, "urn:tidemark:problem:unauthorized")
        assert refused.headers["www-authenticate"].startswith("Bearer")
        assert client.json("/v1/streams", headers={"Authorization": "Bearer sesame"})["streams"] == []
        for path in ("/livez", "/readyz"):
            assert client.get(path).status_code == 200


def test_scripts_of_other_sites_read_only_where_listed(servers: ReadSideConfig) -> None:
    """Without a list no site gets leave; with one, only those on it."""
    with sidecar(servers, AppConfig(origins=["https://ops.example"])) as client:
        for origin, leave in (("https://ops.example", "https://ops.example"), ("https://evil.example", None)):
            answer = client.get("/v1/streams", headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == leave
    with sidecar(servers) as client:
        answer = client.get("/v1/streams", headers={"Origin": "https://ops.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_event_streams_have_a_head_that_ends(pipeline: Pipeline, client: SidecarClient) -> None:
    """HEAD says what GET would bring, and is over at once."""
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    for path in ("/v1/events", "/v1/watch"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert client.held_open("events") == client.held_open("watch") == 0


def test_nobody_is_sent_to_where_a_header_says(client: SidecarClient) -> None:
    """A path with a slash too much is unknown: no answer repeats the client's `Host`."""
    answer = client.get("/v1/streams/", headers={"Host": "evil.example"})
    assert answer.status_code == 404
    assert "evil" not in str(answer.headers) + answer.text
