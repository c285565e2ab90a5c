from tests.streaming.builders import Shard, join, skip
from tidemark.app.metrics import REGISTRY, count_batch
from tidemark.sinks.dead_letters import DeadLettered
from tidemark.sinks.publisher import Published
from tidemark.streaming.effects import ShardEffects
from tidemark.streaming.model import Reason


def test_what_may_be_counted_stands_at_0_before() -> None:
    """Prometheus sees no increase in a series that begins at 1: the first dead letter would wake nobody."""
    for reason in Reason:
        assert REGISTRY.get_sample_value("tidemark_dead_letters_total", {"reason": reason}) is not None
    assert REGISTRY.get_sample_value("tidemark_records_total", {"outcome": "late"}) is not None
    assert forced("SKIP") is not None


def test_an_operators_act_is_counted_by_its_kind() -> None:
    """As often as the audit table has it."""
    before, shard = forced("SKIP"), Shard()
    shard.feed(join("web", 3))
    done = shard.feed(skip("web", 3, 5, beyond=True))
    count_batch([ShardEffects(0, 0, [done], [], [])], Published(0, False, 1, DeadLettered(), 0.0, {}), 0.1)
    assert forced("SKIP") == before + 1


def forced(kind: str) -> float:
    value = REGISTRY.get_sample_value("tidemark_forced_acts_total", {"kind": kind})
    assert value is not None
    return value
