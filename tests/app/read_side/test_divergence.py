"""When Redis and Postgres count as telling different things."""

from tidemark.app.read_side.snapshots import DivergenceDetector, PositionDifference


def test_a_batch_between_two_readings_is_no_difference() -> None:
    """Postgres has it first: whoever is asked later may know more, and nothing follows from that."""
    detector = DivergenceDetector()
    for number in range(1, 4):
        detector.add_positions("postgres", {"s": number})
        detector.add_positions("redis", {"s": number + 1})
        detector.add_positions("postgres", {"s": number + 1})
    assert detector.difference("s") is None


def test_a_redis_that_stays_behind_is_named_since_it_was_seen() -> None:
    """Also while both move, and on a backward stream; it ends when Redis has what Postgres had before."""
    clock = iter((10.0, 99.0))
    detector = DivergenceDetector(lambda: next(clock))
    detector.add_positions("postgres", {"s": -7})
    detector.add_positions("redis", {"s": -4})
    assert detector.difference("s") == PositionDifference(-4, -7, 10.0)
    detector.add_positions("postgres", {"s": -9})
    detector.add_positions("redis", {"s": -5})
    assert detector.difference("s") == PositionDifference(-5, -9, 10.0)
    detector.add_positions("redis", {"s": -9})
    assert detector.difference("s") is None


def test_a_redis_that_is_ahead_is_named() -> None:
    """Postgres was restored from a backup: what it is asked after Redis it lacks."""
    detector = DivergenceDetector(lambda: 10.0)
    detector.add_positions("redis", {"s": 7, "t": 3})
    detector.add_positions("postgres", {"s": 4, "t": 3})
    assert (detector.difference("s"), detector.difference("t")) == (PositionDifference(7, 4, 10.0), None)
    detector.add_positions("redis", {"s": 7})
    assert detector.difference("s") == PositionDifference(7, 4, 10.0)
    detector.add_positions("postgres", {"s": 8})
    assert detector.difference("s") is None
