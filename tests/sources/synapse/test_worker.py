"""A real worker of Synapse that hears of the others by Tidemark alone, and rows as Synapse itself sends them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fix_redis import Node
from tests.services.synapse import MAIN, NAME
from tests.sources.synapse.site import SynapseSite, overheard
from tests.sources.synapse.traffic import KINDS, act
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import LOOPBACK, SidecarProcess, free_port
from tidemark.sources.synapse.tables import STREAMS
from tidemark.streaming.wire import records
from tidemark.streaming.wire.line_protocol import RdataCommand, parse
from tidemark.streaming.wire.records import Rdata

pytestmark = pytest.mark.slow

WORDS = [reported for stream in STREAMS for reported in ("--stream", stream)]
Rows = dict[tuple[str, int], list[Any]]
"""By stream and ID (a magnitude)."""


def rows(said: Iterable[tuple[str, str, int | None, str | bytes]]) -> Rows:
    """Of what writers said: stream, writer, ID (None: more rows of the same fact follow) and row."""
    found: Rows = {}
    begun: dict[tuple[str, str], list[Any]] = {}
    for stream, writer, id, row in said:
        begun.setdefault((stream, writer), []).append(json.loads(row))
        if id is not None:
            found[stream, id] = begun.pop((stream, writer))
    return found


def sent(lines: Iterable[str]) -> Rows:
    """The rows that Synapse's own workers have sent each other."""
    commands = [parse(line.encode()) for line in lines if line.startswith("RDATA ")]
    return rows((it.stream, it.writer, it.id, it.row) for it in commands if isinstance(it, RdataCommand))


def sent_upto(site: SynapseSite) -> Rows:
    """The rows that the bridge has sent."""
    found = [record for value in site.follower.values if isinstance(record := records.decode(value), Rdata)]
    return rows((it.stream, it.writer, abs(it.id) if isinstance(it.id, int) else None, bytes(it.row)) for it in found)


def by_text(rows: list[Any]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def test_worker_hears_by_tidemark_what_it_hears_by_its_own(
    site: SynapseSite, synapse_redis: Node, redis_url: str, dsn: str, tmp_path: Path
) -> None:
    """A worker that knows no Redis but the one of Tidemark, where a sidecar speaks, follows every stream to where the
    main process is, and tells its client of the message; Synapse's own class follows the line protocol to the same
    places; and each row that the bridge tells is the row that the writer sent."""
    server = site.server
    rooms = [site.room_of("event1"), site.room_of("event2")]
    server.device("alice")
    # Of `caches` the table names whoever has written: a worker of another test too, that there is no more.
    writers = ["events=event1,event2", "backfill=event1,event2", "caches=master,event1,event2"]
    site.bridge(*WORDS, *(reported for each in writers for reported in ("--writers", each)))
    cores = site.follower.cores
    eventually(lambda: site.checked() and all(cores[name].joined for name in STREAMS), 60, site.known)
    port = free_port()
    variables = {
        **site.variables,
        "TIDEMARK_POSTGRES_DSN": dsn,
        "TIDEMARK_REDIS_URL": redis_url,
        "TIDEMARK_SIDECAR_PORT": str(free_port()),
        "TIDEMARK_LINES_LISTEN": f"{LOOPBACK}:{port}",
        "TIDEMARK_LINES_REDIS_CHANNEL": NAME,
        "TIDEMARK_LINES_SERVER_NAME": NAME,
    }
    sidecar = SidecarProcess(Home(tmp_path), int(variables["TIDEMARK_SIDECAR_PORT"]), variables)
    try:
        sidecar.start()
        with overheard(synapse_redis.url) as lines, server.listener("listener", urlsplit(redis_url).port or 0, port):
            since = server.synced("alice", at="listener")["next_batch"]
            for number in range(KINDS):
                act(site, rooms, number, [MAIN])
            event = server.send(rooms[0], "alice", "by way of Tidemark", "event1")

            def follows() -> bool:
                site.checked()
                return followed("listener") == followed(MAIN)

            def followed(at: str) -> list[str]:
                """Events, presence, typing, receipts, account data, push rules, messages to devices, device lists."""
                return str(server.synced("alice", at=at)["next_batch"]).split("_")[:8]

            eventually(follows, 60, lambda: f"{followed('listener')}, {followed(MAIN)}, {site.known()}")
            here = server.synced("alice", since, at="listener")["rooms"]["join"][rooms[0]]["timeline"]["events"]
            assert event in [each["event_id"] for each in here]
            received = {}

            def hears() -> bool:
                nonlocal received
                received = server.call("listener", "GET", "/_synapse/client/heard")
                at = {
                    name: {it: STREAMS[name].direction.signed(core.positions[it]) for it in core.positions}
                    for name, core in cores.items()
                }
                return site.checked() and received == {"tokens": at, "lost": 0}

            eventually(hears, 60, lambda: f"{received} {site.known()}")
            problems = server.workers["listener"].home.log("listener").read_text()
    finally:
        sidecar.stop()
    assert "ERROR" not in problems, problems
    theirs, mine = sent(lines), sent_upto(site)
    assert {stream for stream, _ in theirs} >= {*STREAMS}
    for at, their_rows in theirs.items():
        if at in mine:
            assert by_text(mine[at]) == by_text(their_rows), at
    assert {stream for stream, _ in mine} == {*STREAMS}
