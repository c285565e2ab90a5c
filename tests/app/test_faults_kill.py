"""kill -9 of the pipeline at the worst moments of a batch, and of what Spark runs."""

import time
from contextlib import suppress

import psutil
import psycopg
import pytest

from tests.app.proofs import as_undisturbed
from tests.app.running import PATIENCE, Running
from tests.fix_pipeline import Site
from tests.play.cast import Cast
from tests.waiting import eventually
from tidemark.streaming.wire.records import Join, Rdata, encode_row

pytestmark = pytest.mark.slow


def overfull(site: Site) -> None:
    """A chain with room for one span waits for its first ID, so that two facts are put off. When it comes, they are
    recalled; the pipeline dies before they are in Kafka."""
    first, *more = [Rdata(stream="full", writer="w", epoch=1, id=id, row=encode_row({})) for id in (2, 4, 6, 1, 3, 5)]
    site.send(Join(stream="full", writer="w", epoch=1, id=0), first, *more)
    doomed = site.start(
        module=("tests.app.killers", "SIGKILL", "requeue", "1"), pending_bound=1, max_records_per_batch=4
    )
    assert doomed.ends() == -9, doomed.log()
    assert site.sql("select writer, epoch, next, last from tidemark.requeues") == [("w", 1, 2, 3)]
    assert site.sql("select position from tidemark.stream_positions where stream = 'full'") == [(3,)]


FEW = 150  # records a batch: enough batches for every death


def test_a_kill_between_any_two_steps_of_a_batch_leaves_no_trace(site: Site) -> None:
    """Rules 3, 4 and 5: killed before the commit, between commit and Redis, and between Redis and the end of the
    batch, the pipeline comes to exactly the positions, the history and the dead letters of an undisturbed run. So it
    does when Spark dies: without its Python workers the query begins again; without its JVM the process ends with code
    1, in one line that says so, and the next one goes on where it was. What was put off, and was to come again just
    when it was killed, comes again."""
    overfull(site)
    play = site.play(seed=7, cast=Cast(streams=3, writers=3, rate=200.0))
    play.until(15.0)
    for step in ("commit", "publish_to_sink", "dead_letter"):
        doomed = site.start(module=("tests.app.killers", "SIGKILL", step, "3"), max_records_per_batch=FEW)
        assert doomed.ends() == -9, doomed.log()
    running = site.start()
    site.shows(play)
    site.reaches("full", w=6)

    (jvm,) = running.process.children()
    for worker in jvm.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some go with the one they were forked from
            worker.kill()
    play.until(18.0)
    site.shows(play)
    jvm.kill()
    assert running.ends() == 1
    assert running.log().splitlines()[-1].startswith("Error: Spark is not running: it ended with code -9")
    play.end()
    site.start()
    site.shows(play)
    as_undisturbed(site)


def newest(site: Site, kind: str) -> int:
    """Of the batches that Spark has planned (`offsets`) or takes for done (`commits`)."""
    return max(
        (int(file.name) for file in site.checkpoint.glob(f"query-*/{kind}/*") if file.name.isdigit()), default=-1
    )


def await_ahead(site: Site, running: Running) -> int:
    """Return once Spark takes a batch for done that Postgres has not, and has planned the next; gives Postgres's."""
    stands = applied(site)
    eventually(
        lambda: newest(site, "offsets") > newest(site, "commits") > stands,
        PATIENCE,
        lambda: f"Spark beyond batch {stands}: it is at {newest(site, 'commits')}\n{running.log()}",
    )
    return stands


def applied(site: Site) -> int:
    [(batch,)] = site.sql("select batch from tidemark.applied_batches order by number desc limit 1")
    return int(str(batch))


def test_a_kill_while_spark_is_ahead_of_postgres_leaves_no_trace(site: Site) -> None:
    """Rules 2, 3 and 4: while Postgres cannot commit, Spark takes that batch for done and goes on to the next. Killed
    then, the pipeline begins where Postgres stands, and comes to the positions and the history of an undisturbed run;
    no folder of the dead query is left."""
    play = site.play(seed=17, cast=Cast(streams=3, writers=3, rate=200.0))
    play.until(15.0)
    doomed = site.start(max_records_per_batch=FEW)
    eventually(lambda: site.sql("select 1 from tidemark.applied_batches offset 2"), PATIENCE, lambda: "three batches")
    with psycopg.connect(site.dsn) as held:
        held.execute("lock table tidemark.applied_batches in share mode")  # others may read it
        assert await_ahead(site, doomed) == applied(site)
        doomed.kill()
    eventually(doomed.alone, PATIENCE, lambda: "the end of the JVM, which may still write to the checkpoint")
    site.start()
    site.shows(play)
    play.until(18.0)
    play.end()
    site.shows(play)
    as_undisturbed(site)
    assert len(list(site.checkpoint.glob("query-*"))) == 1


def test_a_query_that_begins_anew_while_batches_wait_leaves_no_trace(site: Site) -> None:
    """Rules 3 and 5: a policy asks for a query that begins anew while Postgres takes no batch, one of them handed over
    and one that Spark waits with. Both are waited for, for longer than Spark waits; none is published beside the next
    query, and the process goes on."""
    play = site.play(seed=19, cast=Cast(streams=3, writers=3, rate=200.0))
    running = site.start(max_records_per_batch=FEW).ready()
    play.until(3.0)
    site.shows(play)
    with psycopg.connect(site.dsn) as held:
        held.execute("lock table tidemark.applied_batches in share mode")
        play.until(8.0)
        await_ahead(site, running)
        site.sql("insert into tidemark.policies values ('elsewhere', 'pending_bound', 7)")
        running.says("a batch still runs")
        time.sleep(4.0)  # longer than Spark waits for its thread
    running.says("the query starts again: bounds of streams changed")
    play.end()
    site.shows(play)
    as_undisturbed(site)
    assert running.log().count("could not start; trying again") == 1
