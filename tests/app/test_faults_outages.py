"""Servers that are stopped or deaf: the pipeline says what it waits for, loses nothing, and goes on by itself."""

import time

import pytest

from tests.app.proofs import RedisWatcher, as_undisturbed
from tests.fix_pipeline import Site
from tests.fix_servers import away, deaf
from tests.play.cast import Cast
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer, ServerProcess

pytestmark = pytest.mark.slow

CAST = Cast(streams=2, writers=3, rate=100.0)


@pytest.mark.parametrize("what", ["Postgres", "Kafka"])
def test_sigterm_while_it_waits_at_the_start_ends_it_at_once(
    site: Site, postgres: PostgresServer, kafka: KafkaServer, what: str
) -> None:
    """A server that is not there yet is named, and SIGTERM is obeyed with code 0 within ten seconds."""
    servers: dict[str, ServerProcess] = {"Postgres": postgres, "Kafka": kafka}
    with away(servers[what]):
        waiting = site.start()
        waiting.says(f"{what} at")
        waiting.terminate()


def test_servers_that_come_one_after_the_other_and_go_away_in_the_middle_are_waited_for(
    site: Site, postgres: PostgresServer, kafka: KafkaServer, redis_server: RedisServer
) -> None:
    """Rules 2, 4 and 5: nothing answers at the start, and each server is named until it is there. While records flow
    each is stopped for some seconds, and two are deaf; positions go on by themselves, as if nothing had been. SIGTERM
    is obeyed with code 0 within ten seconds also when Postgres is deaf."""
    play = site.play(seed=22, cast=CAST)
    now = 5.0
    play.until(now)
    with away(redis_server):
        with away(kafka):
            with away(postgres):
                running = site.start()
                running.says("Postgres at")
            running.says("Kafka at")
        running.says("Waiting for Redis")
    site.shows(play)  # which a refill may see to, while the batch still waits
    running.says("The wait for Redis has ended")

    def meanwhile(seconds: float) -> None:
        nonlocal now
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now += 0.2
            play.until(now)
            time.sleep(0.2)

    with RedisWatcher(site, play) as watcher:
        for times, server, name in ((2, redis_server, "Redis"), (1, postgres, "Postgres")):
            with away(server):
                meanwhile(6.0)
                running.says(f"Waiting for {name}", times=times)
            running.says(f"The wait for {name} has ended", times=times)
            meanwhile(1.0)
        with away(kafka):
            running.says("Waiting for Kafka")
            time.sleep(5.0)
        running.says("Kafka answers again")
        meanwhile(1.0)
        for server in (redis_server, postgres):
            with deaf(server):
                meanwhile(6.0)
        play.until(now + 2.0)
        site.shows(play)
        with deaf(postgres):
            play.until(now + 4.0)
            time.sleep(1.0)
            running.terminate()
        play.end()
        site.start()
        site.shows(play)
    assert watcher.looks
    assert not watcher.wrong
    as_undisturbed(site)
