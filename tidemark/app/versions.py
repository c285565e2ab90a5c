"""Which versions may run side by side: pipeline, sidecar and schema differ by one minor version at most.

The schema says itself what works with it (`common.migrations`); states carry a format (`streaming.core.codec`).
Here it is the versions of the processes, as a change of what stands in Redis needs no schema."""

import re
from importlib.metadata import version

from tidemark.common.errors import VersionSkew

OURS = version("tidemark-streams")
_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def require_neighbour(pipeline: str, ours: str = OURS) -> None:
    """For a process that reads what `pipeline` publishes; "" is unknown. Raises `VersionSkew`."""
    if abs(_ahead(pipeline, ours)) > 1:
        raise VersionSkew(ours, pipeline)


def require_successor(last: str, ours: str = OURS) -> None:
    """For a pipeline that goes on where `last` ended: any earlier one, or the next. Raises `VersionSkew`."""
    if _ahead(last, ours) > 1:
        raise VersionSkew(ours, last)


def _ahead(theirs: str, ours: str) -> int:
    """By how many minor versions; of another major version, by more than any may."""
    if not (one := _NUMBERS.match(theirs)) or not (other := _NUMBERS.match(ours)):
        return 0
    majors = int(one[1]) - int(other[1])
    return 1000 * majors if majors else int(one[2]) - int(other[2])
