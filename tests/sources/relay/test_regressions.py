"""Rows and sequences that are not of one time: each fact is published, or late, or its stream is held and named."""

from collections.abc import Iterator, Mapping

import psycopg
import pytest

from tests.sources.relay.disorder import FIT, DisorderedWorld
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay import sequences
from tidemark.sources.relay.sequences import MisplacedRows


class SlowQuery:
    """A clock that only tests move, and by which each query for stray rows takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.began = 0.0
        self.is_automatic = False
        """Whether each reading of the clock moves the clock by a second."""
        self._query = sequences.read_misplaced_rows
        monkeypatch.setattr(sequences, "QUICK_QUERY_SECONDS", 0.0)
        monkeypatch.setattr(sequences, "time", self)
        monkeypatch.setattr(sequences, "read_misplaced_rows", self._run)

    def monotonic(self) -> float:
        self.now += self.is_automatic
        return self.now

    def _run(self, connection: Connection) -> Mapping[int, MisplacedRows]:
        self.began = self.now
        self.now += 1.0
        return self._query(connection)


@pytest.fixture(params=["forward", "backward", "forward, slow query"])
def world(ready: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DisorderedWorld]:
    """With a slow query, stray rows are looked for in one of about twenty rounds."""
    direction, _, query = request.param.partition(", ")
    found = DisorderedWorld(ready, direction=direction)
    if query:
        SlowQuery(monkeypatch).is_automatic = True
        found.rest = 2 * 20
    else:
        monkeypatch.setattr(sequences, "QUICK_QUERY_SECONDS", float("inf"))  # however busy the machine is
    yield found
    found.close()


def published(world: DisorderedWorld, count: int, writer: str = "") -> None:
    """So many facts are appended, published and deleted."""
    for _ in range(count):
        world.services[0].append(world.stream, 1, writer)
    world.relays[0].finish()


def observed(world: DisorderedWorld) -> None:
    """The relay goes on until a few looks in a row find nothing. Other databases have transactions too."""
    relay, idle = world.relays[0], 0
    for _ in range(100 * world.rest):
        relay.round()
        idle = idle + 1 if not relay.unacknowledged and (relay.refused or relay.rests) else 0
        while relay.unacknowledged:
            relay.acknowledge(first=True)
        relay.settle()
        if idle > world.rest:
            return
    raise AssertionError("an ID stays undecided for ever")


def test_a_fact_below_the_floor_is_late(world: DisorderedWorld) -> None:
    """Under a connection that goes on, by a writer that nobody knows, and at the ID of a void."""
    published(world, 5)
    world.services[1].begin("read committed", "on")
    world.services[1].append(world.stream, 1)
    world.services[1].run("rollback")
    world.services[1].end()
    published(world, 3)
    for back in (4, 0, 3):
        world.replicate(back)
        observed(world)
        assert world.tokens == world.core.published | world.core.named
    assert len(world.core.named) >= 3
    world.finish()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_slow_query_takes_a_twentieth_of_the_time_and_misses_nothing(
    ready: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a query that took a second, the next one begins 20 s after its beginning. Until then a fact below the floor
    waits in the outbox, and the facts beyond are published."""
    world = DisorderedWorld(ready, direction=direction)
    query = SlowQuery(monkeypatch)
    published(world, 5)
    for back in (4, 0):
        began, before = query.began, world.tokens
        world.replicate(back)
        (stray,) = world.tokens - before
        for second in range(1, 20):
            query.now = began + second
            published(world, 1)
            assert (query.began, world.tokens - world.core.published - world.core.named) == (began, {stray})
        query.now = began + 20
        observed(world)
        assert query.began >= began + 20
        assert stray in world.core.named
        assert world.tokens == world.core.published | world.core.named
    world.finish()
    world.close()


def test_a_fact_below_the_floor_of_a_stream_of_several_writers(world: DisorderedWorld) -> None:
    for writer in ("web", "", "till", "web", "web"):
        published(world, 1, writer)
    world.replicate(2)
    world.replicate(4)
    observed(world)
    assert world.tokens == world.core.published | world.core.named
    world.finish()


def test_a_restore_in_place_is_a_new_timeline(world: DisorderedWorld) -> None:
    """At the next look, and not when the sequence has passed what was published before."""
    published(world, 10)
    world.save()
    published(world, 20)
    world.restore()
    for _ in range(5):
        world.services[0].append(world.stream, 1)
    observed(world)
    assert len(world.core.named) == 5
    assert world.tokens <= world.core.published | world.core.named
    world.finish()


