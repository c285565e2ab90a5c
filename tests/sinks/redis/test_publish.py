"""The script, on a real Redis: what readers see, and what no order of calls can make them see."""

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING
from tests.sinks.given import entries
from tidemark.app.stack.processes import RedisServer
from tidemark.common.errors import BadSetting, LeaseLost, Refused, Unavailable
from tidemark.sinks.reader.token import Token
from tidemark.sinks.redis.client import group_by_slot, key
from tidemark.sinks.redis.publish import (
    MOVES_PER_CALL,
    AdvanceEntry,
    Change,
    LateEntry,
    Mode,
    Redis,
    RedisConfig,
    _count_moves,
)

LARGEST = 2**63 - 1


def entry(writer: str, prev: int, id_: int, facts: int = 1, unseen: int = 0, skipped: int = 0) -> AdvanceEntry:
    numbers = (1, prev, id_, facts, 0, unseen, skipped, 7, 3, 1_790_000_000_000)
    return AdvanceEntry(writer, *map(str, numbers))


def late(number: int) -> LateEntry:
    return LateEntry(str(number), "w", "1", "4", "5", "1", "skipped", "3", "1790000000000")


def publish(sink: Redis, change: Change, mode: Mode = "new", token: int = 1) -> list[str]:
    return sink.publish(token, [(mode, change)])


def state(keys: Any, stream: str = "s") -> object:
    return (
        keys.hgetall(key(stream, "positions")),
        keys.get(key(stream, "linear")),
        keys.get(key(stream, "token")),
        entries(keys, stream),
    )


def state_of_all(keys: Any) -> dict[str, bytes]:
    return {name: keys.dump(name) for name in keys.scan_iter()}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_head_never_goes_back(shown: Redis, keys: Any, sign: int) -> None:
    """Rule 2: a new highest ID is shown although nothing else moved; an older one changes nothing."""
    for allocated, there in ((5, 5), (12, 12), (9, 12)):
        publish(shown, Change("s", "0", allocated=str(sign * allocated)))
        assert keys.get(key("s", "allocated")) == str(sign * there)


def test_databases_of_one_server_have_channels_of_their_own(shown: Redis, keys: Any, redis_url: str) -> None:
    """Pub/sub knows no databases: whoever follows a stream of database 0 must not be moved by its namesake in 7."""
    with keys.pubsub(ignore_subscribe_messages=True) as heard, Redis(RedisConfig(redis_url[:-1] + "7")) as other:
        heard.psubscribe("*")
        publish(other, Change("s", "3", [entry("w", 0, 3)]))
        publish(shown, Change("s", "2", [entry("w", 0, 2)]))
        channels: list[tuple[str, str]] = []
        while len(channels) < 2:
            message = heard.get_message(timeout=60)
            if message is not None:
                channels.append((message["channel"], message["data"]))
    assert channels == [("tidemark:{s}/7", "POSITION s w 3 3"), ("tidemark:{s}", "POSITION s w 2 2")]


def test_change_is_shown_in_every_key(shown: Redis, keys: Any) -> None:
    """Positions, line, token and the list of advances follow from one call; the fence holds the lease's token."""
    publish(shown, Change("s", "7", [entry("second", 0, 7), entry("first", 0, 9)], [("third", "3")]))
    assert keys.hgetall("tidemark:{s}:positions") == {"first": "9", "second": "7", "third": "3"}
    assert keys.get("tidemark:{s}:linear") == "7"
    assert keys.get("tidemark:{s}:token") == "m7~first.9"
    assert entries(keys)[1] == {
        "kind": "POSITION",
        "writer": "first",
        "epoch": "1",
        "prev": "0",
        "id": "9",
        "facts": "1",
        "empty": "0",
        "unseen": "0",
        "skipped": "0",
        "linear": "7",
        "batch": "3",
        "time": "1790000000000",
    }
    assert keys.hget("tidemark:{s}:fence", "token") == "1"


def test_repeated_call_changes_nothing(shown: Redis, keys: Any) -> None:
    """Rule 2: the same call again writes nothing, adds no entry and tells the channel nothing."""
    change = Change("s", "7", [entry("w", 0, 9)], [("w", "9"), ("v", "1")], [late(5)], ["gone"])
    publish(shown, change)
    before = state(keys)
    with keys.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe("tidemark:{s}")
        assert channel.get_message(timeout=60) is None
        publish(shown, change, "known")
        publish(shown, change, "repair")
        assert channel.get_message(timeout=0.1) is None
    assert state(keys) == before


