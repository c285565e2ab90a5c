"""One client with few rights attacks a sidecar, and honest clients of other addresses notice nothing of it."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis

from tests.app.attacked import STREAMS, HonestClients, attacked, check, ended
from tests.app.lines.given import LineClient, client
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.connections import parse_host_port
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import SidecarProcess, free_port

SECONDS = 5.0
PLACES = 500


class Sidecar(SidecarProcess):
    """With the port of its line protocol."""

    def __init__(self, home: Path, redis_url: str, dsn: str, **settings: str) -> None:
        self.lines = f"127.0.0.1:{free_port()}"
        port = free_port()
        variables = {
            "TIDEMARK_HOME": str(home),
            "TIDEMARK_REDIS_URL": redis_url,
            "TIDEMARK_POSTGRES_DSN": dsn,
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": f"127.0.0.1:{free_port()}",
            "TIDEMARK_SIDECAR_PORT": str(port),
            "TIDEMARK_LINES_LISTEN": self.lines,
            **{f"TIDEMARK_SIDECAR_{name}": value for name, value in settings.items()},
        }
        super().__init__(Home(home), port, variables)

    @property
    def lines_port(self) -> int:
        return parse_host_port(self.lines)[1]

    def command(self) -> Sequence[str]:
        """With the limits of open files that `ulimit` sets, if there are any."""
        words = super().command()
        return ["sh", "-c", f"ulimit {self.ulimit}; exec " + shlex.join(words)] if self.ulimit else words

    ulimit = ""

    def log(self) -> str:
        return self.home.log(self.name).read_text()


@pytest.fixture
def places() -> int:
    """A fifth of the places that there are by default: a machine that runs other tests too must serve so many
    clients."""
    return PLACES


@pytest.fixture
def process(tmp_path: Path, redis_url: str, dsn: str, places: int) -> Iterator[Sidecar]:
    server = Sidecar(tmp_path, redis_url, dsn, HELD=str(places), TCP_CONNECTIONS=str(places))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def honest(process: Sidecar, pipeline: Pipeline) -> HonestClients:
    clients = HonestClients(process, pipeline)
    clients.publish()
    eventually(lambda: httpx.get(f"{process.url}/v1/streams/{STREAMS[-1]}").status_code == 200)
    return clients


def test_thousands_of_names_in_one_request_delay_nobody(process: Sidecar, honest: HonestClients) -> None:
    """Requests that name 2,000 streams are refused, and a small question never waits for a large one."""
    before = honest.measure(SECONDS)
    with attacked(process, process.lines_port, "many_names") as attack:
        check(before, honest.measure(SECONDS))
        done = ended(attack)["many_names"]
    assert done["400"] > 0


def test_long_names_fill_no_log(process: Sidecar, honest: HonestClients) -> None:
    """A NAME of 60 KB and a bad line, again and again: what is logged of a client is cut, and repeated lines are
    counted."""
    before, size = honest.measure(SECONDS), len(process.log())
    with attacked(process, process.lines_port, "long_name") as attack:
        check(before, honest.measure(SECONDS))
        assert ended(attack)["long_name"]["lines"] >= 215
    assert len(process.log()) - size < 100_000
    assert "Disconnected a client of the line protocol" in process.log()


@pytest.mark.parametrize(("act", "answer"), [("scrapes", "200"), ("all_positions", "lines")])
def test_requests_without_end_delay_nobody(process: Sidecar, honest: HonestClients, act: str, answer: str) -> None:
    """Some clients of one address ask for the metrics, or for all positions, as soon as the answer before is there."""
    before = honest.measure(SECONDS)
    with attacked(process, process.lines_port, act) as attack:
        check(before, honest.measure(SECONDS))
        assert ended(attack)[act][answer] > 0


def test_event_streams_of_one_address_leave_places_for_others(process: Sidecar, honest: HonestClients) -> None:
    """One address opens as many event streams as there may be; others are served, by `wait` and events too."""
    before = honest.measure(SECONDS)
    with attacked(process, process.lines_port, "one_address", crowd=PLACES + 50) as attack:
        check(before, honest.measure(SECONDS))
        eventually(lambda: held(process) >= 0.9 * PLACES, what=lambda: f"{held(process)} streams of events")
        check(before, honest.measure(SECONDS))
        with httpx.Client(base_url=process.url, timeout=30) as one:
            assert one.get(f"/v1/streams/{STREAMS[0]}/wait", params={"token": "m1"}).status_code == 200
            assert one.get("/").status_code == 200
            with one.stream("GET", "/v1/watch") as watch:
                assert next(watch.iter_text())
        assert ended(attack)["one_address"]["200"] >= 0.9 * PLACES


def held(process: Sidecar) -> int:
    """How many streams of events it holds open."""
    found = re.search(r'in_flight{operation="events"} (\d+)', httpx.get(f"{process.url}/metrics").text)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("act", ["silent_lines", "named_lines"])
def test_connections_of_one_address_leave_places_for_others(process: Sidecar, honest: HonestClients, act: str) -> None:
    """The line protocol takes a client of another address, whether the crowd says nothing or has said its name. A
    quiet client of another address, such as `nc`, keeps its place."""
    address = parse_host_port(process.lines)
    before = honest.measure(SECONDS)
    with client(address) as quiet, attacked(process, process.lines_port, act, crowd=PLACES + 50):
        assert quiet.line() == "SERVER tidemark"
        during = honest.measure(SECONDS)
        with client(address, "REPLICATE") as worker:
            assert worker.line() == "SERVER tidemark"
            assert {worker.said() for _ in STREAMS} == {
                f"POSITION {name} w {honest.at} {honest.at}" for name in STREAMS
            }
        quiet.send("REPLICATE")
        assert (quiet.said() or "").startswith("POSITION s0 w")
    check(before, during)
    late = LineClient(address)
    assert late.line() == "SERVER tidemark"
    late.close()


@pytest.mark.parametrize(
    ("ulimit", "places"), [("-n 1024", "The limit of open files is low"), ("-Sn 1024", "Open files")]
)
def test_few_files_keep_probes_alive(
    tmp_path: Path, redis_url: str, dsn: str, pipeline: Pipeline, ulimit: str, places: str
) -> None:
    """A soft limit of open files is raised. If the hard one is too low, fewer clients are served, as is said at the
    start: 1,100 streams of events leave probes, Postgres and Redis their files."""
    process = Sidecar(tmp_path, redis_url, dsn)
    process.ulimit = ulimit
    process.start()
    try:
        honest = HonestClients(process, pipeline)
        honest.publish()
        assert places in process.log()
        before = honest.measure(SECONDS)
        with attacked(process, process.lines_port, "one_address", crowd=1100):
            check(before, honest.measure(2 * SECONDS))  # 1,100 streams are followed meanwhile, which takes its time
            with httpx.Client(base_url=process.url, timeout=30) as one:
                assert one.get("/readyz").json() == {"ready": True, "problems": []}
    finally:
        process.stop()
    assert "Postgres" not in process.log()


def test_forged_message_moves_no_position(process: Sidecar, honest: HonestClients, redis_url: str) -> None:
    """A message on a stream's channel is a wake-up: whoever may publish in Redis moves nobody with it."""
    with ExitStack() as stack:
        keys = stack.enter_context(redis.Redis.from_url(redis_url))
        one = stack.enter_context(httpx.Client(base_url=process.url, timeout=30))
        events = stack.enter_context(one.stream("GET", "/v1/events?stream=s0")).iter_text()
        assert any("snapshot" in text for text in events)
        lines = stack.enter_context(client(parse_host_port(process.lines), "REPLICATE"))
        assert lines.said() == "POSITION s0 w 1 1"
        for text in ("POSITION s0 w 1 999", "POSITION s0 w 999 999", "RDATA s0 w 2 {}", "\x00"):
            assert keys.publish("tidemark:{s0}", text) > 0
        assert one.get("/v1/streams/s0/wait", params={"token": "m2", "timeout": 1}).status_code in (409, 412)
        assert one.get("/v1/streams/s0").json()["linear"] == 1
        honest.publish()
        assert '"prev":1,"id":2' in next(text for text in events if "event: advance" in text)
