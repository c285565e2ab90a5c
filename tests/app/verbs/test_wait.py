"""`tidemark wait` on real servers, by its exit codes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline, later
from tests.terminals import shown_on_a_terminal
from tidemark.app.cli import main
from tidemark.app.verbs.follow import _missing_ids
from tidemark.sinks.reader import Token
from tidemark.sinks.redis.client import STREAMS_KEY


@pytest.fixture
def wait(pipeline: Pipeline, dsn: str, redis_url: str) -> Callable[..., Result]:
    """On stream `s`, which stands at 3."""
    pipeline.move("w", 0, 3)
    settings = {"TIDEMARK_POSTGRES_DSN": dsn, "TIDEMARK_REDIS_URL": redis_url}
    return lambda *words: CliRunner().invoke(main, ["wait", *words], env=settings)


def test_what_is_reached_ends_with_0(wait: Callable[..., Result], pipeline: Pipeline) -> None:
    """A token or an ID, of all or of one writer; what is not reached yet is waited for."""
    assert wait("s", "m3").output == "s is at m3\n"
    assert wait("s", "2", "--timeout=0").exit_code == 0
    with later(0.2, lambda: pipeline.move("w", 3, 5)):
        done = wait("s", "5", "--writer=w", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output) == {"stream": "s", "linear": 5, "vector": {"w": 5}, "token": "m5"}


WAIT = "import sys; from tidemark.app.cli import main; main(['wait', *sys.argv[1:]])"


def test_a_terminal_shows_how_far_the_stream_is(pipeline: Pipeline, dsn: str, redis_url: str) -> None:
    """The IDs that were missing at first, of these the complete ones, rate and remaining time."""
    pipeline.move("w", 0, 3)
    moves = {"s from ID 3 to 9": (3, 5), "2/6": (5, 9)}

    def move(shown: str) -> None:
        for text in [text for text in moves if text in shown]:
            pipeline.move("w", *moves.pop(text))

    settings = {"TIDEMARK_POSTGRES_DSN": dsn, "TIDEMARK_REDIS_URL": redis_url}
    shown = shown_on_a_terminal(WAIT, "s", "9", environment=settings, on_output=move)
    assert moves == {}
    assert "6/6" in shown
    assert "IDs/s" in shown
    assert shown.endswith("s is at m9\r\n")
    shown = shown_on_a_terminal(WAIT, "s", "m9", environment=settings)
    assert shown == "s is at m9\r\n"


@pytest.mark.parametrize(
    ("goal", "at", "missing"),
    [
        (Token(9), Token(3), 6),
        (Token(-9), Token(-3), 6),
        (Token(3), Token(9), 0),
        (Token.of(0, {"w": 9}), Token.of(3, {"w": 5}), 4),
        (Token.of(7, {"w": 9}), Token.of(3, {"w": 9}), 4),
    ],
)
def test_missing_ids_are_those_of_the_position_with_the_longest_way(goal: Token, at: Token, missing: int) -> None:
    """A writer that the stream does not name is at the linear position."""
    assert _missing_ids(goal, at) == missing


def test_time_out_while_redis_is_recovering_ends_with_1(dsn: str, redis_url: str, keys: Any) -> None:
    """Redis lists the name of the stream, and has lost its position; Postgres does not have the stream."""
    keys.sadd(STREAMS_KEY, "s")
    settings = {"TIDEMARK_POSTGRES_DSN": dsn, "TIDEMARK_REDIS_URL": redis_url}
    done = CliRunner().invoke(main, ["wait", "s", "m4", "--timeout=0.2"], env=settings)
    assert done.exit_code == 1
    assert "Redis has no position of the stream: Redis may be recovering, so try again" in done.output


def test_a_time_out_ends_with_1_and_a_stream_that_is_not_there_with_2(
    wait: Callable[..., Result], pipeline: Pipeline
) -> None:
    """So does a token that is none. One beyond every known ID is waited for: its record may be on its way."""
    pipeline.publish(stream("s", advance("w", 3, 4), advance("v", 0, 3), linear=3, linear_prev=3))
    late = wait("s", "4", "--timeout=0")
    assert late.exit_code == 1
    assert "it is at m3~w.4; `tidemark gaps s` shows what blocks it" in late.output
    ahead = wait("s", "m5", "--timeout=0.5")
    assert ahead.exit_code == 1
    assert "the highest ID in the records that Tidemark has read is 4" in ahead.output
    for timeout in ("0", "inf"):
        none = wait("none", "m4", "--timeout", timeout)
        assert none.exit_code == 2
        assert "there is no stream none" in none.output
    assert wait("s", "seven").exit_code == 2
    assert wait("s", "m3~w.4", "--writer=w").exit_code == 2