@settings(max_examples=100, suppress_health_check=SHARING)
@given(
    sign=st.sampled_from((1, -1)),
    ends=st.lists(
        st.one_of(st.integers(1, 30), st.integers(2**53 - 3, 2**53 + 3), st.integers(LARGEST - 9, LARGEST)),
        min_size=1,
        max_size=5,
        unique=True,
    ),
    data=st.data(),
)
def test_no_order_of_calls_moves_anything_back(
    shown: Redis, keys: Any, sign: int, ends: list[int], data: st.DataObject
) -> None:
    """Rules 2 and 3: stale calls in any order leave the farthest position, near 2^53 and 2^63 too, and one chain."""
    keys.flushall()
    chain = [0, *sorted(ends)]
    seen = 0
    for at in data.draw(st.lists(st.integers(1, len(chain) - 1), min_size=1, max_size=8)):
        end = sign * chain[at]
        moves = [entry("w", sign * prev, sign * id_) for prev, id_ in pairwise(chain[: at + 1])]
        publish(shown, Change("s", str(end), moves, [("w", str(end))]), data.draw(st.sampled_from(("new", "repair"))))
        seen = max(seen, chain[at])
        assert keys.hgetall(key("s", "positions")) == {"w": str(sign * seen)}
        assert keys.get(key("s", "linear")) == str(sign * seen)
    listed = entries(keys)
    assert [it["prev"] for it in listed] == ["0", *(it["id"] for it in listed[:-1])]
    assert listed[-1]["id"] == str(sign * seen)


def test_lower_lease_is_refused(shown: Redis, keys: Any) -> None:
    """Rule 6: a call under a lower token than the highest seen writes nothing of that stream."""
    publish(shown, Change("s", "1", [entry("w", 0, 1)]), token=10)
    before = state(keys)
    with pytest.raises(LeaseLost) as caught:
        publish(shown, Change("s", "2", [entry("w", 1, 2)]), token=9)
    assert (caught.value.own, caught.value.newest) == (9, 10)
    assert state(keys) == before


@pytest.mark.parametrize(
    ("move", "told"),
    [
        (entry("w", 2, 9, facts=0), "POSITION s w 2 9"),
        (entry("w", 2, 9), "POSITION s w 9 9"),
        (entry("w", 2, 9, facts=0, unseen=1), "POSITION s w 9 9"),
        (entry("w", 2, 9, facts=0, skipped=1), "POSITION s w 9 9"),
        (entry("w", -2, -9, facts=0), "POSITION s w -2 -9"),
    ],
)
def test_only_empty_advances_let_readers_move_unseen(shown: Redis, keys: Any, move: AdvanceEntry, told: str) -> None:
    """An advance goes out with its own `prev` only where it held nothing to fetch."""
    with keys.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe("tidemark:{s}")
        assert channel.get_message(timeout=60) is None
        publish(shown, Change("s", "0", [move]))
        message = channel.get_message(timeout=60)
    assert message is not None
    assert message["data"] == told


def test_several_advances_make_one_line(shown: Redis, keys: Any) -> None:
    """A writer's advances that come together are told as one move, unseen only if all of them were empty."""
    with keys.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe("tidemark:{s}")
        assert channel.get_message(timeout=60) is None
        publish(shown, Change("s", "0", [entry("a", 0, 2, facts=0), entry("b", 0, 3), entry("a", 2, 5, facts=0)]))
        told = [channel.get_message(timeout=60) for _ in range(2)]
        assert [it and it["data"] for it in told] == ["POSITION s a 0 5", "POSITION s b 3 3"]
        assert channel.get_message(timeout=0.1) is None


def test_token_escapes_names_and_sorts_by_bytes(shown: Redis, keys: Any) -> None:
    """Names with the token's own signs are percent-encoded; the order does not depend on the server's locale."""
    writers = [("b~1", "9"), ("B", "9"), ("é", "9"), ("a%", "9"), ("low", "7"), ("z.5", "9")]
    publish(shown, Change("s", "7", positions=writers))
    assert keys.get(key("s", "token")) == "m7~B.9~a%25.9~b%7E1.9~z.5.9~é.9"


def test_backward_stream_compares_magnitudes(shown: Redis, keys: Any) -> None:
    """Negative IDs go down: -9 is beyond -7, and above the line in the token."""
    publish(shown, Change("s", "-7", [entry("a", 0, -9), entry("b", 0, -7)]))
    publish(shown, Change("s", "-5", positions=[("a", "-8")]))
    assert keys.get(key("s", "token")) == "m-7~a.-9"


