import pytest

from tests.bench.rate import Meter, Rate, RateLimits, RateMark, steady

MARKS = [RateMark(10, 0.0), RateMark(20, 5.0), RateMark(40, 6.0), RateMark(80, 8.0), RateMark(81, 9.0)]


def test_the_rate_leaves_the_warm_up_and_the_crumbs_out() -> None:
    """It runs from the first mark at `warm` to the first at `total`."""
    assert steady(MARKS, RateLimits(warm=15, total=80, window=30)) == Rate(60, 5.0, 8.0)


def test_the_rate_ends_with_the_first_mark_after_the_window() -> None:
    """Where the window ends between two marks, the later one counts."""
    assert steady(MARKS, RateLimits(warm=15, total=80, window=0.5)) == Rate(20, 5.0, 6.0)


def test_one_mark_is_no_rate() -> None:
    """Too few records for the batches are an error and no figure."""
    with pytest.raises(ValueError, match="1 marks after 81 records"):
        steady(MARKS, RateLimits(warm=81, total=80, window=30))


def test_a_meter_is_done_when_the_rate_is_known() -> None:
    """It stops a competitor at the same mark to which the rate is taken."""
    limits = RateLimits(warm=15, total=80, window=30)
    meter = Meter(limits)
    for mark in MARKS:
        meter.note(mark.records, mark.at)
        if meter.done:
            break
    assert meter.marks == MARKS[:4]
    assert steady(meter.marks, limits) == steady(MARKS, limits)
