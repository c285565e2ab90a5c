"""What is read of very many streams at once, on a real Redis."""

from typing import Any

import pytest

from tidemark.sinks.redis import publish
from tidemark.sinks.redis.client import key
from tidemark.sinks.redis.publish import Change, Redis, RedisPositions

ODD = ("1", "2", "a/b", 'say "no"', "back\\slash", "{}", "[]", "null", "\u00e9\u4e16\U0001f30a", "\u2028", "~.%7E")


def test_it_is_read_as_it_was_written(shown: Redis) -> None:
    """Whatever writers and streams are called, at both ends of 64 bits; of one that is not there, nothing."""
    ends = (2**63 - 1, -(2**63), 0)
    wanted = {f"s{end}{name}": dict.fromkeys(ODD, end) for end in ends for name in ODD}
    shown.publish(
        7,
        [
            ("new", Change(name, str(there["1"]), [], [(writer, str(id)) for writer, id in there.items()]))
            for name, there in wanted.items()
        ],
    )
    found = shown.snapshots([*wanted, "gone"])
    assert found.pop("gone") == RedisPositions(None, 0, {}, 0, 0, None, is_token_current=True, is_in_stream_names=False)
    assert found == {
        name: RedisPositions(
            there["1"], 0, there, 0, 7, f"m{there['1']}", is_token_current=True, is_in_stream_names=False
        )
        for name, there in wanted.items()
    }


def test_a_call_ends_where_it_has_read_enough(shown: Redis, keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams with very many writers do not hold Redis for all who wait for it; the others are asked for again."""
    monkeypatch.setattr(publish, "_POSITIONS_PER_CALL", 3)
    crowds = {f"s{number}": {f"w{writer}": writer for writer in range(number % 6)} for number in range(12)}
    shown.publish(
        7,
        [("new", Change(name, "0", [], [(it, str(id)) for it, id in there.items()])) for name, there in crowds.items()],
    )
    keys.set(key("s7", "fence"), "spoilt")
    before = keys.info("commandstats")["cmdstat_evalsha"]["calls"]
    found = shown.snapshots(list(crowds))
    assert {name: it.positions for name, it in found.items()} == {k: v for k, v in crowds.items() if k != "s7"}
    assert shown.faults.keys() == {"s7"}
    assert keys.info("commandstats")["cmdstat_evalsha"]["calls"] - before > 1


def test_a_server_that_forgot_the_script_is_told_again(shown: Redis, keys: Any) -> None:
    """After its restart, say."""
    shown.publish(1, [("new", Change("s", "5", [], [("w", "5")]))])
    keys.script_flush()
    assert shown.snapshots(["s"]) == {
        "s": RedisPositions(5, 0, {"w": 5}, 0, 1, "m5", is_token_current=True, is_in_stream_names=False)
    }
