"""`get` and `wait`, in both forms, on a real Redis that the project's own sinks fill."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline, later
from tidemark.app.stack.processes import RedisServer
from tidemark.common.errors import (
    BadSetting,
    BadToken,
    NotReached,
    Refused,
    StreamNotKnown,
    Unavailable,
)
from tidemark.sinks.reader import AsyncPositions, Positions, PositionSnapshot, Recovering, Token
from tidemark.sinks.reader.wait import MonotonicPositions, PublishedPositions
from tidemark.sinks.redis.client import key


class Both:
    """The asyncio form, called as the other one is: so that one test holds both to the same."""

    def __init__(self, redis: str) -> None:
        self._redis = redis

    def get(self, *arguments: Any, **named: Any) -> Any:
        return self._run(lambda positions: positions.get(*arguments, **named))

    def wait(self, *arguments: Any, **named: Any) -> Any:
        return self._run(lambda positions: positions.wait(*arguments, **named))

    def _run(self, request: Callable[[AsyncPositions], Any]) -> Any:
        async def run() -> Any:
            async with AsyncPositions(self._redis) as positions:
                return await request(positions)

        return asyncio.run(run())


@pytest.fixture(params=["threads", "asyncio"])
def either(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Any]:
    if request.param == "asyncio":
        yield Both(redis_url)
    else:
        with Positions(redis_url) as positions:
            yield positions


@pytest.mark.parametrize("until", ["m3", Token(3)])
def test_a_token_with_a_writer_is_refused(either: Any, until: Token | str) -> None:
    """The token names its writers itself. The CLI refuses the option `--writer` with a token, too."""
    with pytest.raises(BadToken, match="with the writer 'w', give an ID instead of a token"):
        either.wait("s", until, "w", timeout=0)


def test_unknown_is_a_state_of_its_own(either: Any) -> None:
    """A stream that Redis knows nothing of is recovering, and never stands at 0."""
    assert either.get("s") == Recovering("s")


def test_all_of_it_is_read_at_once(either: Any, pipeline: Pipeline, keys: Any) -> None:
    """Linear position, vector, and the token that Redis holds; the allocated where it is known."""
    pipeline.publish(stream("s", advance("first", 0, 9), advance("second", 0, 7), linear=7))
    found = either.get("s")
    assert found == PositionSnapshot("s", 7, {"first": 9, "second": 7}, 9)
    assert str(found.token) == keys.get(key("s", "token")) == "m7~first.9"
    keys.set(key("s", "allocated"), "12")
    assert either.get("s").allocated == 12


def test_clients_of_ones_own_are_used_and_left_open(pipeline: Pipeline, redis_url: str) -> None:
    """A client may decode its replies or not."""
    pipeline.move("w", 0, 3)
    for decodes in (True, False):
        with redis.Redis.from_url(redis_url, decode_responses=decodes) as client:
            with Positions(client) as positions:
                assert positions.get("s") == PositionSnapshot("s", 3, {"w": 3}, 3)
            assert client.ping()


@pytest.mark.parametrize(
    ("until", "writer"), [("m7~first.9", None), (Token(7), None), (7, None), (9, "first"), (7, "gone"), ("m0", None)]
)
def test_what_is_reached_is_not_waited_for(either: Any, pipeline: Pipeline, until: Any, writer: str | None) -> None:
    """Tokens and IDs that are complete are answered at once; an ID below the line is complete whose ever it was."""
    pipeline.publish(stream("s", advance("first", 0, 9), advance("second", 0, 7), linear=7))
    assert either.wait("s", until, writer, timeout=0).linear == 7


def test_wait_ends_with_the_advance(either: Any, pipeline: Pipeline) -> None:
    """The advance that completes the token wakes the waiter, long before its time is over."""
    pipeline.move("w", 0, 3)
    with later(0.3, lambda: pipeline.move("w", 3, 5)):
        began = time.monotonic()
        assert either.wait("s", "m3~w.5", timeout=60).vector == {"w": 5}
    assert time.monotonic() - began < 5


def test_line_that_moves_alone_is_noticed(either: Any, pipeline: Pipeline) -> None:
    """After a retirement the line moves and no writer does: no entry tells, and the wait ends all the same."""
    pipeline.move("w", 0, 5, linear=3)
    with later(0.3, lambda: pipeline.publish(stream("s", linear=5, linear_prev=3))):
        assert either.wait("s", 5, timeout=60).linear == 5


def test_time_may_be_over(either: Any, pipeline: Pipeline) -> None:
    """What is not reached in time is said with where the stream stands, or that nothing is known of it."""
    with pytest.raises(NotReached, match="no position"):
        either.wait("s", 5, timeout=0.1)
    pipeline.move("w", 0, 3)
    with pytest.raises(NotReached, match="is at m3") as caught:
        either.wait("s", "m4~v.9", timeout=0.1)
    assert caught.value.token == "m4~v.9"


def test_error_at_the_timeout_says_that_the_token_is_beyond_every_known_id(
    either: Any, pipeline: Pipeline, keys: Any
) -> None:
    """The record of the ID may still come, so the token is refused at the time-out only, with the known IDs."""
    pipeline.move("w", 0, 3)
    keys.set(key("s", "allocated"), "4")
    read = r"at m3, and the highest ID in the records that Tidemark has read is 4: .* lag"
    with pytest.raises(NotReached, match=read) as caught:
        either.wait("s", "m3~w.5", timeout=0.5, grace=0.1)
    assert (caught.value.allocated, caught.value.is_ahead) == (4, True)
    with pytest.raises(NotReached) as caught:
        either.wait("s", "m4", timeout=0.1)
    assert not caught.value.is_ahead


def test_token_of_a_fact_that_the_relay_has_not_sent_is_waited_for(either: Any, pipeline: Pipeline) -> None:
    """The relay may be behind for longer than any grace: the wait ends when the position is published."""
    pipeline.move("w", 0, 3)
    with later(0.6, lambda: pipeline.move("w", 3, 5)):
        assert either.wait("s", "m3~w.5", timeout=60, grace=0.1).vector == {"w": 5}


def test_wait_without_limit_logs_that_the_token_is_beyond_every_known_id(
    pipeline: Pipeline, positions: Positions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A false token would be waited for silently otherwise."""
    monkeypatch.setattr("tidemark.sinks.reader.wait.GRACE_SECONDS", 0.2)
    pipeline.move("w", 0, 3)
    with later(0.8, lambda: pipeline.move("w", 3, 5)):
        positions.wait("s", 5)
    assert capsys.readouterr().out.count("Waiting for a token beyond every known ID") == 1


