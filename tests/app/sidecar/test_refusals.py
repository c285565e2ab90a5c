"""What HTTP itself asks of every answer: what may be kept of it, and refusals that programs can read."""

import re
import time
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.app.lines.given import NO_POSITION
from tests.app.sidecar.given import At, SidecarClient, moved, sidecar
from tests.app.sidecar.test_admission import answer, connected, send_on
from tests.sinks.reader.given import Pipeline
from tidemark.app.sidecar.admission import AdmissionConfig
from tidemark.app.sidecar.answers import Problem, reason_phrase
from tidemark.app.sidecar.app import OPERATIONS, AppConfig
from tidemark.app.sidecar.openapi import OPENAPI_PATH
from tidemark.app.sidecar.service import MetricsText

PATHS = sorted({OPENAPI_PATH, *(it.path.format(stream="s") for it in OPERATIONS)})
PAGE = ["/", "/page/page.js"]


@pytest.fixture
def alone() -> Iterator[SidecarClient]:
    """Of a sidecar that reaches no server, and takes little."""
    site = AppConfig(origins=["https://ours.example"], hosts=["127.0.0.1"])
    with sidecar(NO_POSITION, site, admitted=AdmissionConfig(max_head_bytes=16_384)) as client:
        yield client


def is_problem(found: httpx.Response, status: int, type_: str) -> bool:
    kind = found.headers["content-type"], found.headers["cache-control"], found.json()["type"]
    return (found.status_code, *kind) == (
        status,
        "application/problem+json",
        "no-store",
        f"urn:tidemark:problem:{type_}",
    )


def test_no_answer_about_streams_is_kept(pipeline: Pipeline, client: SidecarClient) -> None:
    """Nothing between here and a client keeps a position: what has an ETag is asked for anew, all else not stored."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    for path in PATHS:
        with client.stream("GET", path, params={"token": "m7", "stream": "s"}) as found:
            assert found.status_code == 200, path
            assert found.headers["cache-control"] == ("no-cache" if "etag" in found.headers else "no-store"), path
    etag = client.get("/v1/streams/s").headers["etag"]
    same = client.get("/v1/streams/s", headers={"If-None-Match": etag})
    assert (same.status_code, same.headers["cache-control"]) == (304, "no-cache")


def test_files_of_the_page_are_asked_for_anew(alone: SidecarClient) -> None:
    """They may be kept, since they say by an ETag whether they are the same."""
    for path in PAGE:
        found = alone.get(path)
        assert (found.status_code, found.headers["cache-control"]) == (200, "no-cache")
        assert alone.get(path, headers={"If-None-Match": found.headers["etag"]}).status_code == 304


def test_no_refusal_is_kept(alone: SidecarClient) -> None:
    """A stream that is not there yet, a host or site that is not listed, servers that are away: it may change."""
    assert is_problem(alone.get("/v1/streams/s"), 503, "recovering")
    assert is_problem(alone.get("/v1/streams/s/wait"), 400, "bad-request")
    assert is_problem(alone.get("/nothing"), 404, "not-found")
    assert is_problem(alone.get("/page/nothing"), 404, "not-found")
    assert is_problem(alone.get("/v1/streams", headers={"Host": "elsewhere.example"}), 421, "wrong-host")
    asked = {"Origin": "https://theirs.example", "Access-Control-Request-Method": "GET"}
    assert alone.options("/v1/streams", headers=asked).headers["cache-control"] == "no-store"


def test_no_browser_guesses_at_an_answer(alone: SidecarClient) -> None:
    """Answers, refusals and the page's files are what their media type says, and nothing else."""
    for path in [*PATHS, *PAGE, "/nothing"]:
        with alone.stream("GET", path) as found:
            assert found.headers["x-content-type-options"] == "nosniff", path
    with connected(alone, b"hello\r\n\r\n") as it:
        assert b"x-content-type-options: nosniff" in answer(it)


def test_names_of_one_request_have_a_bound(alone: SidecarClient) -> None:
    """Whoever follows more streams than one request may name follows all of them."""
    for count in (201, 1000):
        names = [f"x{number}" for number in range(count)]
        assert is_problem(alone.get("/v1/events", params={"stream": names}), 400, "bad-request")


def test_nothing_can_be_changed(alone: SidecarClient) -> None:
    """405, as a problem that names what is allowed."""
    for path, method in product([*PATHS, *PAGE], ["POST", "PUT", "DELETE", "OPTIONS"]):
        found = alone.request(method, path, json={} if method == "POST" else None)
        assert is_problem(found, 405, "method-not-allowed"), (method, path)
        assert {it.strip() for it in found.headers["allow"].split(",")} == {"GET", "HEAD"}, (method, path)


LARGE = [
    b"content-length: 16385\r\n\r\n",
    b"content-length: 9999999999999\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n4001\r\n" + b"x" * 0x4001 + b"\r\n0\r\n\r\n",
]


