"""A collector of traces: takes OTLP over HTTP, and reads it as protobuf."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Takes what it is sent while it answers with 200. `strange` are requests that are no traces."""

    def __init__(self) -> None:
        self.taken: list[ExportTraceServiceRequest] = []
        self.strange: list[str] = []
        self.answer = 200
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if (self.path, self.headers["Content-Type"]) != ("/v1/traces", "application/x-protobuf"):
                    ours.strange.append(self.path)
                elif ours.answer == 200:
                    ours.taken.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(ours.answer)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def traces(self) -> list[dict[str, Span]]:
        """Of each batch its spans by name; one that comes twice has the last."""
        found: dict[bytes, dict[str, Span]] = {}
        for taken in self.taken:
            for of in taken.resource_spans:
                for scope in of.scope_spans:
                    for span in scope.spans:
                        found.setdefault(span.trace_id, {})[span.name] = span
        return [*found.values()]


@contextmanager
def collecting() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def attributes(span: Span) -> Mapping[str, Any]:
    return {it.key: getattr(it.value, cast("str", it.value.WhichOneof("value"))) for it in span.attributes}