def test_stream_that_nobody_heard_of_is_said(either: Any, pipeline: Pipeline) -> None:
    """With a grace of 0 at once; one whose first fact is to come may be given time."""
    pipeline.mirror.check_for_loss()  # leaves the stamp by which a Redis is known that somebody fills
    with pytest.raises(StreamNotKnown, match="check its name"):
        either.wait("s", 5, grace=0)
    with later(0.5, lambda: pipeline.move("w", 0, 5)):
        assert either.wait("s", 5, timeout=60).linear == 5


def test_redis_that_is_not_filled_yet_may_know_the_stream_later(either: Any, pipeline: Pipeline) -> None:
    """Without the pipeline's stamp it may have lost everything: nobody can say that the stream is not there."""
    with pytest.raises(NotReached, match="no position"):
        either.wait("s", 5, timeout=0.3, grace=0)


def test_postgres_tells_what_is_unknown(pipeline: Pipeline, redis_url: str, dsn: str, keys: Any) -> None:
    """With its address an empty Redis is done without, and its word counts for streams that are not there."""
    pipeline.move("w", 0, 3)
    keys.flushall()
    with Positions(redis_url, dsn) as positions:
        assert positions.get("s") == PositionSnapshot("s", 3, {"w": 3}, 3)
        with pytest.raises(StreamNotKnown):
            positions.wait("another", 1, grace=0)


def test_postgres_tells_what_is_unknown_while_redis_does_not_answer(pipeline: Pipeline, dsn: str) -> None:
    pipeline.move("w", 0, 3)
    with Positions("redis://127.0.0.1:1", dsn) as positions:
        assert positions.wait("s", 3).linear == 3
        with pytest.raises(StreamNotKnown):
            positions.wait("another", 1, grace=0, timeout=60)


def test_of_two_threads_the_farther_answer_is_kept() -> None:
    """One thread has read an older position, and is about to store it while the other stores a newer one."""
    old, new = (PublishedPositions(linear, {}, 0, None) for linear in (5, 7))
    merging, may_go_on = threading.Event(), threading.Event()

    class Slow(MonotonicPositions[PublishedPositions]):
        def merge(self, before: PublishedPositions, published: PublishedPositions) -> PublishedPositions:
            if published is old:
                merging.set()
                assert may_go_on.wait(60)
            return super().merge(before, published)

    positions = Slow()
    positions.update("s", PublishedPositions(1, {}, 0, None))
    first = threading.Thread(target=positions.update, args=("s", old))
    first.start()
    assert merging.wait(60)
    second = threading.Thread(target=positions.update, args=("s", new))
    second.start()
    second.join(0.2)
    may_go_on.set()
    first.join()
    second.join()
    assert positions.get("s") == new


def test_current_is_told_as_a_range(either: Any, pipeline: Pipeline) -> None:
    """Everything up to the minimum may be promised; up to the maximum there are facts to use."""
    pipeline.publish(stream("s", advance("first", 0, 9), advance("second", 0, 7), linear=7))
    found = either.get("s")
    assert (found.promised, found.usable) == (7, 9)


