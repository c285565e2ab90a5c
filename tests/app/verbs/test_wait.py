"""`tidemark wait` on real servers, by its exit codes."""

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline, later
from tidemark.app.cli import main


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
