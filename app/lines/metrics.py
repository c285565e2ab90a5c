"""Every metric of the line protocol: its name, its kind, what it means and what to do when it moves."""

from prometheus_client import Counter, Gauge

from tidemark.app.sidecar.metrics import REGISTRY

CLIENTS = Gauge("tidemark_lines_clients", "Connections of the line protocol that are open now.", registry=REGISTRY)
HEARD = Counter("tidemark_lines_in", "Lines that clients sent.", registry=REGISTRY)
SAID = Counter("tidemark_lines_out", "Lines that were sent to clients, to all of them together.", registry=REGISTRY)
LEFT = Counter(
    "tidemark_lines_closed",
    "Connections that we closed: `slow` clients did not read, `silent` ones sent nothing, `bad` ones sent what is no"
    " command, `crowded`: at the limit of connections. `slow` rising: look at the clients, or at their network.",
    ["why"],
    registry=REGISTRY,
)
ANNOUNCED = Counter(
    "tidemark_lines_announcements",
    "Moves of writers that were announced: with `rows`, as `empty`, or so that clients `fetch`. `fetch` rising: rows do"
    " not come from Kafka in time, or the bound on rows is too low.",
    ["how"],
    registry=REGISTRY,
)
ROWS_BYTES = Gauge(
    "tidemark_lines_rows_bytes", "What is held of rows whose IDs no position has passed, about.", registry=REGISTRY
)
ROWS_DROPPED = Counter(
    "tidemark_lines_rows_dropped",
    "Times that a writer lost what was held of its rows because the bound was reached.",
    registry=REGISTRY,
)
SPEAKER = Gauge("tidemark_lines_speaker", "1 while this sidecar speaks on the channel of Redis.", registry=REGISTRY)
