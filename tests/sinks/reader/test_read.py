"""The loop that reads a table along with its stream, in both forms, on real servers: every fact once in effect."""

from itertools import islice
from typing import Any

import psycopg
import pytest

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService, effect
from tests.waiting import eventually
from tidemark.app.stack.processes import RedisServer
from tidemark.common.errors import BadSetting, LateNeedsWriter, LateUnknown, ReaderModeChanged, Refused
from tidemark.sinks.reader import Place, Positions, Reader, Table, Token
from tidemark.sinks.redis.client import key
from tidemark.streaming.core.effects import LateCompletion as LateEffect


@pytest.fixture(params=["threads", "asyncio"])
def either(request: pytest.FixtureRequest, service: ReadingService) -> ReadingService:
    service.form = request.param
    return service


@pytest.mark.parametrize("sign", [1, -1])
def test_line_is_read_in_order(either: ReadingService, pipeline: Pipeline, sign: int) -> None:
    """Linear mode: the rows of all writers in the order of their IDs, none beyond the line, each once."""
    either.write(*(sign * id for id in (1, 3, 4)), instance="a")
    either.write(*(sign * id for id in (2, 6)), instance="b")
    both = (advance("a", 0, sign * 4), advance("b", 0, sign * 6))
    pipeline.publish(stream("s", *both, linear=sign * 4))
    either.until(lambda: either.place().linear == sign * 4)
    assert either.ids() == [sign * id for id in (1, 2, 3, 4)]
    pipeline.publish(stream("s", advance("a", sign * 4, sign * 6, empty=2), linear=sign * 6))
    either.until(lambda: either.place().linear == sign * 6)
    assert either.ids() == [sign * id for id in (1, 2, 3, 4, 6)]


