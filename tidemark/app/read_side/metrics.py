"""Every metric of the sidecar, for HTTP and the line protocol: name, type, meaning, and what to do when it changes.

`ChainChecker` checks the advances on a stream's list in Redis against the rules of docs/design.md. It reads the raw
entries, before the follower merges them and repairs gaps. So it detects errors of the writing side that no reader
notices. At the start of a list, and after a missing entry, the chain of each writer begins with its next entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tidemark.app.diagnosis.reader_lag import ReaderMetrics
from tidemark.sinks.reader import Answer, ListEntry, ReadList, ReadNewest, StreamKeys
from tidemark.streaming.values.direction import is_beyond

FaultKind = Literal["hole", "overlap", "regress", "empty"]
FAULT_KINDS: tuple[FaultKind, ...] = ("hole", "overlap", "regress", "empty")
NO_ENTRY = "0-0"  # `StreamKeys.last_entry_name` of keys from Postgres, whose positions may be briefly ahead of Redis
EVIDENCE_COUNTS = ("facts", "empty", "unseen", "skipped")


@dataclass(frozen=True, slots=True)
class ChainFault:
    """An advance that breaks a rule, or a linear position that went back.

    `hole`: IDs between two advances of a writer are in neither advance. `overlap`: IDs are in two advances of a writer.
    `regress`: an advance does not move the writer forwards, or the linear position went back. `empty`: an advance has
    no ID or no evidence.

    Attributes:
        writer: the name of the writer; None for the linear position.
        prev, id: the range of the advance. For the linear position, its previous and its current value.
        position_before: the position of the writer before the entry; None if it is not known. For the linear position,
            its previous value.
        entry_name: the name of the entry on the list. For the linear position, the last entry of the list.
    """

    kind: FaultKind
    writer: str | None
    prev: int
    id: int
    position_before: int | None
    entry_name: str


class ChainChecker:
    """Checks the list of one stream. After a fault, the chain continues from the faulty entry, so that a fault is
    reported once."""

    def __init__(self) -> None:
        self._last_ids: dict[str, int] = {}
        self._linear: int | None = None
        self._last_entry: str | None = None

    def check(self, request: ReadList | ReadNewest, keys: Answer) -> Iterator[ChainFault]:
        """Check the entries that were read, and yield their faults. Exhaust the iterator before the next call."""
        assert isinstance(keys, StreamKeys)
        after = request.after.name if isinstance(request, ReadList) and request.after else None
        if after is None or after != self._last_entry or not keys.is_continuous:
            self._last_ids.clear()
            self._last_entry = None
        for entry in keys.entries:
            self._last_entry = entry.name
            if entry.fields["kind"] == "POSITION":
                yield from self._check_advance(entry)
        if keys.linear is not None and keys.last_entry_name != NO_ENTRY:
            before, self._linear = self._linear, keys.linear
            if before is not None and is_beyond(before, keys.linear):
                yield ChainFault("regress", None, before, keys.linear, before, keys.last_entry_name)

    def _check_advance(self, entry: ListEntry) -> Iterator[ChainFault]:
        writer, prev, id = entry.fields["writer"], int(entry.fields["prev"]), int(entry.fields["id"])
        reached = self._last_ids.get(writer)
        kind: FaultKind | None = None
        if not is_beyond(id, prev) or not any(int(entry.fields[count]) for count in EVIDENCE_COUNTS):
            kind = "empty"
        elif reached is None or prev == reached:
            pass
        elif not is_beyond(id, reached):
            kind = "regress"
        else:
            kind = "hole" if is_beyond(prev, reached) else "overlap"
        if kind is not None:
            yield ChainFault(kind, writer, prev, id, reached, entry.name)
        if reached is None or is_beyond(id, reached):
            self._last_ids[writer] = id


REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "tidemark_sidecar_requests",
    "Requests by operation and status. 503 rising: neither Redis nor Postgres can give the positions of a stream.",
    ["operation", "status"],
    registry=REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "tidemark_sidecar_request_seconds",
    "Seconds from a request to its response, by operation. `wait` includes the wait. For `events` and `watch`, the"
    " time until the stream of events begins.",
    ["operation"],
    buckets=[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5],
    registry=REGISTRY,
)
SERVER_UP = Gauge(
    "tidemark_sidecar_server_up",
    "1 if the last query of this server succeeded, else 0. Redis at 0: answers come from Postgres.",
    ["server"],
    registry=REGISTRY,
)
LINEAR_POSITION = Gauge(
    "tidemark_sink_linear_position",
    "The linear position of a stream as this process answers it (`copy` is `sidecar`), if it was read in the last 10 s."
    " If it is below the tidemark_linear_position of some minutes before: the sidecar reads old data.",
    ["stream", "copy"],
    registry=REGISTRY,
)
STREAMS_OMITTED = Gauge(
    "tidemark_sink_streams_omitted",
    "Streams that were read in the last 10 s and have no series, because of TIDEMARK_METRICS_MAX_STREAMS.",
    registry=REGISTRY,
)
CHAIN_FAULTS = Counter(
    "tidemark_sidecar_chain_errors",
    "Entries that break a rule on the lists of advances of followed streams: a `hole` or an `overlap` between two"
    " advances of a writer, a `regress` of a writer or of the linear position, an `empty` advance (without IDs or"
    " without evidence). Above 0: Redis was restored or written by another program, or Tidemark has a defect; see the"
    " log of the sidecar.",
    ["fault"],
    registry=REGISTRY,
)
for _fault in FAULT_KINDS:
    CHAIN_FAULTS.labels(_fault)  # Prometheus computes no increase from the first value of a new series
REQUESTS_IN_FLIGHT = Gauge(
    "tidemark_sidecar_requests_in_flight",
    "Requests that are open now: `wait`, `events` and `watch`. At the limit, new requests get 429: run more sidecars.",
    ["operation"],
    registry=REGISTRY,
)
EVICTED_REQUESTS = Counter(
    "tidemark_sidecar_evicted_connections",
    "Open requests that were ended at the limit, because a client of another address got the slot. Rising: one"
    " address has most of the open requests, such as a proxy that TIDEMARK_SIDECAR_TRUSTED_PROXIES does not name."
    " Else run more sidecars.",
    registry=REGISTRY,
)
EVENTS_PAUSED = Counter(
    "tidemark_sidecar_events_paused",
    "Clients of events that were delayed by up to a second, because more than a hundred recent event streams of their"
    " address ended within a second of their start. Rising: a client reconnects again and again, or all clients share"
    " one address.",
    registry=REGISTRY,
)


LINE_CLIENTS = Gauge("tidemark_lines_clients", "Connections of the line protocol that are open now.", registry=REGISTRY)
LINES_RECEIVED = Counter("tidemark_lines_received", "Lines that clients sent.", registry=REGISTRY)
LINES_SENT = Counter(
    "tidemark_lines_sent", "Lines that were sent, to all clients together and on the Redis channel.", registry=REGISTRY
)
CONNECTIONS_CLOSED = Counter(
    "tidemark_lines_closed",
    "Connections that the server closed: `slow` clients did not read, `silent` ones sent nothing, `bad` ones sent an"
    " invalid command, `crowded` ones were beyond the limit, or lost their slot to another client. `slow` rising:"
    " check the clients, or their network.",
    ["why"],
    registry=REGISTRY,
)
ANNOUNCEMENTS = Counter(
    "tidemark_lines_announcements",
    "Announced moves of writers: `rows` (with their rows), `empty` (there are no rows), or `fetch` (clients fetch the"
    " rows). `fetch` rising: rows do not come from Kafka in time, or the bound on rows is too low.",
    ["how"],
    registry=REGISTRY,
)
ROW_BUFFER_BYTES = Gauge(
    "tidemark_lines_rows_bytes", "Approximate bytes of rows that are not announced yet.", registry=REGISTRY
)
ROWS_DROPPED = Counter(
    "tidemark_lines_rows_dropped",
    "Times that a writer lost its waiting rows because the bound was reached.",
    registry=REGISTRY,
)
READERS = ReaderMetrics(REGISTRY)
CHANNEL_LEADER = Gauge(
    "tidemark_lines_channel_leader", "1 while this sidecar leads the Redis channel.", registry=REGISTRY
)