def test_a_restore_in_place_while_no_relay_runs(world: DisorderedWorld) -> None:
    """Tables and server are the same, and services have gone beyond what was published."""
    published(world, 10)
    world.save()
    published(world, 3)
    world.relays[0].die()
    world.restore()
    for _ in range(6):
        world.services[0].append(world.stream, 1)
    world.finish()
    assert len(world.core.named) == 3


@pytest.mark.parametrize("steps", range(2, 8))
def test_a_restore_in_place_in_the_middle_of_a_round(world: DisorderedWorld, steps: int) -> None:
    """The round notes up to where it publishes, and that is the history before the restore. Then the sequence is set
    beyond that, as a message asks for if a row is beyond the sequence."""
    for _ in range(3):
        published(world, 3, "web")
        world.save()
        published(world, 4, "web")
        relay = world.relays[0]
        world.services[0].append(world.stream, 1, "web")
        for _ in range(steps):
            relay.look()
        world.restore()
        for _ in range(3):
            world.services[0].append(world.stream, 1, "web")
        relay.round()
        world.move(10)
        observed(world)
        assert world.tokens <= world.core.published | world.core.named
    world.finish()


def test_a_restore_in_place_before_the_floor_is_raised(world: DisorderedWorld) -> None:
    """The floor of the backup is the one that the relay knows: the relay deletes no row that it has not sent."""
    published(world, 3, "web")
    world.save()
    relay = world.relays[0]
    for _ in range(3):
        world.services[0].append(world.stream, 1, "web")
    relay.round()
    while relay.unacknowledged:
        relay.acknowledge()
    world.restore()
    for _ in range(2):
        world.services[0].append(world.stream, 1, "web")
    relay.settle()
    observed(world)
    assert world.tokens <= world.core.published | world.core.named
    world.finish()


def test_a_sequence_that_is_set_back_is_a_new_timeline(world: DisorderedWorld) -> None:
    """Also where nothing is appended then, and where it is restarted, which gives out no ID."""
    published(world, 9)
    world.move(-4)
    observed(world)
    published(world, 2)
    assert len(world.core.named) == 2
    world.restart(3)
    observed(world)
    published(world, 2)
    assert len(world.core.named) == 4
    world.finish()


def test_a_common_cut_at_the_id_of_a_row_writes_nothing(world: DisorderedWorld) -> None:
    """The sequence was set back since the last look, and rows wait in the outbox: the relay goes on."""
    published(world, 2, "web")
    relay = world.relays[0]
    for _ in range(3):
        world.services[0].append(world.stream, 1, "web")
    relay.round()
    world.services[0].append(world.stream, 1)
    relay.round()
    world.move(-3)
    before = relay._decider
    assert before is not None
    assert before.chain_count > 1
    relay.cut_chains()
    assert relay._decider is before
    world.finish()


def test_a_blocked_stream_gets_no_common_cut(world: DisorderedWorld) -> None:
    """A common cut takes an ID, and there may be no sequence to take the ID from. Other streams go on."""
    published(world, 2, "web")
    world.services[0].append(world.stream, 1)
    relay = world.relays[0]
    relay.round()
    world.options("cache 20")
    relay.round()
    assert "CACHE 20" in world.held
    relay.cut_chains()
    assert world._admin.execute("select from tidemark.append_outbox where writer = '*'").fetchall() == []
    world.options(FIT)
    world.finish()


def test_a_sequence_that_jumps_back_and_forth_between_two_looks(world: DisorderedWorld) -> None:
    """The facts below the floor are late, those beyond are published."""
    published(world, 9)
    world.move(-9)
    for _ in range(3):
        world.services[0].append(world.stream, 1)
    world.move(20)
    for _ in range(2):
        world.services[0].append(world.stream, 1)
    observed(world)
    assert world.tokens == world.core.published | world.core.named
    world.finish()


def test_a_sequence_that_is_restarted_further_on(world: DisorderedWorld) -> None:
    """Nobody is late: the IDs between were given to nobody."""
    published(world, 3)
    world.restart(30)
    observed(world)
    published(world, 2)
    assert not world.core.named
    assert world.core.line == 31
    world.finish()


