"""One place for both: a reader that goes from `tidemark.Reader` to `tidemark_reader.take`, and back."""

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tidemark.sinks.reader_database import PublishedLate, StreamUpdate, install, publish, reader_session
from tidemark.streaming.core.effects import LateCompletion as LateEffect

TAKE = "select low, high, late from tidemark_reader.take('s', 'copier')"


def test_a_reader_goes_on_in_the_other_form(service: ReadingService, pipeline: Pipeline) -> None:
    """Late facts that one form has handed out do not come again in the other."""
    service.write(*range(1, 10))
    pipeline.move("w", 0, 4)
    service.until(lambda: service.ids() == [1, 2, 3, 4])
    with reader_session(service.dsn, "test") as session:
        install(session)
        publish(session, {"s": StreamUpdate(6, {})})
        assert service.sql.execute(TAKE).fetchall() == [(4, 6, [])]
        pipeline.move("w", 4, 8)
        service.until(lambda: service.ids() == [1, 2, 3, 4, 7, 8])
        pipeline.publish(stream("s", linear=8, linear_prev=8, late=[LateEffect("w", 1, 1, 2, 1, "regressed")]))
        service.until(lambda: service.ids(late=True) == [2])
        late = PublishedLate(service.place().late, "w", 1, 1, 2, 1, "regressed")
        publish(session, {"s": StreamUpdate(9, {}, late=[late])})
        assert service.sql.execute(TAKE).fetchall() == [(8, 9, [])]
        assert service.sql.execute(TAKE).fetchall() == []


def test_a_reader_that_begins_in_sql_goes_on_in_python(service: ReadingService, pipeline: Pipeline) -> None:
    service.write(*range(1, 7))
    with reader_session(service.dsn, "test") as session:
        install(session)
        publish(session, {"s": StreamUpdate(3, {})})
    assert service.sql.execute(TAKE).fetchall() == [(0, 3, [])]
    pipeline.move("w", 0, 6)
    service.until(lambda: service.ids() == [4, 5, 6])


def test_a_fact_that_python_read_where_an_operator_had_skipped_does_not_come_late_in_sql(
    service: ReadingService, pipeline: Pipeline
) -> None:
    """Its row was there when the skipped range was read; the fact beside it came later."""
    service.write(1, 3)
    pipeline.publish(stream("s", advance("w", 0, 4, facts=2, skipped=2), linear=4))
    service.until(lambda: service.ids() == [1, 3])
    with reader_session(service.dsn, "test") as session:
        install(session)
        late = PublishedLate(service.place().late + 1, "w", 1, 2, 4, 2, "skipped")
        service.write(4)
        publish(session, {"s": StreamUpdate(5, {}, late=[late])})
        assert service.sql.execute(TAKE).fetchall() == [(4, 5, [4])]
        assert service.sql.execute(TAKE).fetchall() == []


def test_a_fact_that_one_form_has_parked_is_retried_in_the_other(service: ReadingService, pipeline: Pipeline) -> None:
    service.write(*range(1, 7))
    with reader_session(service.dsn, "test") as session:
        install(session)
        publish(session, {"s": StreamUpdate(3, {})})
        assert service.sql.execute(TAKE).fetchall() == [(0, 3, [])]
        service.sql.execute("select tidemark_reader.park('s', 'copier', 2, 'no such address')")
        service.sql.execute("update tidemark_reader.parked set retry_at = now()")
        pipeline.move("w", 0, 6)
        service.until(lambda: sorted(service.ids()) == [2, 4, 5, 6])
        assert service.sql.execute("select count(*) from tidemark_reader.parked").fetchone() == (0,)
