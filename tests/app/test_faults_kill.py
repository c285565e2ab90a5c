"""kill -9 of the pipeline at the worst moments of a batch."""

import pytest

from sources.simulator.cast import Cast
from tests.app.proofs import as_undisturbed
from tests.fix_pipeline import Play, Site

pytestmark = pytest.mark.slow

FEW = 150  # records a batch: enough batches for every death


def test_a_kill_between_any_two_steps_of_a_batch_leaves_no_trace(site: Site) -> None:
    """Rules 3, 4 and 5: killed before the commit, between commit and Redis, and between Redis and the end of the
    batch, the pipeline comes to exactly the positions, the history and the dead letters of an
    undisturbed run."""
    play = Play(site, seed=7, cast=Cast(streams=3, writers=3, rate=200.0))
    play.until(15.0)
    play.end()
    for step in ("commit", "show", "bury"):
        doomed = site.start(module=("tests.app.killers", step, "3"), max_records_per_batch=FEW)
        assert doomed.ends() == -9, doomed.log()
    site.start()
    site.shows(play)
    as_undisturbed(site)
