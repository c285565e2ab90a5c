"""The copies of positions beside Postgres, one reading of each: Redis's keys, Redis's tokens, and sidecars."""

import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from tidemark.common.errors import BadSetting, BadToken, Unavailable
from tidemark.sinks.reader.token import Token
from tidemark.sinks.redis.publish import Redis
from tidemark.sinks.redis.snapshot import RedisPositions

PAGE = 1000  # streams in one answer of a sidecar
_SECONDS = 10.0  # for an answer of a sidecar


@dataclass(frozen=True, slots=True)
class CopyPositions:
    """A stream as a copy shows it; None: it shows nothing of that. In a copy that is not `whole` a writer that is not
    named stands at the line. `listed`: whoever asks for all names of streams is told this one."""

    linear: int | None
    positions: Mapping[str, int] = field(default_factory=dict)
    allocated: int | None = None
    late: int | None = None
    whole: bool = True
    listed: bool = True
    problem: str | None = None


class Copy(Protocol):
    """Raises `TidemarkError` where it does not answer."""

    @property
    def name(self) -> str: ...

    def names(self) -> set[str]:
        """Its streams."""

    def read(self, streams: Sequence[str]) -> dict[str, CopyPositions]:
        """Each of `streams`, which are sorted."""


class RedisKeys:
    name = "redis"

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def names(self) -> set[str]:
        return self._redis.names()

    def read(self, streams: Sequence[str]) -> dict[str, CopyPositions]:
        return _read(
            self._redis,
            streams,
            lambda it: CopyPositions(it.linear, it.positions, it.allocated, it.late, listed=it.listed),
        )


class RedisTokens:
    """What readers of Redis take that want all in one text."""

    name = "redis's token"

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def names(self) -> set[str]:
        return set()

    def read(self, streams: Sequence[str]) -> dict[str, CopyPositions]:
        return _read(self._redis, streams, lambda it: _of_token(it.token))


def _read(
    redis: Redis, streams: Sequence[str], shown: Callable[[RedisPositions], CopyPositions]
) -> dict[str, CopyPositions]:
    found = {stream: shown(it) for stream, it in redis.held(streams).items()}
    return found | {it: CopyPositions(None, problem=redis.faults[it]) for it in streams if it not in found}


def _of_token(text: str | None) -> CopyPositions:
    if text is None:
        return CopyPositions(None)
    try:
        token = Token.parse(text)
    except BadToken as problem:
        return CopyPositions(None, problem=str(problem))
    return CopyPositions(token.linear, dict(token.positions), whole=False)


class Sidecar:
    """At `url`; the file `tokens` has what it asks for in its first line, `trust` whom its certificate may be from."""

    def __init__(self, url: str, tokens: Path | None, trust: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadSetting("--sidecar", f"{url!r} is no address; write http://host:9480")
        self.name = f"sidecar {url}"
        self._url = url.rstrip("/")
        self._headers = {} if tokens is None else {"Authorization": f"Bearer {_first_line(tokens)}"}
        self._trust = trust

    def names(self) -> set[str]:
        return {it["stream"] for it in self._pages("", None)}

    def read(self, streams: Sequence[str]) -> dict[str, CopyPositions]:
        found = dict.fromkeys(streams, CopyPositions(None))
        # Pages are by name and begin behind one; the first name without its last character is before it.
        for it in self._pages(streams[0][:-1], streams[-1]):
            if it["stream"] in found:
                found[it["stream"]] = CopyPositions(it["linear"], it["vector"])
        return found

    def _pages(self, after: str | None, last: str | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while after is not None and (last is None or after < last):
            page = self._get(f"/v1/streams?limit={PAGE}&after={quote(after, safe='')}")
            found += page["streams"]
            after = page["next"]
        return found

    def _get(self, path: str) -> Any:
        request = Request(self._url + path, headers=self._headers)
        try:
            with urlopen(request, timeout=_SECONDS, context=self._trust) as answer:
                return json.load(answer)
        except HTTPError as problem:
            hint = "; set TIDEMARK_SIDECAR_TOKENS_FILE: it asks for a token" if problem.code == 401 else ""
            raise Unavailable("the sidecar", self._url, f"{problem.code} {problem.reason}{hint}") from None
        except (OSError, HTTPException, ValueError) as problem:
            raise Unavailable("the sidecar", self._url, str(problem)) from None


def _first_line(tokens: Path) -> str:
    try:
        return next((line.strip() for line in tokens.read_text().splitlines() if line.strip()), "")
    except OSError as problem:
        raise BadSetting("TIDEMARK_SIDECAR_TOKENS_FILE", f"cannot read {tokens}: {problem.strerror}") from None
