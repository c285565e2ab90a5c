"""The live page at `/`, for the person on call: HTML, CSS and ES modules, served as files.

They load nothing from other sites, contain no data and need no token. What they show comes from `/v1/watch`.
`page/note.txt` is the banner text.
"""

from collections.abc import Sequence
from pathlib import Path

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_HEADERS = {**_SECURITY, "Cache-Control": "no-cache"}


class _Files(StaticFiles):
    """Browsers cache the files and ask each time whether they changed, so an update counts at once."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


_files = _Files(directory=Path(__file__).parent / "files")


async def _index(request: Request) -> Response:
    return await _files.get_response("index.html", request.scope)


def routes(middleware: Sequence[Middleware], note: str = "") -> list[BaseRoute]:
    """The routes of the page, behind `middleware`. `note` is the banner text."""

    async def banner(_: Request) -> Response:
        return PlainTextResponse(note, headers=_HEADERS)

    return [
        Route("/", _index, methods=["GET"], middleware=middleware),
        Route("/page/note.txt", banner, methods=["GET"], middleware=middleware),
        Mount("/page", _files, middleware=middleware),
    ]