def test_large_bodies_are_refused(alone: SidecarClient) -> None:
    """No operation reads one. 413, once, as a problem; where the answer was under way, the end."""
    for asked, sent in product([b"GET /v1/streams/s", b"POST /v1/streams", b"GET /livez"], LARGE):
        with connected(alone, asked + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n" + sent) as it:
            said = answer(it)
        assert said.count(b"HTTP/1.1 ") == 1, (asked, sent)
        if b"chunked" not in sent:
            head, _, body = said.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 413 Content Too Large\r\n"), (asked, sent)
            assert b"cache-control: no-store" in head
            assert b"content-type: application/problem+json" in head
            assert b'"type":"urn:tidemark:problem:content-too-large"' in body


def test_body_without_end_is_left(alone: SidecarClient) -> None:
    """Whoever goes on sending after the answer is cut off."""
    with connected(alone, b"GET /livez HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n") as it:
        send_on(it, b"1000\r\n" + b"x" * 0x1000 + b"\r\n", 10_000)
        assert answer(it).count(b"HTTP/1.1 ") <= 1
    assert alone.get("/livez").status_code == 200


def test_last_event_id_has_a_bound(alone: SidecarClient) -> None:
    """One that is long, or that unpacks to much, is refused before anything is made of it."""
    bomb = "p" + urlsafe_b64encode(zlib.compress(b"\0" * (9 << 20))).decode()
    for last, status, type_ in (
        (bomb, 400, "bad-request"),
        ("p" + "A" * 20_000, 431, "request-header-fields-too-large"),
    ):
        assert is_problem(alone.get("/v1/events", headers={"Last-Event-ID": last}), status, type_)


def test_small_bodies_are_let_be(alone: SidecarClient) -> None:
    """Some clients send one with every request, and the connection goes on."""
    for _ in range(3):
        found = alone.request("GET", "/livez", content=b"x" * 1000)
        assert (found.status_code, found.text) == (200, "alive\n")


def test_what_is_no_http_is_a_problem_that_is_not_kept(alone: SidecarClient) -> None:
    """400 and 431 come before anything of the site has seen the request."""
    large = b"GET /livez HTTP/1.1\r\nx: " + b"x" * 20_000 + b"\r\n\r\n"
    for sent, status in ((b"hello\r\n\r\n", b"400"), (large, b"431")):
        with connected(alone, sent) as it:
            head = answer(it).partition(b"\r\n\r\n")[0]
        assert head.split(b" ")[1] == status
        assert b"content-type: application/problem+json" in head
        assert b"cache-control: no-store" in head


def test_every_type_of_problem_is_documented() -> None:
    """docs/reference/http-api.md has each type of problem with its status, and nothing else does."""
    page = (Path(__file__).parents[3] / "docs/reference/http-api.md").read_text().partition("## Problems")[2]
    rows = re.findall(r"^\| (`.+`) \| ([0-9, ]+) \|", page, re.MULTILINE)
    told = {
        type_: int(status)
        for types, statuses in rows
        for type_, status in zip(re.findall("`([a-z-]+)`", types), statuses.split(", "), strict=True)
    }
    http = (404, 405, 413, 431)
    ours = {each.type: int(each.status) for each in Problem.__subclasses__()}
    theirs = {reason_phrase(HTTPStatus(status)).lower().replace(" ", "-"): status for status in http}
    assert told == {**ours, **theirs, "internal": 500}


def test_scrapes_without_end_take_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes have no slots. The event loop rests after the metrics were written, and all that wait get one text."""
    written: list[float] = []

    def slow(_: object) -> bytes:
        written.append(time.monotonic())
        time.sleep(0.05)
        return b"text\n"

    monkeypatch.setattr("tidemark.app.sidecar.service.generate_latest", slow)
    with sidecar(NO_POSITION) as client, ThreadPoolExecutor(9) as pool:
        url, until = str(client.base_url), time.monotonic() + 1.5

        def flood() -> int:
            asked = 0
            with httpx.Client(base_url=url, timeout=60) as one:
                while time.monotonic() < until:
                    assert one.get("/metrics").text == "text\n"
                    asked += 1
            return asked

        began = time.monotonic()
        clients = [pool.submit(flood) for _ in range(8)]
        assert client.get("/livez").status_code == 200
        asked = sum(one.result() for one in clients)
        passed = time.monotonic() - began
    assert len(written) <= passed / (0.05 * (1 + MetricsText.PAUSE_FACTOR)) + 2
    assert asked >= len(written)


def test_metrics_want_a_token_and_the_right_host(tmp_path: Path) -> None:
    """They name streams and positions, so who may not read these may not scrape; probes tell nothing, and answer
    anybody by any name."""
    tokens = tmp_path / "tokens"
    tokens.write_text("ours\n")
    site = AppConfig(tokens, hosts=["127.0.0.1"])
    with sidecar(NO_POSITION, site) as client:
        given = {"Authorization": "Bearer ours"}
        assert is_problem(client.get("/metrics"), 401, "unauthorized")
        assert client.get("/metrics", headers=given).status_code == 200
        elsewhere = {"Host": "elsewhere.example"}
        assert is_problem(client.get("/metrics", headers=given | elsewhere), 421, "wrong-host")
        assert client.get("/livez", headers=elsewhere).status_code == 200
        assert client.get("/readyz", headers=elsewhere).status_code == 503
