"""The scripts that Redis runs for us: each call is for many streams, which in a Cluster are of one slot."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeVar

from redis import RedisCluster
from redis import exceptions as problems
from redis.client import NEVER_DECODE

from tidemark.sinks.redis.client import key

_Item = TypeVar("_Item")

ScriptCall = tuple[Sequence[str], Sequence[str | bytes]]
"""Streams and arguments."""

_KEYS = ("linear", "token", "advances", "fence", "allocated")
"""A stream's, beside the positions."""


class Script:
    """A file of Lua beside this one, of which a server is told when it does not know it."""

    def __init__(self, file: str) -> None:
        here = files("tidemark.sinks.redis")
        self._text = "".join(here.joinpath(name).read_text("utf-8") for name in ("call.lua", file))
        self._sha = sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def answers(self, client: Any, calls: Iterable[ScriptCall]) -> list[Any]:
        """Of each call, or its error. Text is bytes: what somebody else has put into a key may be none."""
        wanted = list(calls)
        answers = self._called(client, wanted)
        if any(isinstance(answer, problems.NoScriptError) for answer in answers):
            client.script_load(self._text)  # a new server, or one that was restarted
            answers = self._called(client, wanted)
        return answers

    def _called(self, client: Any, calls: Sequence[ScriptCall]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        clustered = isinstance(client, RedisCluster)
        for streams, arguments in calls:
            keys = [key(stream, "positions") for stream in streams]
            if clustered:  # a node that has not all of them, because their slot moves, must not run it
                keys += [key(stream, name) for stream in streams for name in _KEYS]
            # Not `evalsha`, which redis-py does not want in a pipeline to a Cluster, although each call has its node.
            pipeline.execute_command("EVALSHA", self._sha, len(keys), *keys, *arguments, **{NEVER_DECODE: True})
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers


def slots(client: Any) -> Callable[[str], int]:
    """The slot of a stream's keys; of one server all are one."""
    if isinstance(client, RedisCluster):
        keyslot: Callable[[str], int] = client.keyslot
        return lambda stream: keyslot(key(stream, "positions"))
    return lambda _: 0


def together(items: Iterable[tuple[str, int, _Item]], slot: Callable[[str], int], most: int) -> list[list[_Item]]:
    """What one call each is for: those of one slot, in their order, up to `most` by their sizes. Each item comes with
    its stream and its size; one that is larger is alone."""
    found: list[list[_Item]] = []
    newest: dict[int, tuple[list[_Item], int]] = {}
    for stream, size, item in items:
        place = slot(stream)
        call, so_far = newest.get(place, ([], most))
        if so_far + size > most:
            call, so_far = [], 0
            found.append(call)
        call.append(item)
        newest[place] = call, so_far + size
    return found
