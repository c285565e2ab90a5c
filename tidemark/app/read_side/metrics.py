"""Every metric of the sidecar, HTTP and line protocol: its name, its kind, what it means and what to do when it moves.

One has the names of streams as a label, up to a bound.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tidemark.app.read_side.sentinel import FAULT_KINDS

REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "tidemark_sidecar_requests",
    "Requests by operation and status. 503 rising: neither Redis nor Postgres can say where a stream stands.",
    ["operation", "status"],
    registry=REGISTRY,
)
SECONDS = Histogram(
    "tidemark_sidecar_request_seconds",
    "From a request to the first byte of its answer, by operation; waits and events left out.",
    ["operation"],
    buckets=[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5],
    registry=REGISTRY,
)
UP = Gauge(
    "tidemark_sidecar_server_up",
    "1 while the server answered the last time it was asked. Redis at 0: answers come from Postgres.",
    ["server"],
    registry=REGISTRY,
)
LINE = Gauge(
    "tidemark_sink_linear_position",
    "The linear position of a stream as this process answers (`copy` is `sidecar`), where it was asked in the last 10 s"
    " or somebody follows it. Below tidemark_linear_position of minutes ago: what it reads is old.",
    ["stream", "copy"],
    registry=REGISTRY,
)
LINES_LEFT_OUT = Gauge(
    "tidemark_sink_streams_omitted",
    "Streams of which it was asked in the last 10 s and that have no series, past TIDEMARK_METRICS_MAX_STREAMS.",
    registry=REGISTRY,
)
CHAIN_FAULTS = Counter(
    "tidemark_sidecar_chain_errors",
    "What breaks a rule on the lists of advances of followed streams: a `hole` or an `overlap` between two advances of"
    " a writer, a `regress` of a writer or a line, an advance that is `empty` or has no evidence. Above 0: Redis was"
    " set back or written by somebody else, or Tidemark has a defect; the sidecar's log names it.",
    ["fault"],
    registry=REGISTRY,
)
for _fault in FAULT_KINDS:
    CHAIN_FAULTS.labels(_fault)  # Prometheus sees no increase in a counter that was not there before
OPEN = Gauge(
    "tidemark_sidecar_requests_in_flight",
    "Requests that are held open now: `wait`, `events` and `watch`. At the limit new ones get 429: run more sidecars.",
    ["operation"],
    registry=REGISTRY,
)
GAVE_WAY = Counter(
    "tidemark_sidecar_evicted_connections",
    "Requests that were held open, and ended because all places were taken and a client of another address asked for"
    " one. Rising: one address has most of the places, as a proxy has that TIDEMARK_SIDECAR_TRUSTED_PROXIES does not"
    " name; or run more sidecars.",
    registry=REGISTRY,
)
PAUSED = Counter(
    "tidemark_sidecar_events_paused",
    "Clients of events that waited up to a second before they began, since more than a hundred streams of events from"
    " their address had ended within a second. Rising: somebody comes and goes, or all clients share one address.",
    registry=REGISTRY,
)


CLIENTS = Gauge("tidemark_lines_clients", "Connections of the line protocol that are open now.", registry=REGISTRY)
LINES_IN = Counter("tidemark_lines_received", "Lines that clients sent.", registry=REGISTRY)
LINES_OUT = Counter(
    "tidemark_lines_sent", "Lines that were sent to clients, to all of them together.", registry=REGISTRY
)
CLOSED = Counter(
    "tidemark_lines_closed",
    "Connections that we closed: `slow` clients did not read, `silent` ones sent nothing, `bad` ones sent what is no"
    " command, `crowded` ones were one too many, or gave way to another address. `slow` rising: look at the clients, or"
    " at their network.",
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
    "tidemark_lines_rows_bytes", "Bytes of rows that wait for a position to pass their IDs, about.", registry=REGISTRY
)
ROWS_DROPPED = Counter(
    "tidemark_lines_rows_dropped",
    "Times that a writer lost its waiting rows because the bound was reached.",
    registry=REGISTRY,
)
SPEAKER = Gauge(
    "tidemark_lines_channel_leader", "1 while this sidecar speaks on the channel of Redis.", registry=REGISTRY
)
