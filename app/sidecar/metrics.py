"""Every metric of the sidecar: its name, its kind, what it means and what to do when it moves. No stream's name."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
HELD = Gauge(
    "tidemark_sidecar_open",
    "Requests that are held open now: `wait`, `events` and `watch`. At the limit new ones get 429: run more sidecars.",
    ["operation"],
    registry=REGISTRY,
)
