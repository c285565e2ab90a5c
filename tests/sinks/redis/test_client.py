"""Every way in which Redis is deployed holds the same contract, for the pipeline, the sidecar and both readers."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fix_redis import Node, SentinelSetup
from tests.fix_tls import Authority, tls_front
from tests.sinks.redis.test_publish import entry
from tests.waiting import eventually
from tidemark.app.commands import load_settings
from tidemark.app.read_side.redis_reader import Notifications, RedisReader, wait_for_notification
from tidemark.app.stack.processes import RedisServer
from tidemark.common.errors import BadSetting, Refused, Unavailable
from tidemark.sinks.reader import AsyncPositions, Positions, PositionSnapshot
from tidemark.sinks.reader.requests import ReadNewest
from tidemark.sinks.redis.client import RedisAddress, channel, key
from tidemark.sinks.redis.publish import Change, Redis, RedisConfig

# In a Cluster of three, some on each; the last ones are names that could break a hash tag.
STREAMS = [*(f"stream{number}" for number in range(12)), "}x", "{}", "a}:linear", "{<", "100%"]


@pytest.fixture
def secured(redis_url: str, redis_server: RedisServer, authority: Authority) -> Iterator[RedisAddress]:
    """TLS, and a user whose password is not in the address."""
    with tls_front(redis_server.port, authority) as port, Redis(RedisConfig(redis_url)) as admin:
        with admin._session.use() as client:
            client.execute_command(
                "ACL", "SETUSER", "tide", "on", ">pw", "~tidemark:*", "resetchannels", "&tidemark:{*}", "+@all"
            )
        yield RedisAddress(f"rediss://tide@127.0.0.1:{port}/0", lambda: "pw", ca_file=str(authority.ca_file))
        with admin._session.use() as client:
            client.execute_command("ACL", "DELUSER", "tide")


@pytest.fixture
def clustered(redis_cluster: list[Node]) -> RedisAddress:
    for node in redis_cluster:
        node.cli("flushall")
        node.cli("script", "flush")
    # The second is enough to find the others; the first is away.
    return RedisAddress(f"redis+cluster://127.0.0.1:1,127.0.0.1:{redis_cluster[1].port}")


@pytest.fixture
def behind_sentinel(watched: SentinelSetup) -> RedisAddress:
    return RedisAddress(f"redis+sentinel://127.0.0.1:{watched.sentinel.port}/main/0")


@pytest.fixture(
    params=[pytest.param(form, marks=pytest.mark.redis) for form in ("secured", "clustered", "behind_sentinel")]
)
def address(request: pytest.FixtureRequest) -> RedisAddress:
    found: RedisAddress = request.getfixturevalue(request.param)
    return found


def moved(stream: str, number: int = 9) -> Change:
    return Change(stream, "7", [entry("w", 0, number)], [("w", str(number))], allocated=str(number))


def publish(sink: Redis, number: int = 9) -> list[str]:
    """One batch, in which each stream moves."""
    return sink.publish(1, [("new", moved(stream, number)) for stream in STREAMS])


def test_what_is_published_is_read_by_all(address: RedisAddress) -> None:
    """One batch of many streams, twice; then each stream's line, vector and names, by every reader that we have."""
    with Redis(RedisConfig(address)) as sink:
        for _ in range(2):
            assert publish(sink) == []
        sink.add_names(STREAMS)
        assert sink.replace_sentinel("one") is None
        assert sink.replace_sentinel("two") == "one"
        assert {stream: held.linear for stream, held in sink.snapshots(STREAMS).items()} == dict.fromkeys(STREAMS, 7)
    with Positions(address) as positions:
        assert positions.get("stream3") == PositionSnapshot("stream3", 7, {"w": 9}, 9)
        assert positions.wait("stream4", 7, timeout=60).linear == 7
        assert positions.get("}x") == PositionSnapshot("}x", 7, {"w": 9}, 9)

    async def ask() -> None:
        async with AsyncPositions(address) as positions:
            assert await positions.get("stream5") == PositionSnapshot("stream5", 7, {"w": 9}, 9)
        live = RedisReader(address)
        assert await live.names() == set(STREAMS)
        assert {name: seen.linear for name, seen in (await live.keys(STREAMS)).items()} == dict.fromkeys(STREAMS, 7)
        await live.aclose()

    asyncio.run(ask())


