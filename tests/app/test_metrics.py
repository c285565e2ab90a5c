from tidemark.app.metrics import REGISTRY
from tidemark.streaming.model import Reason


def test_what_may_be_counted_stands_at_0_before() -> None:
    """Prometheus sees no increase in a series that begins at 1: the first dead letter would wake nobody."""
    for reason in Reason:
        assert REGISTRY.get_sample_value("tidemark_dead_letters_total", {"reason": reason}) is not None
    assert REGISTRY.get_sample_value("tidemark_records_total", {"outcome": "late"}) is not None
