"""Hostile and unlucky connections of the web server: what they may take, and what others notice of them."""

import asyncio
import itertools
import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest

from tests.app.lines.given import NO_POSITION
from tests.app.sidecar.given import SidecarClient, sidecar
from tests.waiting import eventually
from tidemark.app.read_side.subscription import Listener, StreamAdded
from tidemark.app.sidecar.admission import AdmissionConfig, AdmissionQueue
from tidemark.app.sidecar.app import AppConfig
from tidemark.app.sidecar.service import LargeRequestThrottle, Limits, StartQueue, WakeQueue

BOUNDS = AdmissionConfig(slots=20, max_head_bytes=16_384, max_head_fields=50, head_timeout_seconds=60)


@pytest.fixture
def guarded() -> Iterator[SidecarClient]:
    with sidecar(NO_POSITION, AppConfig(), admitted=BOUNDS) as client:
        yield client


@contextmanager
def connected(client: SidecarClient, *sent: bytes, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=60, source_address=(source, 0)) as it:
        for text in sent:
            it.sendall(text)
        yield it


def answer(it: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    found = b""
    try:
        while data := it.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def send_on(it: socket.socket, piece: bytes, pieces: int) -> None:
    try:
        for _ in range(pieces):
            it.sendall(piece)
    except OSError:
        return


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (b"GET /livez HTTP/1.1\r\nx: ", b"x" * 65_536),
        (b"GET /livez HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
        (b"GET /", b"x" * 65_536),
    ],
)
def test_head_without_end_is_refused(guarded: SidecarClient, begun: bytes, piece: bytes) -> None:
    """A value, fields or a path that never end are answered with 431 or the end, and fill no memory."""
    before = psutil.Process().memory_info().rss
    with connected(guarded, begun) as it:
        send_on(it, piece, 1000)
        assert answer(it)[:12] in (b"HTTP/1.1 431", b"")
    assert psutil.Process().memory_info().rss - before < 20_000_000


def test_too_large_a_head_is_a_problem(guarded: SidecarClient) -> None:
    """Whoever sends a little too much is told what was wrong, as for every other mistake."""
    with connected(guarded, b"GET /livez HTTP/1.1\r\nx: " + b"x" * 20_000 + b"\r\n\r\n") as it:
        head, _, body = answer(it).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"content-type: application/problem+json" in head
    assert b'"type":"urn:tidemark:problem:request-header-fields-too-large"' in body


def test_request_that_is_no_http_is_a_problem(guarded: SidecarClient) -> None:
    """It is answered like a bad parameter."""
    with connected(guarded, b"hello\r\n\r\n") as it:
        assert answer(it).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nhost: x\r\n"])
def test_half_a_request_is_not_waited_for(sent: bytes) -> None:
    """A head that does not come in time costs its connection."""
    bounds = replace(BOUNDS, head_timeout_seconds=0.5)
    with sidecar(NO_POSITION, AppConfig(), admitted=bounds) as client, connected(client, sent) as it:
        assert answer(it) == b""


def test_requests_that_do_not_wait_for_answers_have_a_bound(guarded: SidecarClient) -> None:
    """Who sends thousands at once is cut off, and not kept in memory. The refusal comes last: the first answers belong
    to the first requests."""
    with connected(guarded, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 5_000) as it:
        statuses = re.findall(rb"HTTP/1.1 (\d+)", answer(it))
    assert 1 < len(statuses) < 5_000
    assert {*statuses[:-1]} == {b"200"}
    assert statuses[-1] == b"429"


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4001\r\n"


@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\ny: " + b"y" * 20_000 + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n", b"413"),
        (CHUNKED + b"x" * 0x4001 + b"\r\n", b"413"),
    ],
)
def test_refusal_comes_behind_the_answers_before_it(guarded: SidecarClient, refused: bytes, status: bytes) -> None:
    """Whatever is wrong with the third request of a connection, the first two are answered first."""
    with connected(guarded, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 2 + refused) as it:
        assert re.findall(rb"HTTP/1.1 (\d+)", answer(it)) == [b"200", b"200", status]


