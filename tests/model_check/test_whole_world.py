"""The largest small world that is gone through whole (tests/streaming/test_small_worlds.py has the others, and what
each check is worth): `make model-check`, two minutes on a core and 1 GB.
"""

import gc
from collections.abc import Iterator

import pytest

from tests.streaming.explored import Exploration
from tests.streaming.small_world import Size


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Half a million places have no cycles, and to look for some takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


def test_every_way_through_a_world_of_three_ids_each() -> None:
    """Two writers, three IDs each, one restart, one database that goes back: nothing is passed that is open, nothing
    goes back, advances join and prove what they say, each record is counted, and nothing is held for nothing.
    """
    Exploration(Size(ids=3, beats=0, rollbacks=0, under_way=False)).run()