@pytest.mark.parametrize("sign", [1, -1])
def test_vector_is_read_per_writer(either: ReadingService, pipeline: Pipeline, sign: int) -> None:
    """Vector mode: one writer is not held back by another, and no row of a writer is read before its time."""
    either.write(*(sign * id for id in (1, 4)), instance="a")
    either.write(*(sign * id for id in (2, 3, 5)), instance="b")
    pipeline.publish(stream("s", advance("a", 0, sign * 4), advance("b", 0, sign * 2), linear=sign * 2))
    goal = {"a": sign * 4, "b": sign * 2}
    either.until(lambda: either.place().positions == goal, mode="vector")
    assert either.ids() == [sign * id for id in (1, 2, 4)]
    pipeline.publish(stream("s", advance("b", sign * 2, sign * 5), linear=sign * 4))
    either.until(lambda: either.place().positions == goal | {"b": sign * 5}, mode="vector")
    assert either.ids() == [sign * id for id in (1, 2, 4, 3, 5)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("informed", [True, False])
@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_table_that_is_older_than_its_stream_is_read_whole(
    either: ReadingService, pipeline: Pipeline, mode: str, informed: bool, sign: int
) -> None:
    """Rows without a writer and rows of writers that Tidemark never heard of are read up to the reader's start, once.

    Rows without a writer that come later are read too, when the linear position passes them.
    """
    either.informed = informed
    either.write(*(sign * id for id in range(1, 21)), instance=None)
    for id in range(21, 51):
        either.write(sign * id, instance=f"old{id % 3}")
    either.write(*(sign * id for id in range(51, 58)), instance="a")
    either.write(*(sign * id for id in range(58, 65)), instance="b")
    pipeline.publish(stream("s", advance("a", 0, sign * 64, empty=64), linear=sign * 64))
    pipeline.publish(stream("s", advance("b", sign * 64, sign * 70, empty=6), linear=sign * 64, linear_prev=sign * 64))
    either.until(lambda: len(either.ids()) >= 64, mode=mode, rows=7)
    either.write(sign * 71, instance=None)
    either.write(sign * 72, instance="a")
    pipeline.publish(stream("s", advance("a", sign * 64, sign * 72), linear=sign * 70, linear_prev=sign * 64))
    either.until(lambda: either.place().positions.get("a", either.place().linear) in {sign * 72, sign * 70}, mode=mode)
    pipeline.publish(stream("s", advance("b", sign * 70, sign * 73, empty=3), linear=sign * 72, linear_prev=sign * 70))
    either.until(lambda: either.place().linear == sign * 72, mode=mode)
    chains: dict[str | None, list[int]] = {}
    for id, writer, _, late in either.effects():
        assert not late
        chains.setdefault(writer, []).append(abs(id))
    assert sorted(id for chain in chains.values() for id in chain) == [*range(1, 65), 71, 72]
    assert all(chain == sorted(chain) for chain in chains.values())


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_late_fact_in_a_row_without_a_writer_is_read(either: ReadingService, pipeline: Pipeline, mode: str) -> None:
    """Its ID names it. In a range that holds more such rows than late facts the reader stops and says why."""
    either.write(1, 2, 3)
    pipeline.move("w", 0, 9, facts=3, skipped=6)
    pipeline.publish(stream("s", advance("v", 0, 9, empty=9), linear=9, linear_prev=9))
    either.until(lambda: either.ids() == [1, 2, 3], mode=mode)
    either.write(5, instance=None)
    pipeline.publish(stream("s", linear=9, linear_prev=9, late=[LateEffect("w", 1, 4, 5, 1, "skipped")]))
    either.until(lambda: bool(either.ids(late=True)), mode=mode)
    assert either.ids(late=True) == [5]
    either.write(6, 7, 8, instance=None)
    pipeline.publish(stream("s", linear=9, linear_prev=9, late=[LateEffect("w", 1, 5, 8, 2, "skipped")]))
    with pytest.raises(LateNeedsWriter, match="without a writer"):
        either.until(lambda: len(either.ids(late=True)) > 1, mode=mode)
    assert either.ids(late=True) == [5]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_batches_are_bounded_and_divide_no_fact(service: ReadingService, pipeline: Pipeline, mode: str) -> None:
    """At most so many rows, unless one fact has more; the rows of a fact come together and in their order."""
    service.write(1, 2, 3)
    service.write(4, rows=7)
    service.write(5, 6, rows=2)
    pipeline.move("w", 0, 6)
    service.until(lambda: len(service.effects()) == 14, mode=mode, rows=3)
    assert service.sizes == [3, 7, 2, 2]
    assert [(id, ordinal) for id, _, ordinal, _ in service.effects() if id == 4] == [(4, n) for n in range(7)]


def test_many_writers_are_read_in_several_queries(
    service: ReadingService, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vector mode with more writers than one query takes, and less rows in a batch than writers."""
    monkeypatch.setattr("tidemark.sinks.reader.read_loop.RANGES_PER_QUERY", 3)
    moves = []
    for n in range(10):
        service.write(n + 1, n + 11, instance=f"w{n}")
        moves.append(advance(f"w{n}", 0, n + 11))
    pipeline.publish(stream("s", *moves, linear=11))
    service.until(lambda: len(service.effects()) == 20, mode="vector", rows=2)
    assert sorted(service.ids()) == [*range(1, 21)]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_empty_advances_do_not_touch_the_table(either: ReadingService, pipeline: Pipeline, mode: str) -> None:
    """What is proven empty moves the place: the table may even be gone."""
    pipeline.move("w", 0, 1, empty=1)
    with either.running(mode=mode) as alive:
        eventually(lambda: either.place() != Place())
        either.sql.execute("alter table facts rename to elsewhere")
        pipeline.move("w", 1, 4, empty=3)
        eventually(lambda: either.place().linear == 4 or either.place().positions == {"w": 4} or not alive())
        either.sql.execute("alter table elsewhere rename to facts")


@pytest.mark.parametrize("evidence", ["unseen", "skipped"])
def test_unseen_and_skipped_ranges_are_read(service: ReadingService, pipeline: Pipeline, evidence: str) -> None:
    """Facts that nobody announced are found where they may be."""
    service.write(2)
    pipeline.move("w", 0, 3, **{evidence: 3})
    service.until(lambda: service.place().linear == 3)
    assert service.ids() == [2]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_lost_lists_are_read_again(service: ReadingService, pipeline: Pipeline, keys: Any, mode: str) -> None:
    """Without Postgres's history the table is read for what the list no longer holds, a gone writer's too."""
    service.informed = False
    service.write(1, 4)
    service.write(2, instance="gone")
    pipeline.publish(stream("s", advance("w", 0, 1), advance("gone", 0, 2), linear=2))
    pipeline.publish(stream("s", dropped_writers=["gone"], linear=2, linear_prev=2))
    pipeline.move("w", 1, 4)
    keys.xtrim(key("s", "advances"), maxlen=0, approximate=False)
    service.until(lambda: len(service.ids()) == 3, mode=mode)
    assert sorted(service.ids()) == [1, 2, 4]


def test_reader_may_begin_in_the_middle(service: ReadingService, pipeline: Pipeline) -> None:
    """A new reader begins with what its token does not cover, once; later starts go on from its place."""
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3)
    service.until(lambda: service.place().linear == 3, since=Token(1))
    assert service.ids() == [2, 3]
    service.write(4)
    pipeline.move("w", 3, 4)
    service.until(lambda: service.place().linear == 4, since=Token(1))
    assert service.ids() == [2, 3, 4]


def test_effects_and_place_are_one(service: ReadingService, pipeline: Pipeline) -> None:
    """A loop that is left in the middle gives its batch back, effects and all; the next one begins with it."""
    service.write(*range(1, 7))
    pipeline.move("w", 0, 6)
    arguments = service.arguments(rows=2)
    seen: list[list[int]] = []
    with Positions(service.redis) as positions:
        for _ in range(2):
            with Reader(positions, "s", **arguments) as reader:
                for batch in islice(reader, 2):
                    seen.append([row["stream_id"] for row in batch.rows])
                    for row in batch.rows:
                        batch.connection.execute(*effect(row, batch))
    assert seen == [[1, 2], [3, 4], [3, 4], [5, 6]]
    assert service.ids() == [1, 2, 3, 4]


def test_wrong_effects_are_the_callers(service: ReadingService, pipeline: Pipeline) -> None:
    """A statement that fails raises where it stands; nothing of the batch stays."""
    service.write(1)
    pipeline.move("w", 0, 1)
    with Positions(service.redis) as positions:
        arguments = service.arguments()
        with Reader(positions, "s", **arguments) as reader:
            batch = next(reader)
            batch.connection.execute(*effect(batch.rows[0], batch))
            with pytest.raises(psycopg.errors.UndefinedTable):
                batch.connection.execute("insert into nowhere values (1)")
    assert service.ids() == []
    assert service.place() == Place()


def test_names_are_quoted(service: ReadingService, pipeline: Pipeline) -> None:
    """Tables, columns and writers with every sign that SQL knows are read as what they are."""
    service.sql.execute('create schema "My ""Shop"""')
    service.sql.execute("""create table "My ""Shop""\"."the facts; --" ("the ID" bigint, "who's" text, ordinal int)""")
    service.sql.execute("""insert into "My ""Shop""\"."the facts; --" values (1, 'O''Brien%s{}', 5)""")
    pipeline.move("O'Brien%s{}", 0, 1, unseen=1)
    table = Table('My "Shop".the facts; --', id="the ID", writer="who's", columns=["ordinal"])
    arguments = service.arguments(mode="vector") | {"table": table}
    with Positions(service.redis) as positions, Reader(positions, "s", **arguments) as reader:
        assert next(reader).rows == [{"the ID": 1, "who's": "O'Brien%s{}", "ordinal": 5}]


def test_vector_mode_needs_the_writers_column(service: ReadingService) -> None:
    """Without it nobody can tell whose a row is: the reader refuses to begin."""
    with pytest.raises(BadSetting, match="writer"):
        service.until(lambda: False, table=Table("facts"), mode="vector")


def test_mode_is_for_life(service: ReadingService, pipeline: Pipeline) -> None:
    """A place of one mode says nothing to the other."""
    service.write(1)
    pipeline.move("w", 0, 1)
    service.until(lambda: service.place().linear == 1)
    with pytest.raises(ReaderModeChanged, match="new name"):
        service.until(lambda: False, mode="vector")


def test_mistakes_are_said(either: ReadingService, pipeline: Pipeline) -> None:
    """A table that is not there and a password that is wrong stop the reader, with what to do."""
    pipeline.move("w", 0, 1)
    with pytest.raises(Refused, match="name of the table"):
        either.until(lambda: False, table=Table("nowhere"))
    wrong = either.dsn.replace("postgresql://postgres:", "postgresql://postgres:not")
    with pytest.raises(Refused, match="user, password") as caught:
        either.until(lambda: False, effects=wrong)
    assert "not" not in str(caught.value).split(" at ")[1].split(" refused")[0]


def late(number_of_ids: int = 1, prev: int = 1, id: int = 2, why: str = "skipped", epoch: int = 1) -> LateEffect:
    return LateEffect("w", epoch, prev, id, number_of_ids, why)


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_late_fact_is_handed_over_as_late_once(
    either: ReadingService, pipeline: Pipeline, keys: Any, mode: str
) -> None:
    """What comes after the place has passed it is read then, and marked."""
    either.write(1, 3)
    pipeline.move("w", 0, 3, facts=2, skipped=1)
    either.until(lambda: len(either.ids()) == 2, mode=mode)
    either.write(2)
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[late()]))
    either.until(lambda: either.place().late > 0, mode=mode)
    assert either.ids(late=True) == [2]
    keys.flushall()
    pipeline.mirror.refill()
    pipeline.move("w", 3, 4, empty=1)
    either.until(lambda: 4 in {either.place().linear, either.place().positions.get("w")}, mode=mode)
    assert either.ids(late=True) == [2]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_fact_that_was_only_announced_late_is_not_doubled(
    service: ReadingService, pipeline: Pipeline, mode: str
) -> None:
    """An operator skips a fact that is committed: it is read with its neighbours, and its late news changes nothing."""
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3, facts=2, skipped=1)
    service.until(lambda: len(service.ids()) == 3, mode=mode)
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[late()]))
    service.until(lambda: service.place().late > 0, mode=mode)
    assert service.ids() == [1, 2, 3]
    assert service.ids(late=True) == []
    pipeline.publish(stream("s", advance("w", 3, 4, empty=1, epoch=2), linear=4))
    service.until(lambda: 4 in {service.place().linear, service.place().positions.get("w")}, mode=mode)
    assert service.sql.execute("select count(*) from tidemark_reader.delivered").fetchone() == (0,)


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_late_news_before_the_place_is_there_is_read_in_order(
    service: ReadingService, pipeline: Pipeline, mode: str
) -> None:
    """A reader that comes back after both reads the fact where it stands."""
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3, facts=2, skipped=1)
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[late()]))
    service.until(lambda: len(service.effects()) == 3 and service.place().late > 0, mode=mode)
    assert service.ids() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_fact_of_an_incarnation_that_was_thrown_out_is_handed_over(
    service: ReadingService, pipeline: Pipeline, mode: str
) -> None:
    """It lies beyond every position; a place that comes there later finds it handed over."""
    service.write(1)
    pipeline.move("w", 0, 1)
    service.until(lambda: service.ids() == [1], mode=mode)
    service.write(5)
    pipeline.publish(stream("s", linear=1, linear_prev=1, late=[late(prev=4, id=5, epoch=2)]))
    service.until(lambda: service.place().late > 0, mode=mode)
    assert service.effects() == [(1, "w", 0, False), (5, "w", 0, True)]
    service.write(6)
    pipeline.publish(stream("s", advance("w", 1, 6, unseen=4, facts=1, epoch=3), linear=6))
    service.until(lambda: 6 in service.ids(), mode=mode)
    assert service.effects()[2:] == [(6, "w", 0, False)]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_late_range_that_is_passed_is_read_though_it_seems_empty(
    service: ReadingService, pipeline: Pipeline, mode: str
) -> None:
    """The next incarnation calls the thrown-out fact's ID empty; the reader owes it, also after it was killed."""
    service.write(1, 5)
    pipeline.move("w", 0, 1)
    service.until(lambda: service.ids() == [1], mode=mode)
    pipeline.publish(stream("s", linear=1, linear_prev=1, late=[late(prev=4, id=5, epoch=2)]))
    pipeline.publish(stream("s", advance("w", 1, 6, empty=5, epoch=3), linear=6))
    with Positions(service.redis, service.dsn) as positions:
        for _ in range(2):
            with Reader(positions, "s", **service.arguments(mode=mode)) as reader:
                batch = next(reader)
            assert [row["stream_id"] for row in batch.rows] == [5]
            assert service.place().late > 0
    service.until(lambda: 6 in {service.place().linear, service.place().positions.get("w")}, mode=mode)
    assert service.ids() == [1, 5]
    assert service.sql.execute("select must_read from tidemark_reader.places").fetchone() == ([],)


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_source_that_was_set_back_repeats_its_ids(service: ReadingService, pipeline: Pipeline, mode: str) -> None:
    """A restored database gives IDs out again: their new facts come as late ones, in batches."""
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3)
    service.until(lambda: len(service.ids()) == 3, mode=mode, rows=1)
    service.sql.execute("delete from facts where stream_id > 1")
    service.write(2, 3)
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[late(2, 1, 3, "regressed", 2)]))
    service.until(lambda: service.place().late > 0, mode=mode, rows=1)
    assert service.ids(late=True) == [2, 3]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_ids_whose_facts_a_restore_took_are_withdrawn(
    either: ReadingService, pipeline: Pipeline, mode: str, sign: int
) -> None:
    """Of a late range all IDs but those with rows of other writers; also if nothing but voids came late."""
    either.write(*(sign * id for id in (1, 2, 3, 5, 6)))
    either.write(sign * 4, instance="v")
    both = advance("w", 0, sign * 6), advance("v", 0, sign * 6)
    pipeline.publish(stream("s", *both, linear=sign * 6))
    either.until(lambda: len(either.ids()) == 6, mode=mode, rows=2)
    either.sql.execute("delete from facts where abs(stream_id) in (2, 3, 5, 6)")
    either.write(sign * 3)
    voids = [late(0, sign * 4, sign * 6, "regressed", 2)]
    facts = [late(1, sign * 1, sign * 4, "regressed", 2)]
    pipeline.publish(stream("s", linear=sign * 6, linear_prev=sign * 6, late=facts))
    pipeline.publish(stream("s", linear=sign * 6, linear_prev=sign * 6, late=voids))
    either.until(lambda: len(either.withdrawn) == 2, mode=mode, rows=2)
    assert either.withdrawn == [[tuple(sorted((sign * 2, sign * 3)))], [tuple(sorted((sign * 5, sign * 6)))]]
    assert either.ids(late=True) == [sign * 3]