@pytest.mark.parametrize("fields", [b"", b"host: x\r\nhost: y\r\n", b"host: x\r\nHost: x\r\n"])
def test_request_has_one_host(guarded: SidecarClient, fields: bytes) -> None:
    """None, or two of which a proxy and we might take a different one, are answered with 400 (RFC 9112)."""
    with connected(guarded, b"GET /livez HTTP/1.1\r\n" + fields + b"\r\n") as it:
        assert answer(it).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_half_open_connections_keep_nobody_out() -> None:
    """However many connections say nothing, those that ask are answered: the oldest of the silent ones give way."""
    bounds = AdmissionConfig(slots=20, head_timeout_seconds=60)
    with sidecar(NO_POSITION, AppConfig(), admitted=bounds) as client, ExitStack() as crowd:
        silent = [crowd.enter_context(connected(client, b"GET /li", source="127.0.0.2")) for _ in range(60)]
        for _ in range(5):
            with connected(client, b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as it:
                assert answer(it).startswith(b"HTTP/1.1 200")
        closed = [it for it in silent if is_closed(it)]
        assert 40 <= len(closed) <= 50


def test_a_connection_with_a_second_request_is_not_idle(servers: Any) -> None:
    """The answer to the first of two pipelined requests has ended; the second is an event stream. Of connections of
    one address, the oldest idle ones are closed, and not the older one that serves the stream."""
    two = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /v1/watch HTTP/1.1\r\nhost: x\r\n\r\n"
    bounds = AdmissionConfig(slots=20, head_timeout_seconds=60)
    with sidecar(servers, AppConfig(), admitted=bounds) as client, ExitStack() as crowd:
        served = crowd.enter_context(connected(client, two))
        received = b""
        while b"text/event-stream" not in received:
            received += served.recv(4096)
        silent = [crowd.enter_context(connected(client, b"GET /li")) for _ in range(60)]
        eventually(lambda: sum(map(is_closed, silent)) >= 40)
        while not is_closed(served) and select.select([served], [], [], 0)[0]:
            pass
        assert not is_closed(served)


def test_probes_are_answered_when_every_place_is_taken(servers: Any) -> None:
    """Others are told to come again; the orchestrator does not take a busy process for a dead one."""
    with sidecar(servers, AppConfig(), admitted=AdmissionConfig(slots=3)) as client, ExitStack() as crowd:
        for _ in range(3):
            crowd.enter_context(client.stream("GET", "/v1/watch"))
        eventually(lambda: client.get("/v1/pipeline").status_code == 429)
        assert client.get("/v1/pipeline").json()["type"] == "urn:tidemark:problem:busy"
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").status_code == 200


def is_closed(it: socket.socket) -> bool:
    it.setblocking(False)
    try:
        return it.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_requests_that_come_at_once_begin_by_turns() -> None:
    """In the order in which they came, few at each turn of the event loop; one that went away holds up nobody."""
    begun: list[int] = []

    async def request(turns: AdmissionQueue, number: int) -> None:
        await turns.wait_for_start(asyncio.get_running_loop(), "127.0.0.1")
        begun.append(number)

    async def serve() -> list[int]:
        turns = AdmissionQueue()
        requests = [asyncio.create_task(request(turns, number)) for number in range(100)]
        await asyncio.sleep(0)
        requests[50].cancel()
        seen = []
        while not all(it.done() for it in requests):
            seen.append(len(begun))
            await asyncio.sleep(0)
        return seen

    seen = asyncio.run(serve())
    assert begun == [*range(50), *range(51, 100)]
    assert max(after - before for before, after in itertools.pairwise(seen)) < 10
    asyncio.run(serve())
    assert len(begun) == 2 * 99


def test_turns_go_round_by_address() -> None:
    """A client of another address has the next turn, however many of one address wait."""
    begun: list[str] = []

    async def request(turns: AdmissionQueue, address: str) -> None:
        await turns.wait_for_start(asyncio.get_running_loop(), address)
        begun.append(address)

    async def serve() -> None:
        turns = AdmissionQueue()
        crowd = [asyncio.create_task(request(turns, "10.0.0.1")) for _ in range(100)]
        await asyncio.sleep(0)
        one = asyncio.create_task(request(turns, "10.0.0.2"))
        await asyncio.gather(*crowd, one)

    asyncio.run(serve())
    assert begun.index("10.0.0.2") < 10


def test_a_large_request_leaves_the_event_loop_to_others_for_a_while() -> None:
    """The next one begins after several iterations, in which small requests that have begun go on."""
    clock = [0.0]
    began: list[int] = []
    iterations = itertools.count()

    async def request(queue: AdmissionQueue, seconds: float) -> None:
        await queue.wait_for_start(asyncio.get_running_loop(), "10.0.0.1")
        began.append(next(iterations))
        clock[0] += seconds

    async def serve(seconds: float) -> int:
        began.clear()
        queue = AdmissionQueue(lambda: clock[0])
        tasks = [asyncio.create_task(request(queue, seconds)) for _ in range(3)]
        while not all(task.done() for task in tasks):
            next(iterations)
            await asyncio.sleep(0)
        return began[2] - began[1]

    assert asyncio.run(serve(0.0)) < 4
    assert asyncio.run(serve(0.01)) > 8


def test_large_texts_of_one_address_are_parsed_one_after_the_other_with_pauses() -> None:
    """Those of another address are not delayed, nor small ones, nor after an error."""

    async def serve() -> tuple[float, float, float]:
        throttle, took = LargeRequestThrottle(), dict[str, float]()

        def slow(text: str) -> int:
            time.sleep(0.01)
            return int(text)

        async def parse(name: str, address: str, text: str) -> None:
            began = time.monotonic()
            with suppress(ValueError):
                await throttle.parse(address, text, slow)
            took[name] = time.monotonic() - began

        large = "1" * 4000 + " " * throttle.LARGE_CHARACTERS
        texts = [("first", large), ("second", "no number".ljust(len(large))), ("last", large)]
        await asyncio.gather(
            *(parse(name, "10.0.0.1", text) for name, text in texts),
            parse("other", "10.0.0.2", large),
            parse("small", "10.0.0.1", "1"),
        )
        return took["last"], took["other"], took["small"]

    last, other, small = asyncio.run(serve())
    assert last > 2.5 * 0.01 * (1 + LargeRequestThrottle.PAUSE_FACTOR)
    assert small < other < last


def test_streams_of_events_begin_by_turns_that_go_round_by_address() -> None:
    """A bounded number at a time; a client of another address has the next turn, and one that went away takes none."""
    begun: list[str] = []

    async def stream(beginnings: StartQueue, address: str, over: asyncio.Event) -> None:
        end = await beginnings.wait_for_start(address)
        begun.append(address)
        await over.wait()
        end()

    async def serve() -> None:
        beginnings, over = StartQueue(), asyncio.Event()
        crowd = [asyncio.create_task(stream(beginnings, "10.0.0.1", over)) for _ in range(100)]
        await asyncio.sleep(0)
        one = asyncio.create_task(stream(beginnings, "10.0.0.2", over))
        await asyncio.sleep(0.01)
        assert len(begun) == StartQueue.MAX_STARTING
        crowd[StartQueue.MAX_STARTING].cancel()
        over.set()
        await asyncio.gather(*crowd, one, return_exceptions=True)
        await asyncio.gather(*(stream(beginnings, "10.0.0.3", over) for _ in range(20)))

    asyncio.run(serve())
    assert begun.index("10.0.0.2") <= StartQueue.MAX_STARTING + 1
    assert len(begun) == 99 + 1 + 20


def test_event_streams_are_woken_in_groups_that_go_round_by_address() -> None:
    """Each once for all that it got until its turn; requests are handled between two groups, and a client of another
    address is in the first one."""
    woken: list[str] = []
    batch = StreamAdded()

    async def stream(listener: Listener, address: str) -> None:
        assert await listener.wait_for_item(60.0)
        woken.append(address)
        assert len(listener.take(10)) == 2

    async def serve() -> list[int]:
        queue = WakeQueue()
        addresses = ["10.0.0.1"] * 100 + ["10.0.0.2"]
        listeners = [Listener(partial(queue.add, address)) for address in addresses]
        tasks = [asyncio.create_task(stream(*each)) for each in zip(listeners, addresses, strict=True)]
        await asyncio.sleep(0)
        tasks[50].cancel()
        seen = []
        for _ in range(2):
            for listener in listeners:
                listener.put("s", batch)
        while not all(task.done() for task in tasks):
            seen.append(len(woken))
            await asyncio.sleep(0)
        return [*seen, len(woken)]

    seen = asyncio.run(serve())
    assert seen[-1] == 100
    assert max(after - before for before, after in itertools.pairwise(seen)) <= WakeQueue.GROUP_SIZE
    assert woken.index("10.0.0.2") < WakeQueue.GROUP_SIZE


def test_proxy_that_is_trusted_names_the_client() -> None:
    """Places are shared by the addresses that it names: one of them with most leaves some to another. An address that
    is no trusted proxy names nobody."""

    def watch(client: SidecarClient, crowd: ExitStack, named: str) -> int:
        return crowd.enter_context(client.stream("GET", "/v1/watch", headers={"X-Forwarded-For": named})).status_code

    for trusted, others in ((["127.0.0.1"], 200), (["10.0.0.9"], 429)):
        site, bounds = AppConfig(limits=Limits(open_requests=4)), replace(BOUNDS, trusted_proxies=trusted)
        with sidecar(NO_POSITION, site, admitted=bounds) as client, ExitStack() as crowd:
            assert [watch(client, crowd, "192.0.2.1") for _ in range(4)] == [200] * 4
            assert watch(client, crowd, "192.0.2.1") == 429
            assert watch(client, crowd, "192.0.2.2") == others