@pytest.mark.redis
def test_a_reader_of_a_cluster_needs_few_rights(clustered: RedisAddress, redis_cluster: list[Node]) -> None:
    """Those of docs/how-to/read-facts.md."""
    with Redis(RedisConfig(clustered)) as sink:
        publish(sink)
    rights = "+@read +multi +exec +eval +command +cluster|slots +cluster|shards +readonly"
    for node in redis_cluster:
        node.cli("acl", "setuser", "reader", "on", ">pw", "~tidemark:*", *rights.split())
    try:
        address = RedisAddress(clustered.url.replace("://", "://reader:pw@"))
        with Positions(address) as positions:
            assert positions.wait("stream3", 7, timeout=60).linear == 7

        async def ask() -> None:
            async with AsyncPositions(address) as positions:
                assert (await positions.wait("stream4", 7, timeout=60)).linear == 7
                assert await anext(positions.follow("stream5", since="m0"))

        asyncio.run(ask())
    finally:
        for node in redis_cluster:
            node.cli("acl", "deluser", "reader")


@pytest.mark.redis
@pytest.mark.parametrize("first", ["positions", "linear", "allocated"])
def test_a_slot_that_moves_is_waited_for(clustered: RedisAddress, redis_cluster: list[Node], first: str) -> None:
    """Rule 2: while a stream's keys are on two nodes neither reads or writes some of them alone, whichever key went
    first: that would leave a key on both, of which the older may be the one that is kept."""
    names = [first, *{"positions", "linear", "token", "advances", "fence", "allocated"} - {first}]
    line = key("stream3", "linear")
    with Redis(RedisConfig(clustered)) as sink:
        publish(sink)
        here = next(node for node in redis_cluster if node.cli("get", line).strip() == "7")
        there = next(node for node in redis_cluster if node is not here)
        slot, ours, theirs = (
            node.cli("cluster", *words).strip()
            for node, *words in ((here, "keyslot", line), (here, "myid"), (there, "myid"))
        )

        def move(name: str) -> str:
            return here.cli("migrate", "127.0.0.1", str(there.port), key("stream3", name), "0", "5000").strip()

        there.cli("cluster", "setslot", slot, "importing", ours)
        here.cli("cluster", "setslot", slot, "migrating", theirs)
        assert publish(sink, 12) == []
        assert move(first) == "OK"
        with pytest.raises(Unavailable):
            publish(sink, 15)
        with pytest.raises(Unavailable):
            sink.snapshots(["stream3"])
        assert [move(name) for name in names[1:]] == ["OK"] * 5
        assert publish(sink, 18) == []
        for node in redis_cluster:
            node.cli("cluster", "setslot", slot, "node", theirs)
        assert publish(sink, 21) == []
        assert sink.snapshots(["stream3"])["stream3"].positions == {"w": 21}
        assert sink.faults == {}
    assert there.cli("get", key("stream3", "token")).strip() == "m7~w.21"


def test_a_stream_whose_keys_hold_something_else_hides_no_other(address: RedisAddress) -> None:
    """The pipeline shows the others, the sidecar reads them, neither takes Redis for away; who asks for that stream is
    told what is wrong with it."""
    with Redis(RedisConfig(address)) as sink:
        publish(sink)
        with sink._session.use() as client:
            client.delete(key("}x", "positions"))
            client.set(key("}x", "positions"), "not ours")
        assert publish(sink, 12) == []
        assert sink.faults.keys() == {"}x"}
        assert sink.snapshots(STREAMS).keys() == set(STREAMS) - {"}x"}

    async def ask() -> None:
        live = RedisReader(address)
        await live.ping()  # a Cluster's client finds its nodes in one call, not in many at a time
        assert (await live.keys(STREAMS)).keys() == set(STREAMS) - {"}x"}
        assert (await live.read(ReadNewest("stream3"))).positions == {"w": 12}
        with pytest.raises(Refused, match="stream }x: "):
            await live.read(ReadNewest("}x"))
        assert live.circuit_breaker.problem is None
        await live.aclose()

    asyncio.run(ask())
    with Positions(address) as positions, pytest.raises(Refused):
        positions.get("}x")


