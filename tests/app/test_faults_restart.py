"""What a start finds that the last run did not leave so: half a load, no checkpoint, a database from a backup."""

import shutil

from tests.app.proofs import RedisWatcher, as_undisturbed, settled
from tests.app.running import PATIENCE
from tests.fix_pipeline import Site
from tests.play.cast import Cast
from tests.waiting import eventually

CAST = Cast(streams=3, writers=3, rate=200.0)


def test_sigterm_under_load_and_a_lost_checkpoint_leave_no_trace(site: Site) -> None:
    """Rules 3 and 5: SIGTERM ends the batch in hand, with code 0 within ten seconds; with its checkpoint deleted the
    next start seeds itself from Postgres and comes to the positions and the history of an undisturbed run."""
    play = site.play(seed=11, cast=CAST)
    play.until(20.0)
    play.end()
    first = site.start(max_records_per_batch=100)
    eventually(lambda: len(site.sql("select 1 from tidemark.applied_batches")) >= 5, PATIENCE, lambda: "five batches")
    first.terminate()
    assert "Ended" in first.log()
    head = sum(end for (end,) in site.sql("select next from tidemark.kafka_offsets"))  # type: ignore[misc]
    assert 0 < head < play.sent, "there was no load left"
    eventually(first.alone, PATIENCE, lambda: "the end of the JVM, which may still write to the checkpoint")
    shutil.rmtree(site.checkpoint)
    site.start()
    site.shows(play)
    as_undisturbed(site)


def test_a_restored_database_and_a_checkpoint_beyond_it_come_together_again(site: Site) -> None:
    """Rules 2, 3 and 5: Postgres is set back behind checkpoint and Redis; the checkpoint is set aside, which is said,
    everything since is applied once more and once only, and no reader of Redis sees a step back meanwhile."""
    play = site.play(seed=12, cast=CAST)
    first = site.start()
    play.until(8.0)
    site.shows(play)
    first.terminate()
    backup = site.snapshot()
    second = site.start()
    for now in (12.0, 16.0, 18.0):  # batch after batch, so that Spark has finished one that the backup has not
        play.until(now)
        site.shows(play)
    second.terminate()
    site.restore(backup)
    with RedisWatcher(site, play) as watcher:
        third = site.start()
        third.says("The checkpoint is set aside, Postgres is the truth")
        play.until(22.0)
        play.end()
        site.shows(play)
    assert watcher.looks
    assert not watcher.wrong
    settled(site)
