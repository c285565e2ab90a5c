"""Lua scripts in Redis. Each call is for many streams, which have one slot in a Cluster."""

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
"""Streams and arguments of one call."""

_KEYS = ("linear", "token", "advances", "fence", "allocated")
"""Names of the keys of a stream, besides the positions."""


class Script:
    """A Lua script of this folder. It is loaded into a server that does not have it."""

    def __init__(self, file: str) -> None:
        folder = files("tidemark.sinks.redis")
        self._text = "".join(folder.joinpath(name).read_text("utf-8") for name in ("call.lua", file))
        self._sha = sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def answers(self, client: Any, calls: Iterable[ScriptCall]) -> list[Any]:
        """The answer to each call, or its error. Text is returned as bytes: a key may contain anything."""
        calls = list(calls)
        answers = self._run(client, calls)
        if any(isinstance(answer, problems.NoScriptError) for answer in answers):
            client.script_load(self._text)  # a new or restarted server
            answers = self._run(client, calls)
        return answers

    def _run(self, client: Any, calls: Sequence[ScriptCall]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        is_cluster = isinstance(client, RedisCluster)
        for streams, arguments in calls:
            keys = [key(stream, "positions") for stream in streams]
            if (
                is_cluster
            ):  # names all keys: a node that does not have all of them (its slot is moving) must not run the script
                keys += [key(stream, name) for stream in streams for name in _KEYS]
            # redis-py refuses `evalsha` in a pipeline of a Cluster, although each call has a node.
            pipeline.execute_command("EVALSHA", self._sha, len(keys), *keys, *arguments, **{NEVER_DECODE: True})
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers


def slots(client: Any) -> Callable[[str], int]:
    """A function from a stream to the slot of its keys; always 0 if it is not a Cluster."""
    if isinstance(client, RedisCluster):
        keyslot: Callable[[str], int] = client.keyslot
        return lambda stream: keyslot(key(stream, "positions"))
    return lambda _: 0


def group_by_slot(items: Iterable[tuple[str, int, _Item]], slot: Callable[[str], int], most: int) -> list[list[_Item]]:
    """Group items into calls: one slot per call, in order, with a total size of at most `most`.

    Each item has a stream and a size. An item that is larger than `most` gets a call of its own.
    """
    calls: list[list[_Item]] = []
    newest: dict[int, tuple[list[_Item], int]] = {}
    for stream, size, item in items:
        number = slot(stream)
        call, total = newest.get(number, ([], most))
        if total + size > most:
            call, total = [], 0
            calls.append(call)
        call.append(item)
        newest[number] = call, total + size
    return calls
