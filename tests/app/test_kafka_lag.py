"""How long records of a partition have waited, and how long a transaction has blocked it."""

from collections.abc import Sequence
from unittest.mock import create_autospec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import eventually
from tidemark.app.pipeline import kafka_lag
from tidemark.app.pipeline.kafka_lag import MAX_SAMPLES, LagMonitor, LagTracker, PartitionLag
from tidemark.app.pipeline.stream_metrics import StreamCollector
from tidemark.common.errors import Unavailable
from tidemark.sources.topics import TopicIdentity, Topics

PLACE = "facts", 0


def test_the_age_is_that_of_the_oldest_record_that_is_not_read() -> None:
    """Records that came later do not make it younger, and reading makes it that of what is left."""
    tracker = LagTracker()
    assert tracker.observe(PLACE, 0.0, read_offset=5, stable_offset=5, end_offset=5) == PartitionLag(0, 0.0, 5, 0.0)
    assert tracker.observe(PLACE, 10.0, read_offset=5, stable_offset=7, end_offset=7) == PartitionLag(2, 0.0, 7, 0.0)
    assert tracker.observe(PLACE, 12.0, read_offset=5, stable_offset=9, end_offset=9) == PartitionLag(4, 2.0, 9, 0.0)
    assert tracker.observe(PLACE, 13.0, read_offset=8, stable_offset=9, end_offset=9) == PartitionLag(1, 1.0, 9, 0.0)
    assert tracker.observe(PLACE, 14.0, read_offset=9, stable_offset=9, end_offset=9) == PartitionLag(0, 0.0, 9, 0.0)


def test_a_transaction_blocks_while_the_last_stable_offset_stays() -> None:
    """Short transactions one after the other move it, so they block nothing for long."""
    tracker = LagTracker()
    assert tracker.observe(PLACE, 0.0, read_offset=5, stable_offset=5, end_offset=6).blocked_seconds == 0
    assert tracker.observe(PLACE, 3.0, read_offset=5, stable_offset=5, end_offset=9).blocked_seconds == 3
    assert tracker.observe(PLACE, 4.0, read_offset=7, stable_offset=7, end_offset=9).blocked_seconds == 0
    assert tracker.observe(PLACE, 9.0, read_offset=7, stable_offset=7, end_offset=99).blocked_seconds == 5
    assert tracker.observe(PLACE, 10.0, read_offset=99, stable_offset=99, end_offset=99).blocked_seconds == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_no_age_is_younger_than_the_truth(steps: list[tuple[int, int]]) -> None:
    """Against every offset's own arrival, as far as rounds can tell."""
    tracker, arrived, read, end = LagTracker(), dict[int, float](), 0, 0
    for now, (came, taken) in enumerate(steps):
        arrived |= {offset: float(now) for offset in range(end, end + came)}
        end += came
        read = min(end, read + taken)
        lag = tracker.observe(PLACE, float(now), read_offset=read, stable_offset=end, end_offset=end)
        assert lag.seconds == (now - arrived[read] if read < end else 0.0)


def test_what_is_remembered_is_bounded() -> None:
    """A pipeline that is stopped for days while records come: the age still counts from the first."""
    tracker = LagTracker()
    for second in range(5 * MAX_SAMPLES):
        lag = tracker.observe(PLACE, float(second), read_offset=0, stable_offset=second + 1, end_offset=second + 1)
    assert lag.seconds == 5 * MAX_SAMPLES - 1
    assert len(tracker._histories[PLACE].end_offsets) <= MAX_SAMPLES


def test_while_kafka_does_not_answer_no_partition_counts_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each relay that is quiet for want of Kafka would be called silent."""
    monkeypatch.setattr(kafka_lag, "LAGGING_SECONDS", 0.0)
    noted: list[Sequence[kafka_lag.LagNote]] = []
    topics = create_autospec(Topics, instance=True)
    topics.identities.side_effect = Unavailable("Kafka", "here:9092", "no answer")
    remembered = {"facts": TopicIdentity("id", 2)}
    with LagMonitor(topics, remembered, StreamCollector(), noted.append).running():
        eventually(lambda: noted)
    assert [note[:3] for note in noted[0]] == [("facts", 0, 0), ("facts", 1, 0)]
