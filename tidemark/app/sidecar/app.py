"""The web application: the operations behind bearer tokens and limits, with problems as answers.

Bearer tokens are in a file, one a line, which is read again when it changes. There may be several tokens, so that they
can be rotated: add the new one, move the clients, remove the old one.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemark.app.connections import host_name
from tidemark.app.read_side import ReadSide, ReadSideConfig, metrics, open_read_side
from tidemark.app.serving.tls_listener import FileWatcher
from tidemark.app.sidecar import events, openapi, operations, page
from tidemark.app.sidecar.event_stream import EVENT_STREAM
from tidemark.app.sidecar.openapi import Operation, OperationCall, parsed
from tidemark.app.sidecar.problems import (
    NEVER_CACHED,
    NO_SNIFFING,
    BadRequest,
    Problem,
    Unauthorized,
    UnknownStream,
    WrongHost,
    answered,
    framework,
    unexpected,
)
from tidemark.app.sidecar.service import Limits, Service, serving
from tidemark.common.errors import BadSetting
from tidemark.common.log import get_logger
from tidemark.streaming.wire.records import is_name

_PROBES = (b"/livez", b"/readyz")


class AllowedHosts:
    """Refuses requests whose `Host` is none of `names`: a page of another site must not reach a sidecar on its reader's
    machine. `/livez` and `/readyz` are asked by address, and tell nothing."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"] not in _PROBES:
            host = host_name(dict(scope["headers"]).get(b"host", b"").decode("ascii", "replace"))
            if host not in self._names:
                problem = WrongHost(f"this sidecar is not {host[:255]!r}; TIDEMARK_SIDECAR_ALLOWED_HOSTS has its names")
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


log = get_logger(__name__)

PARAMETERS = 256  # of one request


class Tokens:
    """Bearer tokens in a file, one a line, which is loaded again when it changes.

    Blank lines and lines that begin with # are left out. With a file without tokens, no client is served.

    Raises `BadSetting` if the file cannot be read at the start. Later, the last tokens stay in use.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._tokens = FileWatcher("the bearer tokens", [path], lambda: _read_tokens(path), now)

    def allow(self, authorization: str | None) -> bool:
        """Whether the value of the header `Authorization` is one of the tokens."""
        tokens = self._tokens.content()
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        matches = [
            hmac.compare_digest(given.strip().encode(), token) for token in tokens
        ]  # compare all tokens, so that timing reveals nothing
        return any(matches)


def _read_tokens(path: Path) -> list[bytes]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting("TIDEMARK_SIDECAR_TOKENS_FILE", f"cannot read {path}: {error}") from None
    return [line.encode() for line in lines if line and not line.startswith("#")]


# Not for event streams: it would not compress them, and would hold 256 KB for each.
COMPRESSED = Middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
OPERATIONS: Sequence[Operation] = [*operations.OPERATIONS, *events.OPERATIONS]


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """The clients that the site serves.

    Attributes:
        tokens_file: None: every client.
        origins: web sites whose scripts may read.
        hosts: names by which the sidecar may be asked; empty: any name.
        note: banner text on the live page.
    """

    tokens_file: Path | None = None
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    note: str = ""


CompanionService = Callable[[ReadSide], AbstractAsyncContextManager[None]]
"""The other users of the read side, which run while the site runs."""


def site(
    servers: ReadSideConfig,
    config: SiteConfig,
    stopping: asyncio.Event,
    companion: CompanionService = lambda _: nullcontext(),
) -> Starlette:
    """Raises `BadSetting`. Servers are first asked when the application starts. Once `stopping` is set, open requests
    end."""
    tokens = None if config.tokens_file is None else Tokens(config.tokens_file)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            open_read_side(servers) as read_side,
            serving(read_side, config.limits, stopping) as service,
            companion(read_side),
        ):
            app.state.service = service
            yield

    middleware = [Middleware(NoStoreMiddleware), Middleware(RawPathMiddleware)]
    if config.hosts:
        middleware.append(Middleware(AllowedHosts, config.hosts))
    if config.origins:
        allowed = ["Authorization", "If-None-Match", "Last-Event-ID"]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.origins,
                allow_methods=["GET"],
                allow_headers=allowed,
                expose_headers=["ETag"],
            )
        )
    described = openapi.operation(OPERATIONS, {} if tokens is None else openapi.BEARER)
    offered = [*OPERATIONS, described]
    web = Starlette(
        routes=[
            *(
                Route(
                    operation.path,
                    _endpoint(operation, tokens),
                    methods=["GET"],
                    name=operation.name,
                    middleware=[] if operation.media == EVENT_STREAM else [COMPRESSED],
                )
                for operation in offered
            ),
            *page.routes([COMPRESSED], config.note),
        ],
        middleware=middleware,
        exception_handlers={Problem: answered, HTTPException: framework, Exception: unexpected},
        lifespan=lifespan,
    )
    web.router.redirect_slashes = False  # a redirect would go to the `Host` that the client sent
    return web


class NoStoreMiddleware:
    """No cache stores an answer that does not say otherwise: a position is soon old. And no browser guesses another
    media type than the one that is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (NEVER_CACHED | NO_SNIFFING).items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class RawPathMiddleware:
    """Routes by the path as it was sent: the name of a stream may contain slashes, written %2F."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("ascii", "replace")}
        await self._app(scope, receive, send)


def _endpoint(operation: Operation, tokens: Tokens | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        began = time.perf_counter()
        status = 500
        try:
            call = _call(request)
            if request.method == "HEAD" and operation.media == EVENT_STREAM:  # an event stream does not end by itself
                response = Response(media_type=EVENT_STREAM)
            else:
                response = await operation.act(call)
            status = response.status_code
        except Problem as problem:
            status = problem.status
            raise
        finally:
            metrics.REQUESTS.labels(operation.name, str(int(status))).inc()
            metrics.SECONDS.labels(operation.name).observe(time.perf_counter() - began)
        return response

    def _call(request: Request) -> OperationCall:
        if tokens and operation.guarded and not tokens.allow(request.headers.get("authorization")):
            raise Unauthorized("send Authorization: Bearer with one of the tokens in the file of this sidecar")
        stream = unquote(request.path_params.get("stream", ""))
        if "stream" in request.path_params and not is_name(stream):
            raise UnknownStream(stream)
        if request.scope["query_string"].count(b"&") >= PARAMETERS:  # checked before the expensive parsing
            raise BadRequest(
                f"a request has at most {PARAMETERS} parameters; name fewer streams, or none to follow all"
            )
        query = parsed(operation.query, request.query_params.multi_items())
        service: Service = request.app.state.service
        return OperationCall(service, request, stream, query)

    return endpoint
