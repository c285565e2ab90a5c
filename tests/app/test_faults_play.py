"""All faults at once, for a minute: a simulator with everything that can go wrong, servers and pipelines that die."""

import shutil
import time
from collections.abc import Callable
from random import Random

import redis

from tests.app.proofs import RedisWatcher, settled
from tests.app.running import PATIENCE
from tests.fix_pipeline import Site
from tests.fix_servers import away
from tests.play.cast import Cast, Habits
from tests.waiting import eventually
from tidemark.app.stack.postgres import PostgresServer

SECONDS = 60.0

WILD = Habits(
    rollback=0.1,
    sent_twice=0.03,
    stuck_every=5.0,
    stuck_for=(1.0, 4.0),
    idle_every=8.0,
    idle_for=(1.0, 4.0),
    crash_every=8.0,
    down_for=(0.5, 3.0),
    turnover_every=10.0,
)


def test_positions_survive_everything_at_once(site: Site, postgres: PostgresServer) -> None:
    """Rules 1 to 5: through kills at random moments, a flushed Redis, a restarted Postgres and a lost checkpoint no
    reader sees a position step back or run ahead of the truth, and in the end Redis, Postgres and the truth are one,
    with a history as chained as that of an undisturbed run."""
    seed = time.time_ns() % 10_000
    random = Random(seed)
    play = site.play(seed, Cast(streams=4, writers=3, rate=150.0, habits=WILD))

    def kill() -> None:
        site.latest.kill()

    def lose_the_checkpoint() -> None:
        dead = site.latest
        dead.kill()
        eventually(dead.alone, PATIENCE, lambda: "the end of the JVM, which may still write to the checkpoint")
        if site.checkpoint.exists():  # the fault before may have come before the query's first batch
            shutil.rmtree(site.checkpoint)

    def flush_redis() -> None:
        with redis.Redis.from_url(site.redis_url) as client:
            client.flushdb()

    def restart_postgres() -> None:
        with away(postgres):
            time.sleep(1.0)

    faults: list[Callable[[], None]] = [kill, lose_the_checkpoint, flush_redis, restart_postgres]
    random.shuffle(faults)
    moments = iter(sorted(random.uniform(10.0, SECONDS - 10.0) for _ in faults))
    due = next(moments)
    with RedisWatcher(site, play) as watcher:
        site.start()
        began = time.monotonic()
        while (now := time.monotonic() - began) < SECONDS:
            play.until(now)
            if faults and now >= due:
                faults.pop()()
                due = next(moments, SECONDS)
                if not site.latest.running:
                    site.start()
            time.sleep(0.1)
        play.end()
        site.shows(play)
    assert not faults
    assert watcher.looks, f"seed {seed}"
    assert not watcher.wrong, f"seed {seed}"
    settled(site)