def test_line_alone_renews_the_token(shown: Redis, keys: Any) -> None:
    """The token follows the line where no position moved."""
    publish(shown, Change("s", "1", [entry("w", 0, 9)]))
    publish(shown, Change("s", "9"))
    assert keys.get(key("s", "token")) == "m9"


def test_late_completions_are_listed_once(shown: Redis, keys: Any) -> None:
    """Rule 5: a late completion becomes a LATE entry, and only one, by its number."""
    publish(shown, Change("s", "1", late=[late(3), late(4)]))
    publish(shown, Change("s", "1", late=[late(4), late(5)]))
    assert [(it["kind"], it["number"], it["why"]) for it in entries(keys)] == [
        ("LATE", number, "skipped") for number in ("3", "4", "5")
    ]


def test_dropped_writers_leave(shown: Redis, keys: Any) -> None:
    """A writer that left the state leaves the hash and the token."""
    publish(shown, Change("s", "1", positions=[("a", "5"), ("b", "6")]))
    publish(shown, Change("s", "1", dropped_writers=["a"]))
    assert keys.hgetall(key("s", "positions")) == {"b": "6"}
    assert keys.get(key("s", "token")) == "m1~b.6"


def test_with_its_last_writer_a_stream_gives_its_list_back(shown: Redis, keys: Any) -> None:
    """Positions, line and token stay, and the list begins anew when somebody joins again."""
    publish(shown, Change("s", "9", [entry("a", 0, 5), entry("b", 0, 9)]))
    publish(shown, Change("s", "9", dropped_writers=["a"]))
    assert len(entries(keys)) == 2
    publish(shown, Change("s", "9", dropped_writers=["b"]))
    assert state(keys) == ({}, "9", "m9", [])
    publish(shown, Change("s", "9", [entry("c", 9, 12)]), "known")
    assert (len(entries(keys)), keys.get(key("s", "token"))) == (1, "m9~c.12")


@settings(max_examples=100, suppress_health_check=SHARING)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(["a", "a.5", "%7E", "~", "w-."]), st.integers(1, 40)), max_size=3),
            st.integers(1, 40),
            st.lists(st.sampled_from(["a", "a.5", "~"]), max_size=1),
        ),
        max_size=6,
    ),
    st.sampled_from([1, -1]),
)
def test_the_token_tells_every_writer_beyond_the_line(
    shown: Redis, keys: Any, calls: list[tuple[list[tuple[str, int]], int, list[str]]], sign: int
) -> None:
    """Whichever of them a change names, and whatever their names hold: what it tells follows from the hash."""
    keys.flushall()
    for moved, linear, dropped in calls:
        positions = [(writer, str(sign * id)) for writer, id in moved]
        publish(shown, Change("s", str(sign * linear), positions=positions, dropped_writers=dropped))
        token = Token.parse(keys.get(key("s", "token")))
        line = int(keys.get(key("s", "linear")))
        stands = {writer: int(id) for writer, id in keys.hgetall(key("s", "positions")).items()}
        assert token == Token.of(line, stands)


def test_a_call_reads_only_the_writers_that_it_names(shown: Redis, keys: Any) -> None:
    """Rule 8: the reply that the script takes of the hash is of one writer, of the 3 000 that there are."""
    publish(shown, Change("s", "9", positions=[(f"w{number}", "5") for number in range(3000)]))
    keys.config_resetstat()
    publish(shown, Change("s", "9", [entry("w7", 5, 12)]), "known")
    calls = {name: it["calls"] for name, it in keys.info("commandstats").items()}
    assert "cmdstat_hgetall" not in calls
    assert calls["cmdstat_hmget"] == 2  # of the fence, and of the writer in hand
    assert keys.get(key("s", "token")) == "m9~w7.12"


def test_lost_data_is_noticed_before_anything_is_written(shown: Redis, keys: Any) -> None:
    """Rule 3: where Redis does not know what we do, or an advance does not join or is missing, nothing is written."""
    change = Change("s", "9", [entry("w", 5, 9)])
    assert publish(shown, change, "known") == ["s"]
    assert keys.keys() == []
    publish(shown, Change("s", "1", [entry("w", 0, 1)]))
    before = state(keys)
    assert publish(shown, change, "known") == publish(shown, change, "new") == ["s"]
    assert publish(shown, Change("s", "9", positions=[("w", "9")]), "known") == ["s"]
    assert state(keys) == before