def test_bytes_that_are_no_text_hide_no_other_stream(redis_url: str, keys: Any) -> None:
    """In a key, among the names, at the sentinel and on a channel, whoever reads: the sidecar asks for many streams at
    once."""

    with Redis(RedisConfig(redis_url)) as sink:
        publish(sink)
        sink.add_names(STREAMS)
        keys.set(key("}x", "linear"), b"\xff")
        keys.sadd("tidemark:streams", b"\xfe")
        keys.set("tidemark:sentinel", b"\xff")
        assert sink.replace_sentinel("one") not in (None, "one")
        assert sink.names() > set(STREAMS)

    async def ask() -> None:
        live = RedisReader(RedisAddress(redis_url))
        assert await live.names() > set(STREAMS)
        assert (await live.keys(STREAMS)).keys() == set(STREAMS) - {"}x"}
        with pytest.raises(Refused, match="stream }x: "):
            await live.read(ReadNewest("}x"))
        notifications = Notifications(live)
        async with notifications.listening():
            notified = notifications.next_event("stream4")
            while not notified.is_set():
                keys.publish(channel("stream3"), b"\xff")
                keys.publish(channel("stream4"), "a hint")
                await wait_for_notification(notified, 0.05)
        await live.aclose()

    asyncio.run(asyncio.wait_for(ask(), 60))
    with Positions(redis_url) as positions:
        assert positions.get("stream3") == PositionSnapshot("stream3", 7, {"w": 9}, 9)
        with pytest.raises(Refused):
            positions.get("}x")


def test_a_hint_reaches_whoever_listens_at_any_node(address: RedisAddress) -> None:
    """The sidecar's one subscription hears of every stream, wherever its keys lie."""

    async def listen() -> set[str]:
        live = RedisReader(address)
        notifications = Notifications(live)
        waiting = {stream: notifications.next_event(stream) for stream in STREAMS}
        async with notifications.listening():
            with Redis(RedisConfig(address)) as sink:
                for number in range(1, 100):
                    await asyncio.to_thread(publish, sink, number)
                    await asyncio.gather(*(wait_for_notification(notified, 0.05) for notified in waiting.values()))
                    heard = {stream for stream, notified in waiting.items() if notified.is_set()}
                    if heard == set(STREAMS):
                        break
        await live.aclose()
        return heard

    assert asyncio.run(listen()) == set(STREAMS)
    gc.collect()  # a connection that the end of the loop left open is told now, and fails this test


def test_a_new_primary_is_found(watched: SentinelSetup, behind_sentinel: RedisAddress) -> None:
    """Rule 2: after a failover the same client publishes to the promoted replica, and goes on from what that has."""
    with Redis(RedisConfig(behind_sentinel, timeout=1.0)) as sink, Positions(behind_sentinel) as positions:
        sink.publish(1, [("new", moved("s"))])
        eventually(lambda: watched.replica.cli("get", "tidemark:{s}:linear").strip() == "7")
        watched.primary.kill()

        def published() -> bool:
            try:
                return sink.publish(1, [("known", Change("s", "10", [entry("w", 9, 12)], [("w", "12")]))]) == []
            except Unavailable:
                return False

        eventually(published, what=lambda: "a new primary")
        assert positions.get("s") == PositionSnapshot("s", 10, {"w": 12}, 9)


