from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tidemark.app.pipeline.metrics import BatchHistogram

BUCKETS = (0.125, 0.5, 2.0)
AMOUNTS = st.sampled_from((0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 2.25, 64.0))  # sums of them are exact


@given(st.lists(st.lists(st.tuples(AMOUNTS, st.integers(1, 20)), max_size=9), max_size=4))
def test_amounts_together_count_as_one_by_one(batches: list[list[tuple[float, int]]]) -> None:
    """Buckets, bounds included, sum and count, over any number of batches; an amount may come twice in one."""
    alone, together = CollectorRegistry(), CollectorRegistry()
    one, all_of_them = (
        kind("seconds", "of a test", registry=registry, buckets=BUCKETS)
        for kind, registry in ((Histogram, alone), (BatchHistogram, together))
    )
    assert isinstance(all_of_them, BatchHistogram)
    for batch in batches:
        all_of_them.observe_all(batch)
        for amount, count in batch:
            for _ in range(count):
                one.observe(amount)
    assert told(together) == told(alone)


def told(registry: CollectorRegistry) -> list[bytes]:
    return [line for line in generate_latest(registry).splitlines() if not line.startswith(b"seconds_created")]
