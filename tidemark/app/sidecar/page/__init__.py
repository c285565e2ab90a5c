"""The live page at `/`, for the person on call: HTML, CSS and ES modules, served as files.

The files load nothing from other sites, contain no data and need no token. The page shows the data of `/v1/watch`.
The page reads its banner text from `/page/note.txt`.
"""

from collections.abc import Sequence
from pathlib import Path

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_HEADERS = {**_SECURITY_HEADERS, "Cache-Control": "no-cache"}


class _Files(StaticFiles):
    """Static files, with security headers. Browsers cache the files, and revalidate them at each use."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


_files = _Files(directory=Path(__file__).parent / "files")


async def _index(request: Request) -> Response:
    return await _files.get_response("index.html", request.scope)


def create_routes(middleware: Sequence[Middleware], banner: str = "") -> list[BaseRoute]:
    """Create the routes of the page.

    Args:
        middleware: the middleware of each route.
        banner: the banner text; empty: no banner.
    """

    async def send_banner(_: Request) -> Response:
        return PlainTextResponse(banner, headers=_HEADERS)

    return [
        Route("/", _index, methods=["GET"], middleware=middleware),
        Route("/page/note.txt", send_banner, methods=["GET"], middleware=middleware),
        Mount("/page", _files, middleware=middleware),
    ]
