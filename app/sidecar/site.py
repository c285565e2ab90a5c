"""The web application: operations behind tokens, limits and problems. The routes are thin; see `operation`."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemark.app.sidecar import events, history, looks, metrics, openapi, page, waiting, watching
from tidemark.app.sidecar.operation import Call, Operation, parsed
from tidemark.app.sidecar.problems import Problem, Unauthorized, UnknownStream, answered, framework, unexpected
from tidemark.app.sidecar.service import Limits, Servers, Service, opened
from tidemark.app.sidecar.tokens import Tokens
from tidemark.streaming.wire import is_name

_OURS = [*looks.OPERATIONS, *history.OPERATIONS, *waiting.OPERATIONS, *events.OPERATIONS, *watching.OPERATIONS]
OPERATIONS: Sequence[Operation] = [*_OURS, openapi.operation(_OURS)]


@dataclass(frozen=True, slots=True)
class Terms:
    """Whom the site serves. `tokens_file` None: everybody. `origins` are the web sites whose scripts may read."""

    tokens_file: Path | None = None
    origins: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)


Beside = Callable[[Service], AbstractAsyncContextManager[None]]
"""What runs in the same process while the site does."""


def site(servers: Servers, terms: Terms, beside: Beside = lambda _: nullcontext()) -> Starlette:
    """Raises `BadSetting`. Servers are first asked when the application starts."""
    tokens = None if terms.tokens_file is None else Tokens(terms.tokens_file)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with opened(servers, terms.limits) as service, beside(service):
            app.state.service = service
            yield

    middleware = [Middleware(RawPath)]
    if terms.origins:
        allowed = ["Authorization", "If-None-Match", "Last-Event-ID"]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=terms.origins,
                allow_methods=["GET"],
                allow_headers=allowed,
                expose_headers=["ETag"],
            )
        )
    operations = [Route(it.path, _endpoint(it, tokens), methods=["GET"], name=it.name) for it in OPERATIONS]
    return Starlette(
        routes=[*operations, *page.ROUTES],
        middleware=middleware,
        exception_handlers={Problem: answered, HTTPException: framework, Exception: unexpected},
        lifespan=lifespan,
    )


class RawPath:
    """Routes by the path as it was sent: a stream's name may hold slashes, written %2F."""

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
            response = await operation.act(_call(request))
            status = response.status_code
        except Problem as problem:
            status = problem.status
            raise
        finally:
            metrics.REQUESTS.labels(operation.name, str(int(status))).inc()
            metrics.SECONDS.labels(operation.name).observe(time.perf_counter() - began)
        return response

    def _call(request: Request) -> Call:
        if tokens and operation.guarded and not tokens.allow(request.headers.get("authorization")):
            raise Unauthorized("send Authorization: Bearer and one of the tokens in the sidecar's file")
        stream = unquote(request.path_params.get("stream", ""))
        if "stream" in request.path_params and not is_name(stream):
            raise UnknownStream(stream)
        query = parsed(operation.query, request.query_params.multi_items())
        service: Service = request.app.state.service
        return Call(service, request, stream, query)

    return endpoint