def test_a_sequence_behind_its_table_holds_the_stream(world: DisorderedWorld) -> None:
    """As after a switch-over by logical replication. Until it is set as the message says; then facts that were appended
    before are late."""
    published(world, 6)
    for _ in range(2):
        world.services[0].append(world.stream, 1)
    world.restart(1)
    world.services[0].append(world.stream, 1)
    observed(world)
    id = 8 * world._sign
    problem = f"it has not given out the ID of a row in tidemark.append_outbox; the highest ID in use is {id}"
    assert f"{world.sequence} of stream {world.stream}: {problem}" in world.held
    assert f"run: SELECT setval('{world.sequence}', {id})" in world.held
    world._admin.execute(f"SELECT setval('{world.sequence}', {id})".encode())
    observed(world)
    assert world.tokens == world.core.published | world.core.named
    assert len(world.core.named) >= 1
    world.finish()


@pytest.mark.parametrize("options", ["cache 20", "cycle", "increment by 2", "increment by -2", "cache 5 cycle"])
def test_an_unfit_sequence_holds_its_stream(world: DisorderedWorld, options: str) -> None:
    """It is named, with the command that mends it; two connections append in turns, and nothing is void."""
    published(world, 3)
    if options.startswith("increment"):
        options = f"increment by {int(options.rsplit(maxsplit=1)[-1]) * world._sign}"
    world.options(options)
    observed(world)
    assert f"sequence {world.sequence} of stream {world.stream}: it has {options.upper()[:5]}" in world.held
    assert f"run: ALTER SEQUENCE {world.sequence} INCREMENT BY {world._sign} CACHE 1 NO CYCLE" in world.held
    for _ in range(3):
        for service in world.services[:2]:
            service.append(world.stream, 1)
        observed(world)
    assert len(world.core.published) == 3
    assert not world.core.voids
    world.options(FIT)
    observed(world)
    assert world.held == "None"
    assert world.tokens == world.core.published | world.core.named
    world.finish()


def test_a_cache_that_is_set_while_a_round_looks(world: DisorderedWorld) -> None:
    """Between the look at the head and any other: a session keeps IDs that no transaction holds."""
    published(world, 1)
    relay = world.relays[0]
    for steps in range(1, 7):
        for _ in range(steps):
            relay.look()
        world.options("cache 20")
        for service in world.services[:2]:
            service.append(world.stream, 1)
        observed(world)
        for service in world.services[:2]:
            service.append(world.stream, 1)
        observed(world)
        world.options(FIT)
        observed(world)
        assert world.tokens == world.core.published | world.core.named
        assert not world.core.named
    world.finish()


def test_a_sequence_that_the_relay_may_not_read_holds_its_stream(world: DisorderedWorld) -> None:
    published(world, 2)
    world._admin.execute(f"revoke select on sequence {world.sequence} from tidemark_relay".encode())
    world.services[0].append(world.stream, 1)
    observed(world)
    assert f"run: GRANT SELECT ON SEQUENCE {world.sequence} TO tidemark_relay" in world.held
    world._admin.execute(f"grant select on sequence {world.sequence} to tidemark_relay".encode())
    observed(world)
    assert len(world.core.published) == 3
    world.finish()


def test_rows_that_are_hidden_are_not_missing(world: DisorderedWorld) -> None:
    """With row level security on every table the relay says nothing; without it all is published, and nothing void."""
    published(world, 2)
    world.secure(on=True)
    for _ in range(3):
        world.services[0].append(world.stream, 1)
    observed(world)
    assert len(world.core.published) == 2
    assert not world.core.voids
    world.secure(on=False)
    observed(world)
    assert len(world.core.published) == 5
    world.finish()


def test_a_row_that_came_after_its_void_is_not_deleted(world: DisorderedWorld) -> None:
    """Above the floor, at an ID that was declared void: the floor passes it, and it is late."""
    published(world, 1)
    world.hole()
    observed(world)
    assert world.core.voids
    assert world.tokens == world.core.published | world.core.named
    world.finish()


def test_a_sequence_that_is_gone_holds_its_stream(ready: str) -> None:
    world = DisorderedWorld(ready)
    published(world, 2)
    with psycopg.connect(ready, autocommit=True) as admin:
        admin.execute(f"drop sequence {world.sequence}".encode())
    observed(world)
    assert "it does not exist" in world.held
    world.close()