def test_list_is_begun_anew(shown: Redis, keys: Any) -> None:
    """Rule 3: where too much is missing, the list starts again from the history, and positions never go back."""
    publish(shown, Change("s", "5", [entry("w", 0, 5)], late=[late(3)]))
    publish(shown, Change("s", "4", [entry("w", 2, 4), entry("w", 4, 9)], late=[late(3)]), "rebuild")
    assert [(it["prev"], it["id"]) for it in entries(keys)] == [("2", "4"), ("4", "9"), ("4", "5")]
    assert keys.hgetall(key("s", "positions")) == {"w": "9"}
    assert keys.get(key("s", "linear")) == "5"


def test_list_is_bounded(redis_url: str, keys: Any) -> None:
    """The list of advances is cut at about the wanted length."""
    with Redis(RedisConfig(redis_url, redis_advances_max=100)) as sink:
        publish(sink, Change("s", "1", [entry("w", n, n + 1) for n in range(1000)]))
    assert 100 <= keys.xlen(key("s", "advances")) <= 300


def test_script_is_taught_again(shown: Redis, keys: Any) -> None:
    """A server that forgot the script (a restart) does not need to be asked whether it has it."""
    publish(shown, Change("s", "1"))
    keys.script_flush()
    assert shown.publish(1, [("new", Change("a", "2")), ("new", Change("b", "3"))]) == []
    assert keys.get(key("b", "linear")) == "3"


@pytest.mark.parametrize("name", ["positions", "linear", "advances", "fence", "allocated"])
@pytest.mark.parametrize(
    "further",
    [
        Change("s", "9", [entry("w", 5, 9)], allocated="9"),
        Change("s", "9", [entry("w", 0, 5)], [("v", "9")], [late(3)], allocated="9"),
        Change("s", "9", positions=[("w", "9")], allocated="9"),
        Change("s", "9", dropped_writers=["w"]),
        Change("s", "9"),
    ],
)
@pytest.mark.parametrize("token", [1, 2])
def test_what_somebody_else_put_there_fails_the_whole_call(
    shown: Redis, keys: Any, name: str, further: Change, token: int
) -> None:
    """A key that holds something else is found before anything is written, whatever is written first."""
    publish(shown, Change("s", "5", [entry("w", 0, 5)], allocated="5"))
    keys.delete(key("s", name))
    keys.sadd(key("s", name), "x")
    held = state_of_all(keys)
    modes: tuple[Mode, ...] = ("new", "repair", "rebuild")
    for mode in modes:
        assert shown.publish(token, [(mode, further)]) == []
        assert [*shown.faults] == ["s"]
        assert state_of_all(keys) == held


def test_a_token_that_is_none_is_written_again(shown: Redis, keys: Any) -> None:
    """It follows from the other keys, whatever somebody else has put there."""
    publish(shown, Change("s", "5", [entry("w", 0, 9)]))
    keys.delete(key("s", "token"))
    keys.sadd(key("s", "token"), "x")
    assert publish(shown, Change("s", "6", [entry("w", 9, 12)]), "known") == []
    assert keys.get(key("s", "token")) == "m6~w.12"


def test_the_fault_of_one_stream_is_not_that_of_others_in_its_call(shown: Redis, keys: Any) -> None:
    """Many streams travel in one call: those before and behind the one that cannot be written are shown, each once."""
    keys.set(key("s1", "advances"), "no list")
    calls: list[tuple[Mode, Change]] = [
        ("new", Change(f"s{number}", "7", [entry("w", 0, 9)], [("w", "9")], allocated="9")) for number in range(5)
    ]
    with keys.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe("tidemark:{s0}")
        assert channel.get_message(timeout=60) is None
        assert shown.publish(1, calls) == []
        assert channel.get_message(timeout=60)["data"] == "POSITION s0 w 9 9"
        assert channel.get_message(timeout=0.1) is None
    assert sorted(shown.faults) == ["s1"]
    for stream in ("s0", "s2", "s4"):
        assert keys.get(key(stream, "token")) == "m7~w.9"
        assert len(entries(keys, stream)) == 1
    keys.delete(key("s1", "advances"))
    assert shown.publish(1, calls) == []
    assert shown.faults == {}


