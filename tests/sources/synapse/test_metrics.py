"""What the bridge's metrics tell, and for how long they stand."""

from prometheus_client import CollectorRegistry

from tidemark.sources.synapse.bridge import BridgeMetrics


def sent_upto(metrics: BridgeMetrics, name: str, label: str = "writer") -> dict[str, float]:
    """By label."""
    every = [it for family in metrics.registry.collect() for it in family.samples if it.name == name]
    return {it.labels[label]: it.value for it in every}


def test_a_writer_is_behind_for_as_long_as_nothing_more_of_it_is_told() -> None:
    """By each move, and where everything is told, its time begins anew; one that has retired has none."""
    metrics = BridgeMetrics(CollectorRegistry())
    metrics.show_lag("events", {"a": 5, "b": 5}, 5, now=100)
    metrics.show_lag("events", {"a": 5, "b": 6}, 7, now=110)
    metrics.show_lag("events", {"a": 5, "b": 7}, 8, now=130)
    assert sent_upto(metrics, "tidemark_synapse_lag_seconds") == {"a": 30, "b": 0}
    assert sent_upto(metrics, "tidemark_synapse_lag_ids") == {"a": 3, "b": 1}
    metrics.show_lag("events", {"b": 8}, 8, now=140)
    metrics.show_lag("events", {"b": 8}, 9, now=150)
    assert sent_upto(metrics, "tidemark_synapse_lag_seconds") == {"b": 10}


def test_a_bridge_that_speaks_no_more_says_nothing_of_what_it_knew() -> None:
    """Another one may have told it since: an alert on it would never end."""
    metrics = BridgeMetrics(CollectorRegistry())
    metrics.show_lag("events", {"a": 5}, 9, now=1)
    metrics.oldest_open.show([(("events",), 70.0), (("events",), 0.0)])
    assert sent_upto(metrics, "tidemark_synapse_oldest_transaction_seconds", "stream") == {"events": 70}
    metrics.silent.labels("events").set(2)
    metrics.blocked.labels("events").set(1)
    metrics.active.set(1)
    metrics.clear()
    every = {it.name: it.value for family in metrics.registry.collect() for it in family.samples}
    left = {name for name in every if "behind" in name or "silent" in name or "oldest" in name or "blocked" in name}
    assert (left, every["tidemark_synapse_active"]) == (set(), 0)
