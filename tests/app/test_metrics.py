from msgspec.structs import replace

from tests.sinks.given import advance, shard, stream
from tests.streaming.builders import Shard, join, skip
from tidemark.app.pipeline.metrics import REGISTRY, count_batch
from tidemark.sinks.dead_letters import DeadLetterResult
from tidemark.sinks.publisher import PublishResult
from tidemark.streaming.core.effects import NewTimeline, ShardEffects
from tidemark.streaming.values.limits import Reason


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
    count_batch([ShardEffects(0, 0, [done], [], [])], PublishResult(0, False, 1, DeadLetterResult(), 0.0, {}), 0.1)
    assert forced("SKIP") == before + 1


def test_outcomes_and_latencies_of_all_streams_are_counted() -> None:
    """Each advance is one observation, of no less than 0 where a clock is ahead; a new timeline is one regression."""
    latency = "completion_to_published_seconds"
    names = [f"{latency}_count", f"{latency}_sum", f'{latency}_bucket{{le="0.5"}}']
    names += ["source_regressions_total", 'records_total{outcome="applied"}']
    before = [told(name) for name in names]
    late, soon = advance("a", 0, 5), advance("b", 0, 7)
    again = NewTimeline("a", 1, 3, 5, 2, "below")
    done = [
        stream("s", replace(late, oldest=9_000), replace(soon, oldest=10_750), counts={"applied": 12}),
        stream("t", replace(late, oldest=11_500), counts={"applied": 5}, timelines=[again]),
    ]
    count_batch([shard(*done[:1]), shard(*done[1:])], PublishResult(0, False, 1, DeadLetterResult(), 11.0, {}), 0.1)
    assert [told(name) - was for name, was in zip(names, before, strict=True)] == [3, 2.25, 2, 1, 17]


def test_timestamps_that_cannot_be_true_poison_no_latency() -> None:
    """In seconds, in microseconds, or of a clock that is wrong: counted apart, and a backlog of a week is plausible."""
    latency, now = "completion_to_published_seconds", 1_790_000_000.0
    names = [f"{latency}_count", f"{latency}_sum", "implausible_timestamps_total"]
    before = [told(name) for name in names]
    milliseconds = int(now * 1000)
    times = [milliseconds // 1000, milliseconds * 1000, milliseconds + 7_200_000, milliseconds - 604_800_000]
    advances = [replace(advance("a", at, at + 1), oldest=time) for at, time in enumerate(times)]
    count_batch([shard(stream("s", *advances))], PublishResult(0, False, 1, DeadLetterResult(), now, {}), 0.1)
    assert [told(name) - was for name, was in zip(names, before, strict=True)] == [1, 604_800, 3]


def told(name: str) -> float:
    name, _, label = name.partition("{")
    labels = dict([label.rstrip("}").replace('"', "").split("=")]) if label else {}
    value = REGISTRY.get_sample_value(f"tidemark_{name}", labels)
    assert value is not None
    return value


def forced(kind: str) -> float:
    value = REGISTRY.get_sample_value("tidemark_operator_overrides_total", {"kind": kind})
    assert value is not None
    return value
