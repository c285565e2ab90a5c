"""Which versions may meet."""

import pytest

from tidemark.app.versions import OURS, require_compatible, require_successor
from tidemark.common.errors import VersionSkew


@pytest.mark.parametrize("pipeline", ["", OURS, "0.4.0", "0.5.9", "0.6.0rc1", "unheard of"])
def test_a_sidecar_reads_what_a_neighbour_publishes(pipeline: str) -> None:
    """One minor version older or newer will do, and so does one that does not say."""
    require_compatible(pipeline, "0.5.2" if pipeline != OURS else OURS)


@pytest.mark.parametrize("pipeline", ["0.3.9", "0.7.0", "1.5.0"])
def test_a_sidecar_does_not_read_what_is_far_from_it(pipeline: str) -> None:
    """It says both versions and what to do."""
    with pytest.raises(VersionSkew, match=rf"0.5.2 .* {pipeline}.*one minor version"):
        require_compatible(pipeline, "0.5.2")


def test_a_pipeline_goes_on_after_every_earlier_one_and_the_next() -> None:
    """States carry a format, so an upgrade may be of any size; a rollback is of one minor version."""
    for last in ("", "0.1.0", "0.5.7", "0.6.0"):
        require_successor(last, "0.5.2")
    with pytest.raises(VersionSkew):
        require_successor("0.7.0", "0.5.2")