def test_a_password_that_rotates_is_taken_up_at_the_next_connection(redis_url: str, tmp_path: Path) -> None:
    """Who holds a connection keeps it; the next one is opened with the password as it is then."""
    secret = tmp_path / "password"
    address = RedisAddress(redis_url.replace("redis://", "redis://turning@"), secret.read_text)
    with Redis(RedisConfig(redis_url)) as admin, admin._session.use() as client:
        secret.write_text("one")
        client.execute_command("ACL", "SETUSER", "turning", "on", ">one", "~*", "&*", "+@all")
        with Redis(RedisConfig(address)) as sink:
            sink.check()
            client.execute_command("ACL", "SETUSER", "turning", "<one", ">two")
            sink.check()
            client.execute_command("CLIENT", "KILL", "USER", "turning")
            with pytest.raises((Refused, Unavailable)):
                sink.check()
            secret.write_text("two")
            sink.check()
        client.execute_command("ACL", "DELUSER", "turning")


def test_an_authority_that_we_do_not_know_needs_a_person(
    redis_server: RedisServer, authority: Authority, stranger: Authority
) -> None:
    """A certificate that cannot be verified is a refusal with what to check."""
    with tls_front(redis_server.port, authority) as port:
        address = RedisAddress(f"rediss://127.0.0.1:{port}/0", ca_file=str(stranger.ca_file))
        with Redis(RedisConfig(address)) as sink, pytest.raises(Refused, match="TIDEMARK_REDIS_CA_FILE"):
            sink.check()


def test_a_cluster_that_is_away_is_waited_for_and_one_that_refuses_us_is_not(redis_cluster: list[Node]) -> None:
    """Its client says the same of both; the cause behind tells them apart."""
    with Redis(RedisConfig(RedisAddress("redis+cluster://127.0.0.1:1"))) as sink, pytest.raises(Unavailable):
        sink.check()
    address = RedisAddress(f"redis+cluster://nobody:wrong@127.0.0.1:{redis_cluster[0].port}")
    with Redis(RedisConfig(address)) as sink, pytest.raises(Refused, match="TIDEMARK_REDIS_PASSWORD"):
        sink.check()


def test_a_server_that_is_no_cluster_is_not_waited_for(redis_url: str) -> None:
    """It would stay what it is: the address is wrong."""
    address = RedisAddress(redis_url.replace("redis://", "redis+cluster://").removesuffix("/0"))
    with Redis(RedisConfig(address)) as sink, pytest.raises(Refused, match="is a Cluster"):
        sink.check()


def test_a_server_is_also_reached_by_its_socket(tmp_path: Path) -> None:
    """The path is that of the socket, with a login or without."""
    for login in ("", "user:pw@"):
        client = RedisAddress(f"unix://{login}{tmp_path}/redis.sock?db=2").client(1.0)
        assert client.connection_pool.connection_kwargs["path"] == f"{tmp_path}/redis.sock"
        assert client.connection_pool.connection_kwargs["db"] == 2


@pytest.mark.parametrize(
    "url", ["redis+sentinel://:secret@host", "redis+sentinel://:secret@host/main/x", "redis+cluster://:secret@ho:st:1"]
)
def test_a_form_that_cannot_be_read_is_not_quoted(url: str) -> None:
    """What is wrong is said without the password."""
    with (
        pytest.raises(BadSetting, match="not a Redis address") as caught,
        Redis(RedisConfig(RedisAddress(url))) as sink,
    ):
        sink.check()
    assert "secret" not in str(caught.value)
    assert caught.value.name == "redis"


def test_a_form_that_cannot_be_read_is_said_with_the_name_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program passes the argument `redis`; a service reads a setting."""
    url = "redis+sentinel://:secret@host"
    with pytest.raises(BadSetting, match=r"^redis: the value is not a Redis address"):
        Positions(url).get("s")
    monkeypatch.setenv("TIDEMARK_REDIS_URL", url)
    with pytest.raises(BadSetting, match=r"^TIDEMARK_REDIS_URL: the value is not a Redis address"):
        load_settings().redis.client(1.0)