def test_reader_goes_on_without_redis(either: ReadingService, pipeline: Pipeline, redis_server: RedisServer) -> None:
    """With the address of Tidemark's Postgres it reads what is committed there, and then with Redis again; all once."""
    either.write(1)
    pipeline.move("w", 0, 1)
    with either.running() as alive:
        eventually(lambda: either.ids() == [1] or not alive())
        redis_server.kill()
        try:
            either.write(2)
            pipeline.commit(stream("s", advance("w", 1, 2), linear=2))
            eventually(lambda: either.ids() == [1, 2] or not alive())
        finally:
            redis_server.start()
        pipeline.mirror.refill()
        either.write(3)
        pipeline.move("w", 2, 3)
        eventually(lambda: either.ids() == [1, 2, 3] or not alive())
    assert either.ids() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["linear", "vector"])
def test_pipeline_that_went_back_is_waited_for(
    service: ReadingService, pipeline: Pipeline, keys: Any, mode: str
) -> None:
    """Tidemark's Postgres and Redis were restored: the reader stands ahead, and goes on when they pass its place."""
    service.write(*range(1, 8))
    pipeline.move("w", 0, 5)
    service.until(lambda: len(service.ids()) == 5, mode=mode)
    keys.flushall()
    service.sql.execute(
        "truncate tidemark.streams, tidemark.stream_positions, tidemark.packed_advances, tidemark.writer_numbers"
    )
    pipeline.move("w", 0, 3)
    with service.running(mode=mode) as alive:
        pipeline.move("w", 3, 4)
        pipeline.move("w", 4, 7)
        eventually(lambda: len(service.ids()) == 7 or not alive())
    assert service.ids() == [*range(1, 8)]