def test_streams_of_one_call_that_are_lost_or_fenced_are_told_apart(shown: Redis, keys: Any) -> None:
    """Each of the streams has its own answer: what is known here and gone is reported, what is there is written."""
    publish(shown, Change("there", "1", [entry("w", 0, 1)]))
    further = Change("there", "2", [entry("w", 1, 2)])
    assert shown.publish(1, [("known", Change("gone", "2", [entry("w", 1, 2)])), ("known", further)]) == ["gone"]
    assert keys.get(key("there", "linear")) == "2"
    publish(shown, Change("fenced", "1"), token=9)
    with pytest.raises(LeaseLost):
        shown.publish(2, [("known", Change("there", "3")), ("known", Change("fenced", "3"))])
    assert (keys.get(key("there", "linear")), keys.get(key("fenced", "linear"))) == ("3", "1")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), max_size=30))
def test_calls_hold_streams_of_one_slot_and_a_bounded_number_of_moves(streams: list[tuple[int, int]]) -> None:
    """Each change is in one call, and those of a slot keep their order; one that is larger is alone."""
    slots = {f"s{number}": slot for number, (slot, _) in enumerate(streams)}
    chunk: list[tuple[Mode, Change]] = [
        ("new", Change(f"s{number}", "7", [entry("w", 0, 1)] * moves)) for number, (_, moves) in enumerate(streams)
    ]
    sized = [(change.stream, _count_moves(change), (mode, change)) for mode, change in chunk]
    calls = group_by_slot(sized, slots.__getitem__, MOVES_PER_CALL)
    places = [{slots[change.stream] for _, change in call} for call in calls]
    assert all(len(place) == 1 for place in places)
    assert sorted(change.stream for call in calls for _, change in call) == sorted(it.stream for _, it in chunk)
    for call in calls:
        assert len(call) == 1 or sum(1 + len(change.entries) for _, change in call) <= MOVES_PER_CALL
    assert [it for call in group_by_slot(sized, lambda _: 0, MOVES_PER_CALL) for it in call] == chunk


def test_wrong_password_is_a_refusal(redis_url: str) -> None:
    """A password that Redis does not know stops us, with what to do."""
    url = redis_url.replace("redis://", "redis://nobody:wrong@")
    with Redis(RedisConfig(url)) as sink:
        for ask in (sink.check, lambda: publish(sink, Change("s", "1"))):
            with pytest.raises(Refused, match="TIDEMARK_REDIS_URL"):
                ask()


def test_missing_right_is_a_refusal(redis_url: str, keys: Any) -> None:
    """A user who may not write our keys stops us, also where the script is what was refused."""
    keys.execute_command("ACL", "SETUSER", "poor", "on", ">pw", "~*", "&*", "+@all", "-hset")
    try:
        config = RedisConfig(redis_url.replace("redis://", "redis://poor:pw@"))
        with Redis(config) as sink, pytest.raises(Refused, match="all rights"):
            publish(sink, Change("s", "1", positions=[("w", "1")]))
    finally:
        keys.execute_command("ACL", "DELUSER", "poor")


def test_server_out_of_memory_is_waited_for(shown: Redis, keys: Any) -> None:
    """What an operator mends without us (memory, a replica's promotion) is no refusal."""
    keys.config_set("maxmemory", "1")
    try:
        with pytest.raises(Unavailable, match="maxmemory"):
            publish(shown, Change("s", "1", positions=[("w", "1")]))
    finally:
        keys.config_set("maxmemory", "0")
    keys.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(Unavailable):
            publish(shown, Change("s", "1", positions=[("w", "1")]))
    finally:
        keys.execute_command("REPLICAOF", "NO", "ONE")


def test_server_that_is_away_is_waited_for(shown: Redis, redis_server: RedisServer) -> None:
    """A Redis that was killed is unavailable, and serves the same client again once it is back."""
    publish(shown, Change("s", "1"))
    redis_server.kill()
    try:
        with pytest.raises(Unavailable):
            publish(shown, Change("s", "2"))
    finally:
        redis_server.start()
    assert publish(shown, Change("s", "2")) == []


def test_address_that_cannot_be_read_is_not_quoted() -> None:
    """A malformed URL is named without its password."""
    with pytest.raises(BadSetting) as caught:
        Redis(RedisConfig("http://:secret@host"))
    assert "secret" not in str(caught.value)


def test_ten_thousand_streams_in_one_batch(shown: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    """10 000 streams with 80 000 advances; the time is printed."""
    calls: list[tuple[Mode, Change]] = [
        ("new", Change(f"s{s}", "1", [entry(f"writer-{w}", 0, 9) for w in range(8)])) for s in range(10_000)
    ]
    began = time.monotonic()
    shown.publish(1, calls)
    with capsys.disabled():
        print(f" [10 000 streams, 80 000 advances: {time.monotonic() - began:.2f} s] ", end="")  # noqa: T201
