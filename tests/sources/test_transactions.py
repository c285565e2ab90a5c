"""What is told of open transactions, without a database."""

from datetime import UTC, datetime, timedelta

from tidemark.sources.transactions import OpenTransaction, SourceReports
from tidemark.streaming.wire.records import MAX_TRANSACTION_LENGTH, MAX_TRANSACTIONS

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


TELLERS = {"orders": ("shop", 7)}


def held(
    pid: int | None, seconds: float = 60, stream: str = "orders", application: str = "checkout"
) -> OpenTransaction:
    began = NOW - timedelta(seconds=seconds)
    gid = None if pid is not None else "two"
    return OpenTransaction(
        stream, "till", pid, gid, "web", application, "idle in transaction", began, "insert 'secret'"
    )


def said(reports: SourceReports, *found: OpenTransaction) -> dict[str, list[str]]:
    return {record.stream: record.transactions for record in reports.take_due_records(found, NOW)}


def test_who_holds_a_stream_is_told_once_and_when_it_changes() -> None:
    """At first also that nobody does, for a relay before may have named some; then nothing until others hold it."""
    reports = SourceReports(TELLERS | {"items": ("shop", 7)})
    assert said(reports) == {"orders": [], "items": []}
    assert said(reports) == {}
    process = "pid 7 since 2026-03-01 11:59:00.000Z, idle in transaction, user web, session named checkout"
    line = f"writer till, {process}: insert ?"
    assert said(reports, held(7)) == {"orders": [line]}
    assert said(reports, held(7)) == {}
    assert said(reports, held(7), held(None)) == {
        "orders": [line, "writer till, prepared transaction two since 2026-03-01 11:59:00.000Z, user web"]
    }
    assert said(reports) == {"orders": []}


def test_it_is_told_in_the_name_and_epoch_of_the_database() -> None:
    """Only a writer that has joined may say who holds its IDs."""
    (record,) = SourceReports(TELLERS).take_due_records([held(7)], NOW)
    assert (record.stream, record.writer, record.epoch) == ("orders", "shop", 7)


def test_what_transactions_usually_take_is_not_told() -> None:
    """Short ones come and go; of each a record would be one for every fact."""
    assert said(SourceReports(TELLERS), held(7, seconds=1)) == {"orders": []}


def test_no_value_of_a_query_leaves_the_database() -> None:
    """They are the service's own; the query without them is named, so that people find it in the service's code."""
    assert "secret" not in str(said(SourceReports(TELLERS), held(7), held(None)))


def test_what_is_told_has_a_bound() -> None:
    """Of very many the oldest are named, the others counted; no line is longer than the pipeline takes."""
    (lines,) = said(SourceReports(TELLERS), *(held(pid, application="x" * 900) for pid in range(30))).values()
    assert len(lines) == MAX_TRANSACTIONS
    assert lines[-1] == f"and {30 - MAX_TRANSACTIONS + 1} more"
    assert max(map(len, lines)) == MAX_TRANSACTION_LENGTH


def test_each_stream_sends_a_heartbeat_in_its_time_and_all_at_once() -> None:
    """Spark wakes up once for all of them. A heartbeat repeats all that is reported."""
    reports = SourceReports(TELLERS | {"items": ("shop", 7)}, 30)
    assert [it.heartbeat for it in reports.take_due_records([], NOW)] == [30, 30]
    assert [*reports.take_due_records([], NOW + timedelta(seconds=29))] == []
    assert [it.stream for it in reports.take_due_records([held(7)], NOW + timedelta(seconds=29))] == ["orders"]
    beats = [*reports.take_due_records([held(7)], NOW + timedelta(seconds=30), {"items": "the sequence has a CACHE"})]
    assert [(it.stream, len(it.transactions), it.blocked) for it in beats] == [
        ("orders", 1, ""),
        ("items", 0, "the sequence has a CACHE"),
    ]
    assert [
        *reports.take_due_records([held(7)], NOW + timedelta(seconds=31), {"items": "the sequence has a CACHE"})
    ] == []
    assert [it.stream for it in reports.take_due_records([held(7)], NOW + timedelta(seconds=32))] == ["items"]


def test_a_clock_that_is_set_back_stops_no_heartbeat() -> None:
    reports = SourceReports(TELLERS, 30)
    assert len([*reports.take_due_records([], NOW)]) == 1
    assert len([*reports.take_due_records([], NOW - timedelta(days=1))]) == 1
    assert len([*reports.take_due_records([], NOW - timedelta(days=1) + timedelta(seconds=30))]) == 1


def test_very_many_streams_have_a_heartbeat_less_often() -> None:
    """They say so: 20 records a second at the most."""
    reports = SourceReports({f"s{number}": ("shop", 1) for number in range(2000)}, 30)
    assert {it.heartbeat for it in reports.take_due_records([], NOW)} == {100}
    assert [*reports.take_due_records([], NOW + timedelta(seconds=99))] == []
    assert len([*reports.take_due_records([], NOW + timedelta(seconds=100))]) == 2000
