"""`helm test`: one fact more in a stream of the test's own, then its position over Redis and over HTTP."""

import json
import os
import socket
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tidemark.app.settings import load
from tidemark.app.verbs.kafka_records import produce_lines
from tidemark.sinks.reader import Positions, PositionSnapshot
from tidemark.streaming.wire.records import Topic

STREAM, WRITER = "helm-test", "helm-test"
PATIENCE = 120.0


class Named(ssl.SSLContext):
    """Asks the Service, which may be called otherwise, for the name in its certificate."""

    def wrap_socket(self, sock: socket.socket, *given: Any, **named: Any) -> ssl.SSLSocket:
        return super().wrap_socket(sock, *given, **{**named, "server_hostname": os.environ["LINES_SERVER_NAME"]})


def trusted() -> ssl.SSLContext | None:
    if not os.environ["SIDECAR"].startswith("https"):
        return None
    ca, context = Path("/etc/tidemark/secrets/sidecar/ca.crt"), Named(ssl.PROTOCOL_TLS_CLIENT)
    if ca.exists():
        context.load_verify_locations(ca)
    else:
        context.load_default_certs()
    return context


def over_http(path: str) -> dict[str, object] | None:
    """None for a stream that nobody has heard of."""
    tokens = Path("/etc/tidemark/secrets/sidecar/tokens")
    headers = {"Authorization": f"Bearer {tokens.read_text().split()[0]}"} if tokens.exists() else {}
    try:
        with urlopen(Request(os.environ["SIDECAR"] + path, headers=headers), timeout=10, context=trusted()) as response:
            return dict(json.load(response))
    except HTTPError as error:
        if error.code == 404:
            return None
        raise


def missing() -> str:
    """What the pipeline says that it waits for."""
    try:
        with urlopen(os.environ["PIPELINE"] + "/readyz", timeout=10):
            return "the pipeline is ready, so look at its log and at `tidemark status`"
    except HTTPError as error:
        return f"the pipeline is not ready: {error.read().decode().strip()}"
    except (URLError, TimeoutError) as error:
        return f"the pipeline does not answer ({error}): does its pod run?"


def over_redis(positions: Positions) -> int:
    snapshot = positions.get(STREAM)
    return snapshot.linear if isinstance(snapshot, PositionSnapshot) else 0


def answered() -> dict[str, object]:
    """Where the stream is before the fact; the sidecars may have just been started."""
    asked = time.monotonic()
    while True:
        try:
            return over_http(f"/v1/streams/{STREAM}") or {"linear": 0}
        except (OSError, TimeoutError) as error:
            if time.monotonic() - asked > PATIENCE:
                raise SystemExit(f"no sidecar answers after {PATIENCE:.0f} s ({error}); {missing()}") from None
            time.sleep(1)


settings = load()
before = answered()
wanted = int(str(before["linear"])) + 1
fact = {"kind": "RDATA", "stream": STREAM, "writer": WRITER, "id": wanted, "row": {}}
sent = time.monotonic()
produce_lines(settings.kafka, settings.kafka_facts_topic, Topic.FACTS, [json.dumps(fact).encode()], print)
with Positions(settings.redis) as positions:
    while (linear := over_redis(positions)) < wanted:
        if time.monotonic() - sent > PATIENCE:
            raise SystemExit(f"Redis still has {linear} after {PATIENCE:.0f} s, not {wanted}: {missing()}")
        time.sleep(0.05)
print(f"Redis has {STREAM} at {linear}, {time.monotonic() - sent:.2f} s after the fact was sent")
after = over_http(f"/v1/streams/{STREAM}")
if after is None or after["linear"] != linear:
    raise SystemExit(f"the sidecar says {after}, and Redis {linear}")
print(f"the sidecar says the same: token {after['token']}, from {after['source']}")
