"""The bridge beside a real Synapse: what it tells is what the tables hold, whatever dies."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psycopg
import pytest
from click.testing import CliRunner

from tests.fix_redis import Node
from tests.sources.synapse.site import SynapseSite, overheard, reading
from tests.waiting import eventually
from tidemark.app.cli import main

pytestmark = pytest.mark.slow


def test_events_of_two_writers_whatever_dies(site: SynapseSite, synapse_redis: Node, redis_url: str, dsn: str) -> None:
    """Workers are killed and come back, Redis is, the bridge is, another takes over, and is started again while Redis
    is away: at every moment no event is stepped over, at rest everything is told, and a reader has read each event
    once, those from before too."""
    rooms = [site.server.room("alice") for _ in range(8)]
    first, second = site.bridge(), site.bridge()
    with reading(site, redis_url, dsn) as read:
        with site.traffic(rooms) as sent:

            def more(count: int) -> None:
                wanted = len(sent) + count
                eventually(lambda: site.checked() and len(sent) >= wanted, 60, site.known)

            eventually(lambda: site.checked() and site.floor, 60, site.known)
            more(10)
            victim = site.server.workers["event1"]
            victim.kill()
            more(3)
            victim.start()
            more(5)
            first.kill()
            more(5)
            synapse_redis.kill()
            second.kill()
            second.start()
            synapse_redis.start()
            more(5)
            first.start()
        site.settle()
        site.await_read(read)
    assert {"event1", "event2"} <= {*site.rows().values()}


FAULTS = """
    create or replace function hold() returns trigger language plpgsql as $$
    begin
        if new.json like '%{word}%' then
            perform pg_advisory_xact_lock_shared({number});
        end if;
        return null;
    end $$;
    drop trigger if exists hold on event_json;
    create constraint trigger hold after insert on event_json {when} for each row execute function hold();
