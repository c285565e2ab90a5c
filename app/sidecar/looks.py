"""The operations that tell where streams stand, and how this process is."""

import time

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from tidemark.app.sidecar import answers, metrics
from tidemark.app.sidecar.describing import described, tag
from tidemark.app.sidecar.operation import Call, Operation, json, tagged
from tidemark.app.sidecar.problems import Recovering, Unauthorized, UnknownStream
from tidemark.app.sidecar.snapshots import Snapshot

PLAIN = "text/plain"


async def all_streams(call: Call) -> Response:
    snapshots = call.service.snapshots
    names = sorted(await snapshots.names())
    if not names and (problems := (await call.service.health()).problems):
        raise Recovering("; ".join(problems))
    now = time.monotonic()
    body = answers.Streams([described(it, now) for it in await snapshots.get(names)])
    return tagged(call.request, body, tag(body))


async def one_stream(call: Call) -> Response:
    (snapshot,) = await call.service.snapshots.get([call.stream])
    body = described(existing(snapshot), time.monotonic())
    return tagged(call.request, body, tag(body))


def existing(snapshot: Snapshot) -> Snapshot:
    """Raises `UnknownStream`, and `Recovering` where nobody can tell whether it exists."""
    if snapshot.exists is False:
        raise UnknownStream(snapshot.stream)
    if snapshot.exists is None:
        raise Recovering(f"nothing is known of a stream {snapshot.stream!r}, and Postgres does not answer")
    return snapshot


async def livez(_: Call) -> Response:
    return Response("alive\n", media_type=PLAIN)


async def readyz(call: Call) -> Response:
    health = await call.service.health()
    return json(health, 200 if health.ready else 503)


async def scrape(call: Call) -> Response:
    for server, fuse in (("redis", call.service.live.fuse), ("postgres", call.service.durable.fuse)):
        metrics.UP.labels(server).set(fuse.problem is None)
    return Response(generate_latest(metrics.REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})


OPERATIONS = [
    Operation(
        "/v1/streams",
        "streams",
        "Where every stream stands.",
        all_streams,
        answers.Streams,
        problems=(Unauthorized, Recovering),
        headers=("If-None-Match",),
    ),
    Operation(
        "/v1/streams/{stream}",
        "stream",
        "Where one stream stands.",
        one_stream,
        answers.Stream,
        problems=(Unauthorized, UnknownStream, Recovering),
        headers=("If-None-Match",),
    ),
    Operation("/livez", "livez", "Whether this process runs.", livez, str, media=PLAIN),
    Operation(
        "/readyz",
        "readyz",
        "Whether it can answer: 503 where neither server does.",
        readyz,
        answers.Health,
        others={503: answers.Health},
    ),
    Operation("/metrics", "metrics", "For Prometheus.", scrape, str, media=PLAIN),
]