def test_late_range_needs_the_writers_column(service: ReadingService, pipeline: Pipeline) -> None:
    """Linear mode without a writer's column: whose rows of the range came late cannot be told, so the reader stops."""
    service.write(1, 3)
    service.write(2, instance="v")
    pipeline.publish(stream("s", advance("w", 0, 3, facts=2, skipped=1), advance("v", 0, 3), linear=3))
    service.given = {"table": Table("facts")}
    service.until(lambda: len(service.ids()) == 3)
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[late(1, 1, 3)]))
    with pytest.raises(LateNeedsWriter, match="writer column"):
        service.until(lambda: False)


def test_late_completions_that_nobody_knows_any_more_stop_the_reader(
    service: ReadingService, pipeline: Pipeline, keys: Any
) -> None:
    """Without Postgres, and after their entries are gone, only a person can say what to do."""
    service.informed = False
    service.write(1, 3)
    pipeline.move("w", 0, 3, facts=2, skipped=1)
    service.until(lambda: len(service.ids()) == 2)
    service.write(2)
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[late()]))
    keys.xtrim(key("s", "advances"), maxlen=0, approximate=False)
    with pytest.raises(LateUnknown, match="dsn"):
        service.until(lambda: False)
    service.informed = True
    service.until(lambda: service.ids(late=True) == [2])


def test_new_reader_finds_late_facts_in_their_place(service: ReadingService, pipeline: Pipeline, keys: Any) -> None:
    """Who has read nothing yet needs no news of what was late, though the list has lost them."""
    service.informed = False
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3, facts=2, skipped=1)
    pipeline.publish(stream("s", linear=3, linear_prev=3, late=[late()]))
    keys.xtrim(key("s", "advances"), maxlen=0, approximate=False)
    service.until(lambda: len(service.ids()) == 3)
    assert service.effects() == [(id, "w", 0, False) for id in (1, 2, 3)]
