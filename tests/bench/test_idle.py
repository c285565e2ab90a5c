"""The streams of the bench are what it says of them."""

from tests.bench import idle
from tidemark.streaming.core.fast_path import CaughtUpStream, read_if_caught_up


def test_its_streams_are_at_rest() -> None:
    """Each variant stands where its next fact continues it, with two writers, and nothing of it is to be told."""
    variants = idle._variants()
    assert len(variants) == idle._VARIANTS
    for number, it in enumerate(variants):
        positions = dict(zip(idle._WRITERS, idle._ids(number), strict=True))
        assert read_if_caught_up(it.state) == CaughtUpStream(max(positions.values()), positions, sources=[])
        assert (it.stream, it.linear, it.allocated) == (idle._name(number), max(positions.values()), it.linear)
