"""A histogram that takes the observations of a batch together: one by one they cost the driver more than the records.

To Prometheus it is any other: names, buckets, sum and time of creation are those of the library's.
"""

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import Histogram


class BatchHistogram(Histogram):
    """Without labels."""

    def observe_all(self, amounts: Iterable[tuple[float, int]]) -> None:
        """Each amount so many times, as `observe` would count them."""
        total, found = 0.0, [0] * len(self._upper_bounds)
        for amount, count in amounts:
            total += amount * count
            found[bisect_left(self._upper_bounds, amount)] += count
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, found, strict=True):
            bucket.inc(count)
