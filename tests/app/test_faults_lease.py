"""Two pipelines on one database: one publishes, the other waits, and whoever lost the lease publishes nothing."""

from tests.app.proofs import RedisWatcher, as_undisturbed
from tests.app.running import PATIENCE
from tests.fix_pipeline import Site
from tests.play.cast import Cast
from tests.waiting import eventually


def test_one_publishes_and_the_other_takes_over(site: Site) -> None:
    """Rule 6: the second waits for the lease and takes it over from a first that stands still between Postgres and
    Redis for longer than the lease; the first wakes up in the middle of that batch, publishes nothing and waits;
    killed, the second is followed by the first within 30 s; all that was read in between is counted once."""
    play = site.play(seed=31, cast=Cast(streams=2, writers=3, rate=200.0))
    with RedisWatcher(site, play) as watcher:
        first = site.start(
            module=("tests.app.killers", "SIGSTOP", "publish_to_sink", "3"), lease_seconds=5, owner="first"
        ).ready()
        second = site.start(lease_seconds=5, owner="second", checkpoint=site.home / "second")
        second.says("Waiting for the lease: first has had it since")
        for now in (2.0, 4.0, 6.0):
            play.until(now)
            eventually(lambda: first.stopped() or not site.lacks(play), PATIENCE, lambda: "a batch")
        eventually(first.stopped, PATIENCE, lambda: "the first stands still")
        second.says("Took the lease")
        play.until(10.0)
        site.shows(play)
        first.process.resume()
        first.says("the lease was taken over: this process has token")
        first.says("Waiting for the lease: second has had it since")
        eventually(lambda: first.metric("tidemark_lease_token") == 0)

        play.until(12.0)
        second.kill()
        first.says("Took the lease", 30.0, times=2)
        play.until(14.0)
        play.end()
        site.shows(play)
        eventually(second.alone, PATIENCE, lambda: "the end of its JVM")
    assert watcher.looks
    assert not watcher.wrong
    as_undisturbed(site)