"""
"""Holds the transaction of an event with that word in it for as long as somebody has the lock."""


@contextmanager
def lagging(site: SynapseSite, when: str) -> Iterator[None]:
    with psycopg.connect(site.server.dsn, autocommit=True) as holder:
        holder.execute(FAULTS.format(word="HOLD", number=77, when=when).encode())
        holder.execute("select pg_advisory_lock(77)")
        yield
        holder.execute("select pg_advisory_unlock(77)")
        holder.execute("drop trigger hold on event_json")


def waits(site: SynapseSite) -> bool:
    row = site.sql.execute(
        "select count(*) from pg_locks where locktype = 'advisory' and objid = 77 and not granted"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    return row.fetchone() == (1,)


def test_one_writer_does_not_hold_the_other(site: SynapseSite) -> None:
    """While a transaction of one worker is open, the other's position goes on, as Synapse's own token says, the line
    waits below, and the transaction is named."""
    slow, quick = site.room_of("event1"), site.room_of("event2")
    site.bridge()
    eventually(lambda: site.checked() and site.floor, 60, site.known)
    with ThreadPoolExecutor(1) as pool:
        with lagging(site, "not deferrable"):
            sending = pool.submit(site.server.send, slow, "alice", "HOLD")
            eventually(lambda: waits(site))
            for number in range(3):
                site.server.send(quick, "alice", f"quick {number}")
            core = site.follower.core
            eventually(lambda: site.checked() and core.positions["event2"] == site.head(), 60, site.known)
            assert core.line < core.positions["event2"]
            sent_upto = site.server.token("alice")
            assert re.fullmatch(rf"m{core.line}~\d+\.{core.positions['event2']}", sent_upto), sent_upto
            eventually(lambda: site.checked() and any("writer event1, pid" in it for it in site.opened()))
            said = CliRunner().invoke(main, ["synapse", "blockers"], env=site.variables).output
            found = re.match(
                r"backfill, events: pid (\d+) since .+\n    to end it, .+: select pg_terminate_backend\(\1\)", said
            )
            assert found, said
            words = ["synapse", "blockers", "--json"]
            [blocker] = json.loads(CliRunner().invoke(main, words, env=site.variables).stdout)["blockers"]
            assert (blocker["streams"], str(blocker["pid"])) == (["backfill", "events"], found[1])
            assert blocker["ending_statement"] == f"select pg_terminate_backend({found[1]})"
        sending.result()
    site.settle()


def announced(lines: list[str], writer: str) -> list[int]:
    """How far the writer has said that it is in `events`."""
    return [int(line.split()[-1]) for line in lines if line.startswith(f"POSITION events {writer} ")]


def test_commit_of_the_dead_is_waited_for(site: SynapseSite, synapse_redis: Node) -> None:
    """A worker is killed while it commits, and its successor speaks: the event that lands afterwards, below all that
    was announced, is stepped over by nobody."""
    slow, quick = site.room_of("event1"), site.room_of("event2")
    site.bridge()
    eventually(lambda: site.checked() and site.floor, 60, site.known)
    worker = site.server.workers["event1"]
    # A worker's first word is how far IDs are given out, unless it wrote the highest row itself: then it is that row.
    site.server.send(quick, "alice", "above all that event1 has written")
    with ThreadPoolExecutor(1) as pool:
        with lagging(site, "deferrable initially deferred"):
            site.server.patience = 2.0
            sending = pool.submit(site.server.send, slow, "alice", "HOLD")
            eventually(lambda: waits(site))
            dead = site.head()
            worker.kill()
            with pytest.raises(httpx.HTTPError):
                sending.result()
            site.server.patience = 60.0
            with overheard(synapse_redis.url) as lines:
                worker.start()
                eventually(
                    lambda: max(announced(lines, "event1"), default=0) >= dead,
                    what=lambda: f"event1 announces {dead} of events, or more; heard: {lines}",
                )
            site.server.send(quick, "alice", "quick")
            core = site.follower.core
            eventually(lambda: site.checked() and any("pid" in it for it in site.opened()), 60, site.known)
            site.wait(1)  # a bridge that believed the successor would have told by now
            assert max(core.line, core.positions["event1"]) < dead
        eventually(lambda: site.checked() and dead in core.facts, 60, site.known)
    assert core.writers[dead] == "event1"
    site.settle()


def retire(site: SynapseSite, writer: str) -> None:
    done = CliRunner().invoke(main, ["synapse", "retire", writer], env=site.variables)
    assert done.output.splitlines()[-1] == f"{writer} retires at ID {site.head()} of events", done.output


def test_worker_that_is_gone_for_good(site: SynapseSite) -> None:
    """Killed, it holds the line until a person says so; then the line goes on without it. When it comes back after all,
    it is a writer again, and each event is told once."""
    gone, other = site.room_of("event2"), site.room_of("event1")
    site.bridge("--writers", "events=event1,event2")
    eventually(lambda: site.checked() and site.floor, 60, site.known)
    worker, core = site.server.workers["event2"], site.follower.core
    site.server.send(gone, "alice", "its last")
    worker.kill()
    site.sql.execute("select nextval('events_stream_seq')")  # who took it nobody knows
    site.server.send(other, "alice", "goes on")
    eventually(lambda: site.checked() and core.positions["event1"] == site.head(), 60, site.known)
    assert core.line < site.head()
    retire(site, "event2")
    site.server.send(other, "alice", "goes on alone")
    eventually(lambda: site.checked() and core.line == site.head(), 60, site.known)
    assert core.retired == {"event2"}
    worker.start()
    site.server.send(gone, "alice", "is back")
    site.settle()
    assert core.retired == set()


def test_worker_that_gets_another_name(site: SynapseSite) -> None:
    """To Tidemark one comes and one goes: the new name joins by itself, the old one holds the line until it is retired,
    and so again when the first name comes back. One that lives does not retire."""
    server, core = site.server, site.follower.core
    old = site.room_of("event2")
    site.bridge("--writers", "events=event1,event2")
    eventually(lambda: site.checked() and site.floor, 60, site.known)
    server.send(old, "alice", "its last by that name")
    try:
        server.rewrite({"events": ["event1", "event3"]})
        new = site.room_of("event3")
        site.sql.execute("select nextval('events_stream_seq')")  # who took it nobody knows
        server.send(new, "alice", "goes on")
        eventually(lambda: site.checked() and core.positions.get("event3") == site.head(), 60, site.known)
        assert core.line < site.head()
        retire(site, "event2")
        site.settle()
        assert core.retired == {"event2"}
        lives = CliRunner().invoke(main, ["synapse", "retire", "event3"], env=site.variables)
        assert (lives.exit_code, "event3 is alive: it announced a position" in lives.output) == (2, True), lives.output
    finally:
        server.rewrite({"events": ["event1", "event2"]})
    server.send(site.room_of("event2"), "alice", "by its first name")
    retire(site, "event3")
    site.settle()
    assert core.retired == {"event3"}
