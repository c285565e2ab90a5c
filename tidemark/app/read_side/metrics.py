"""Every metric of the sidecar, HTTP and line protocol: its name, its kind, what it means and what to do when it
changes.

One metric has the names of streams as a label, up to a bound.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tidemark.app.diagnosis.reader_lag import ReaderStatus
from tidemark.app.read_side.sentinel import FAULT_KINDS

REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "tidemark_sidecar_requests",
    "Requests by operation and status. 503 rising: neither Redis nor Postgres can give the positions of a stream.",
    ["operation", "status"],
    registry=REGISTRY,
)
SECONDS = Histogram(
    "tidemark_sidecar_request_seconds",
    "Seconds from a request to the first byte of its answer, by operation, without waits and events.",
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
    "The linear position of a stream as this process answers it (`copy` is `sidecar`), if it was read in the last 10 s."
    " Below tidemark_linear_position of minutes ago: what the sidecar reads is old.",
    ["stream", "copy"],
    registry=REGISTRY,
)
LINES_LEFT_OUT = Gauge(
    "tidemark_sink_streams_omitted",
    "Streams that were read in the last 10 s and have no series, because of TIDEMARK_METRICS_MAX_STREAMS.",
    registry=REGISTRY,
)
CHAIN_FAULTS = Counter(
    "tidemark_sidecar_chain_errors",
    "Entries that break a rule on the lists of advances of followed streams: a `hole` or an `overlap` between two"
    " advances of a writer, a `regress` of a writer or of the linear position, an advance that is `empty` or has no"
    " evidence. Above 0: Redis was restored or written by another program, or Tidemark has a defect; see the log of the"
    " sidecar.",
    ["fault"],
    registry=REGISTRY,
)
for _fault in FAULT_KINDS:
    CHAIN_FAULTS.labels(_fault)  # Prometheus sees no increase in a counter that was not there before
OPEN = Gauge(
    "tidemark_sidecar_requests_in_flight",
    "Requests that are open now: `wait`, `events` and `watch`. At the limit new ones get 429: run more sidecars.",
    ["operation"],
    registry=REGISTRY,
)
GAVE_WAY = Counter(
    "tidemark_sidecar_evicted_connections",
    "Open requests that were ended because the limit was reached and a client of another address asked. Rising: one"
    " address has most of the open requests, such as a proxy that TIDEMARK_SIDECAR_TRUSTED_PROXIES does not name; or"
    " run more sidecars.",
    registry=REGISTRY,
)
PAUSED = Counter(
    "tidemark_sidecar_events_paused",
    "Clients of events that were delayed by up to a second, because more than a hundred event streams of their address"
    " had ended within a second. Rising: a client reconnects again and again, or all clients share one address.",
    registry=REGISTRY,
)


CLIENTS = Gauge("tidemark_lines_clients", "Connections of the line protocol that are open now.", registry=REGISTRY)
LINES_IN = Counter("tidemark_lines_received", "Lines that clients sent.", registry=REGISTRY)
LINES_OUT = Counter(
    "tidemark_lines_sent", "Lines that were sent to clients, to all of them together.", registry=REGISTRY
)
CLOSED = Counter(
    "tidemark_lines_closed",
    "Connections that the server closed: `slow` clients did not read, `silent` ones sent nothing, `bad` ones sent an"
    " invalid command, `crowded` ones were beyond the limit, or lost their slot to another address. `slow` rising:"
    " check the clients, or their network.",
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
    "tidemark_lines_rows_bytes", "Bytes of rows that wait until a position passes their IDs, about.", registry=REGISTRY
)
ROWS_DROPPED = Counter(
    "tidemark_lines_rows_dropped",
    "Times that a writer lost its waiting rows because the bound was reached.",
    registry=REGISTRY,
)
READER_POSITION = Gauge(
    "tidemark_reader_linear_position",
    "The linear position up to which a reader has read a stream, if its place is in the database of"
    " TIDEMARK_READERS_DSN.",
    ["stream", "reader"],
    registry=REGISTRY,
)
READER_LAG_IDS = Gauge(
    "tidemark_reader_lag_ids",
    "IDs between the place of a reader and the linear position of its stream. Rising: the reader is too slow, or does"
    " not run; `tidemark readers list` says which.",
    ["stream", "reader"],
    registry=REGISTRY,
)
READER_LAG_SECONDS = Gauge(
    "tidemark_reader_lag_seconds",
    "Seconds since the stream passed the place of a reader; 0 while the reader has everything.",
    ["stream", "reader"],
    registry=REGISTRY,
)
READER_PARKED = Gauge(
    "tidemark_reader_parked",
    "Facts that a reader has parked because its handler failed on them. Above 0: see `tidemark readers parked list`,"
    " repair the cause, and retry or drop them.",
    ["stream", "reader"],
    registry=REGISTRY,
)
SPEAKER = Gauge("tidemark_lines_channel_leader", "1 while this sidecar leads the Redis channel.", registry=REGISTRY)


def show_readers(statuses: Sequence[ReaderStatus]) -> None:
    """Set the metrics of readers. Readers that are gone have no series any more."""
    gauges = (READER_POSITION, READER_LAG_IDS, READER_LAG_SECONDS, READER_PARKED)
    for gauge in gauges:
        gauge.clear()
    for status in statuses:
        values = (status.linear, status.lag_ids, status.lag_seconds, status.parked)
        for gauge, value in zip(gauges, values, strict=True):
            if value is not None:
                gauge.labels(status.stream, status.reader).set(value)
