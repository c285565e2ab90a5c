"""All streams of a Synapse with four workers, for ten minutes under all faults: `make synapse-test`."""

import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.fix_redis import Node
from tests.fix_synapse import started_synapse
from tests.services.synapse import Homeserver
from tests.sources.synapse.site import SynapseSite, reading
from tests.sources.synapse.traffic import act
from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.sources.synapse import tables
from tidemark.sources.synapse.tables import STREAMS

SECONDS = int(os.environ.get("SYNAPSE_SECONDS", "600"))
MISC = ["misc1", "misc2"]
WRITERS = {
    "events": ["event1", "event2"],
    **dict.fromkeys(("receipts", "device_lists"), MISC),
    **dict.fromkeys(("typing", "to_device", "account_data", "presence", "push_rules"), MISC[:1]),
}
WORDS = [reported for stream in STREAMS for reported in ("--stream", stream)]
WORDS += ["--writers", "events=event1,event2", "--writers", "receipts=misc1,misc2"]


@pytest.fixture(scope="module")
def homeserver(home: Home, postgres: PostgresServer, synapse_python: Path, synapse_redis: Node) -> Iterator[Homeserver]:
    """With four workers, as FACTS of its operators have it: several writers where Synapse allows them."""
    with started_synapse(home, postgres, synapse_python, synapse_redis.port, WRITERS) as server:
        yield server


def befall(site: SynapseSite, redis: Node, lot: random.Random) -> str:
    """One fault; everything lives again when it is over."""
    what = lot.choice(["worker", "worker", "bridge", "redis", "outsider", "quiet", "gone"])
    if what == "worker":
        worker = lot.choice([*site.server.workers.values()])
        worker.kill()
        site.wait(lot.uniform(0, 3))
        worker.start()
        return f"killed {worker.name}"
    if what == "bridge":
        bridge = lot.choice(site.bridges)
        bridge.kill()
        site.wait(lot.uniform(0, 2))
        bridge.start()
    if what == "redis":
        redis.kill()
        site.wait(lot.uniform(0, 2))
        redis.start()
    if what == "gone":
        name = lot.choice(["event1", "event2"])
        site.server.workers[name].kill()
        site.wait(lot.uniform(0, 2))
        done = CliRunner().invoke(main, ["synapse", "retire", name, "--wait", "30"], env=site.variables)
        assert f"{name} retires at ID " in done.output, done.output
        site.wait(lot.uniform(0, 5))
        site.server.workers[name].start()
        return f"retired {name}"
    if what == "outsider":
        site.sql.execute("select nextval('events_stream_seq') from generate_series(1, 3)")
    return what


def test_all_streams_whatever_dies(site: SynapseSite, synapse_redis: Node, redis_url: str, dsn: str) -> None:
    """At every moment no event is stepped over, at rest each stream is told up to what its sequence has given out,
    and a reader has read each event once."""
    seed = secrets.randbits(32)
    click.echo(f"seed {seed}")
    lot = random.Random(seed)
    rooms = [site.server.room("alice") for _ in range(8)]
    site.bridge(*WORDS)
    site.bridge(*WORDS)
    with reading(site, redis_url, dsn) as read:
        with site.traffic(rooms, others=lambda number: act(site, rooms, number, MISC)) as sent:
            eventually(lambda: site.checked() and site.floor, 60, site.known)
            ends = time.monotonic() + SECONDS
            while time.monotonic() < ends:
                site.wait(lot.uniform(1, 12))
                click.echo(f"{befall(site, synapse_redis, lot)}: sent {len(sent)}, line {site.follower.core.line}")
        site.settle(120)
        heads = tables.read_heads(site.sql, STREAMS.values())
        cores = site.follower.cores

        def lag_ids() -> dict[str, tuple[int, int]]:
            return {name: (cores[name].line, head) for name, head in heads.items() if cores[name].line < head}

        eventually(lambda: site.checked() and not lag_ids(), 120, lambda: f"{lag_ids()} {site.known()}")
        site.await_read(read)
    for name, stream in STREAMS.items():
        core = cores[name]
        _, facts = tables.read_facts(site.sql, stream, min(core.joined.values()), heads[name])
        missing = {fact.id: fact.writer for fact in facts if fact.id not in map(abs, core.facts)}
        unknown = {id: writer for id, writer in missing.items() if id > core.unseen.get(writer, 0)}
        click.echo(f"{name}: head {heads[name]}, told {len(core.facts)}, unseen {len(missing)}")
        assert not unknown, (name, unknown)
        assert not core.late
        assert not core.rejected