def test_positions_do_not_go_back(pipeline: Pipeline, positions: Positions, keys: Any) -> None:
    """Rule 2: where Redis fails over to a replica that lacks the last writes, `get` tells what it told before."""
    pipeline.publish(stream("s", advance("first", 0, 9), advance("second", 0, 7), linear=7))
    before = positions.get("s")
    keys.set(key("s", "linear"), "3")
    keys.hset(key("s", "positions"), "first", "5")
    assert positions.get("s") == before


def test_token_may_run_ahead_for_a_moment(either: Any, pipeline: Pipeline, keys: Any) -> None:
    """A token that was issued before the writer's next heartbeat is waited for."""
    pipeline.move("w", 0, 3)
    keys.set(key("s", "allocated"), "4")
    with later(0.1, lambda: keys.set(key("s", "allocated"), "5")), pytest.raises(NotReached) as caught:
        either.wait("s", 5, timeout=2.5, grace=2)
    assert not caught.value.is_ahead


def test_backward_streams_are_waited_for(either: Any, pipeline: Pipeline, keys: Any) -> None:
    """Negative IDs go down: -5 is beyond -3."""
    pipeline.move("w", 0, -3)
    keys.set(key("s", "allocated"), "-9")
    assert either.wait("s", -2, timeout=0).linear == -3
    with later(0.2, lambda: pipeline.move("w", -3, -5)):
        assert either.wait("s", "m-3~w.-5", timeout=60).linear == -5


def test_redis_that_comes_back_is_asked_again(either: Any, pipeline: Pipeline, redis_server: RedisServer) -> None:
    """A wait goes on through an outage; a `get` says that Redis is away."""

    def come_back() -> None:
        redis_server.start()
        pipeline.mirror.refill()  # on a busy disk Redis loses what was written last

    pipeline.move("w", 0, 3)
    redis_server.kill()
    try:
        with pytest.raises(Unavailable):
            either.get("s")
        with pytest.raises(Unavailable):
            either.wait("s", 3, timeout=0.3)
        with later(0.5, come_back):
            assert either.wait("s", 3, timeout=60).linear == 3
    finally:
        redis_server.start()


def test_bad_arguments_are_named(either: Any) -> None:
    """What is no token is refused before anybody is asked."""
    with pytest.raises(BadToken):
        either.wait("s", "7")
    with pytest.raises(BadToken, match="the type float is not supported"):
        either.wait("s", 3.0)
    with pytest.raises(BadToken, match="the type bool is not supported"):
        either.wait("s", until=True)
    with pytest.raises(BadToken, match="a stream ID must fit into 64 bits"):
        either.wait("s", 2**63)


def test_address_is_not_quoted() -> None:
    """An address that cannot be read may hold a password."""
    for form in (Positions, AsyncPositions):
        with pytest.raises(BadSetting) as caught:
            form("http://:secret@host")
        assert "secret" not in str(caught.value)


def test_wrong_password_is_a_refusal(redis_url: str) -> None:
    """Redis answers and says no: a person must decide."""
    with (
        Positions(redis_url.replace("redis://", "redis://nobody:wrong@")) as positions,
        pytest.raises(Refused, match="user and password"),
    ):
        positions.get("s")


def test_reading_rights_suffice(pipeline: Pipeline, redis_url: str, keys: Any) -> None:
    """A user who may only read our keys can get, wait and follow; without that right it is told what to allow."""
    pipeline.move("w", 0, 3)
    keys.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~tidemark:*", "+@read", "+multi", "+exec")
    keys.execute_command("ACL", "SETUSER", "poor", "on", ">pw", "~other:*", "+@read", "+multi", "+exec")
    try:
        with Positions(redis_url.replace("redis://", "redis://reader:pw@")) as positions:
            assert positions.wait("s", 3, timeout=0).linear == 3
            assert next(positions.follow("s", since="m0"))
        with Positions(redis_url.replace("redis://", "redis://poor:pw@")) as positions, pytest.raises(Refused):
            positions.get("s")
    finally:
        keys.execute_command("ACL", "DELUSER", "reader", "poor")


def test_one_object_serves_many_threads(pipeline: Pipeline, positions: Positions) -> None:
    """120 threads wait for twenty positions; each gets its own."""
    reached: list[int] = []

    def wait(id: int) -> None:
        positions.wait("s", id, timeout=60)
        reached.append(id)

    threads = [threading.Thread(target=wait, args=(id,)) for id in range(1, 21) for _ in range(6)]
    for thread in threads:
        thread.start()
    for id in range(1, 21):
        pipeline.move("w", id - 1, id)
    for thread in threads:
        thread.join()
    assert sorted(reached) == [id for id in range(1, 21) for _ in range(6)]
