"""The web application: routes, middleware, bearer tokens and error handlers.

The file of bearer tokens may contain several tokens. To rotate a token: add the new token to the file, change the
clients, then remove the old token.
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
from tidemark.app.sidecar.answers import (
    NO_SNIFF_HEADER,
    NO_STORE_HEADER,
    BadRequest,
    Problem,
    Unauthorized,
    UnknownStream,
    WrongHost,
    handle_defect,
    handle_http_error,
    handle_problem,
)
from tidemark.app.sidecar.event_stream import EVENT_STREAM
from tidemark.app.sidecar.openapi import Operation, OperationCall, parse_query
from tidemark.app.sidecar.service import Limits, Service, open_service
from tidemark.common.errors import BadSetting
from tidemark.common.log import get_logger
from tidemark.streaming.wire.records import is_name

_PATHS_FOR_ANY_HOST = (b"/livez", b"/readyz")


class AllowedHosts:
    """Refuses requests (421) whose header `Host` is none of `names`. The port and upper case are ignored.

    This prevents DNS rebinding: a web page of another site must not reach a sidecar on the user's machine. Probes are
    exempt, because orchestrators send them to an IP address, and their answers contain no positions.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"] not in _PATHS_FOR_ANY_HOST:
            host = host_name(dict(scope["headers"]).get(b"host", b"").decode("ascii", "replace"))
            if host not in self._names:
                problem = WrongHost(
                    f"{host[:255]!r} is not an allowed host name; if this sidecar has this name, add the name to"
                    " TIDEMARK_SIDECAR_ALLOWED_HOSTS"
                )
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


log = get_logger(__name__)

MAX_QUERY_PARAMETERS = 256


class BearerTokens:
    """Bearer tokens from a file with one token per line. The file is loaded again when it changes.

    Blank lines and lines that begin with # are ignored. If the file has no tokens, no request is authorized.

    The constructor raises `BadSetting` if the file cannot be read. If a later read fails, the last tokens stay in use.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._tokens = FileWatcher("the bearer tokens", [path], lambda: _read_bearer_tokens(path), now)

    def is_authorized(self, authorization: str | None) -> bool:
        """Whether a request is authorized. May read the file again.

        Args:
            authorization: the header `Authorization`: `Bearer` and a token; None if the request has no such header.
        """
        tokens = self._tokens.content()
        scheme, _, sent = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Compare with every token, so that the duration reveals nothing.
        matches = [hmac.compare_digest(sent.strip().encode(), token) for token in tokens]
        return any(matches)


def _read_bearer_tokens(path: Path) -> list[bytes]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting("TIDEMARK_SIDECAR_TOKENS_FILE", f"cannot read {path}: {error}") from None
    return [line.encode() for line in lines if line and not line.startswith("#")]


# Not for event streams: the middleware would not compress them, and would use 256 KB of memory for each.
COMPRESSION = Middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
OPERATIONS: Sequence[Operation] = [*operations.OPERATIONS, *events.OPERATIONS]


@dataclass(frozen=True, slots=True)
class AppConfig:
    """The configuration of the web application.

    Attributes:
        tokens_file: the file of bearer tokens; None: requests need no token.
        origins: web sites whose scripts may read the answers (CORS).
        hosts: the allowed names in the header `Host`; empty: any name.
        limits: the limits of long-running requests and of metrics.
        banner: banner text on the live page; empty: no banner.
    """

    tokens_file: Path | None = None
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    banner: str = ""


CompanionService = Callable[[ReadSide], AbstractAsyncContextManager[None]]
"""Returns a context manager that runs another service while the web application runs. The service uses the read
side."""


def create_app(
    servers: ReadSideConfig,
    config: AppConfig,
    stopping: asyncio.Event,
    companion: CompanionService = lambda _: nullcontext(),
) -> Starlette:
    """Create the web application. Its lifespan opens the read side, and raises `BadSetting` if an address is invalid.

    Args:
        servers: the addresses of Redis and Postgres.
        config: the configuration.
        stopping: when this event is set, long-running requests end.
        companion: runs another service with the read side of the application.

    Raises:
        BadSetting: the file of tokens cannot be read.
    """
    tokens = None if config.tokens_file is None else BearerTokens(config.tokens_file)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            open_read_side(servers) as read_side,
            open_service(read_side, config.limits, stopping) as service,
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
    description = openapi.create_openapi_operation(OPERATIONS, {} if tokens is None else openapi.BEARER)
    app = Starlette(
        routes=[
            *(
                Route(
                    operation.path,
                    _create_endpoint(operation, tokens),
                    methods=["GET"],
                    name=operation.name,
                    middleware=[] if operation.media_type == EVENT_STREAM else [COMPRESSION],
                )
                for operation in [*OPERATIONS, description]
            ),
            *page.create_routes([COMPRESSION], config.banner),
        ],
        middleware=middleware,
        exception_handlers={Problem: handle_problem, HTTPException: handle_http_error, Exception: handle_defect},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would go to the `Host` that the client sent
    return app


class NoStoreMiddleware:
    """Adds `Cache-Control: no-store` and `X-Content-Type-Options: nosniff` to answers. A header that an answer already
    has is not replaced. Positions change often, so clients must not store answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (NO_STORE_HEADER | NO_SNIFF_HEADER).items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class RawPathMiddleware:
    """Makes the router use the undecoded path, because a stream's name may contain slashes, which clients send as
    %2F."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("ascii", "replace")}
        await self._app(scope, receive, send)


def _create_endpoint(operation: Operation, tokens: BearerTokens | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        began = time.perf_counter()
        status = 500
        try:
            call = _check_request(request)
            # An event stream does not end by itself.
            if request.method == "HEAD" and operation.media_type == EVENT_STREAM:
                response = Response(media_type=EVENT_STREAM)
            else:
                response = await operation.handle(call)
            status = response.status_code
        except Problem as problem:
            status = problem.status
            raise
        finally:
            metrics.REQUESTS.labels(operation.name, str(int(status))).inc()
            metrics.REQUEST_SECONDS.labels(operation.name).observe(time.perf_counter() - began)
        return response

    def _check_request(request: Request) -> OperationCall:
        if tokens and operation.needs_token and not tokens.is_authorized(request.headers.get("authorization")):
            raise Unauthorized(
                "the request has no valid bearer token; send the header `Authorization: Bearer TOKEN`, with a token of"
                " this sidecar"
            )
        stream = unquote(request.path_params.get("stream", ""))
        if "stream" in request.path_params and not is_name(stream):
            raise UnknownStream(stream)
        if request.scope["query_string"].count(b"&") >= MAX_QUERY_PARAMETERS:  # checked before the expensive parsing
            raise BadRequest(
                f"the request has more than {MAX_QUERY_PARAMETERS} parameters; send fewer parameters. A request without"
                " `stream` parameters follows all streams"
            )
        query = parse_query(operation.query, request.query_params.multi_items())
        service: Service = request.app.state.service
        return OperationCall(service, request, stream, query)

    return endpoint
