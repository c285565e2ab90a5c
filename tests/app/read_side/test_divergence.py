"""When Redis and Postgres count as telling different things."""

from tidemark.app.read_side.snapshots import DivergenceDetector, PositionDifference


def test_a_batch_between_two_readings_is_no_difference() -> None:
    """Postgres has it first: whoever is asked later may know more, and nothing follows from that."""
    seen = DivergenceDetector()
    for number in range(1, 4):
        seen.read("postgres", {"s": number})
        seen.read("redis", {"s": number + 1})
        seen.read("postgres", {"s": number + 1})
    assert seen.of("s") is None


def test_a_redis_that_stays_behind_is_named_since_it_was_seen() -> None:
    """Also while both move, and on a backward stream; it ends when Redis has what Postgres had before."""
    clock = iter((10.0, 99.0))
    seen = DivergenceDetector(lambda: next(clock))
    seen.read("postgres", {"s": -7})
    seen.read("redis", {"s": -4})
    assert seen.of("s") == PositionDifference(-4, -7, 10.0)
    seen.read("postgres", {"s": -9})
    seen.read("redis", {"s": -5})
    assert seen.of("s") == PositionDifference(-5, -9, 10.0)
    seen.read("redis", {"s": -9})
    assert seen.of("s") is None


def test_a_redis_that_is_ahead_is_named() -> None:
    """Postgres was restored from a backup: what it is asked after Redis it lacks."""
    seen = DivergenceDetector(lambda: 10.0)
    seen.read("redis", {"s": 7, "t": 3})
    seen.read("postgres", {"s": 4, "t": 3})
    assert (seen.of("s"), seen.of("t")) == (PositionDifference(7, 4, 10.0), None)
    seen.read("redis", {"s": 7})
    assert seen.of("s") == PositionDifference(7, 4, 10.0)
    seen.read("postgres", {"s": 8})
    assert seen.of("s") is None
