"""`docs/reference/metrics.md`, made from the metrics themselves: of pipeline, sidecar, relay and bridge."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from tidemark.app import metrics
from tidemark.app.read_side import metrics as sidecar
from tidemark.sources.relay.metrics import RelayMetrics
from tidemark.sources.synapse.metrics import BridgeMetrics

Row = tuple[str, str, Sequence[str], str]
"""Name, kind, labels, meaning."""


def page() -> str:
    """The metrics page of the documentation."""
    of_streams = [(name, "gauge", labels, meaning) for name, labels, meaning in metrics.STREAM_GAUGES.values()]
    lines = [
        "# Metrics",
        "",
        "Made from the code by `make docs`. The pipeline serves these on `TIDEMARK_METRICS_PORT`:",
        "",
        *_table([*_rows(vars(metrics).values()), *of_streams]),
        "",
        "## The sidecar",
        "",
        "[The sidecar](../how-to/read-over-http.md) serves them beside its answers, at `/metrics`.",
        "",
        *_table(_rows(vars(sidecar).values())),
        "",
        "## The relay",
        "",
        "[`tidemark relay`](../how-to/write-facts.md) serves them at the address of `--metrics`.",
        "",
        *_table(_rows(vars(RelayMetrics(CollectorRegistry())).values())),
        "",
        "## The bridge to Synapse",
        "",
        "[`tidemark synapse`](../how-to/synapse.md) serves them at the address of `--metrics`.",
        "",
        *_table(_rows(vars(BridgeMetrics(CollectorRegistry())).values())),
    ]
    return "\n".join(lines) + "\n"


def _rows(found: Iterable[object]) -> list[Row]:
    return [_row(metric) for metric in found if isinstance(metric, MetricWrapperBase)]


def _row(metric: MetricWrapperBase) -> Row:
    family = next(iter(metric.describe()))
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return name, family.type, list(metric._labelnames), family.documentation  # the library tells labels nowhere else


def _table(rows: Iterable[Row]) -> list[str]:
    table = ["| metric | kind | labels | meaning, and what to do |", "|---|---|---|---|"]
    for name, kind, labels, meaning in sorted(rows):
        named = ", ".join(f"`{label}`" for label in labels)
        table.append(f"| `{name}` | {kind} | {named} | {meaning} |")
    return table
