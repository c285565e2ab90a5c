"""The past hour of a stream and its readers, as the sidecar answers them: lag, moves, gaps, places and metrics."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from tests.app.sidecar.given import At, SidecarClient, moved
from tests.sinks.given import batch
from tests.sinks.reader.conftest import brisk, service
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tidemark.app.read_side import postgres_reader
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.history import LagHistory
from tidemark.streaming.core.effects import ClosedGap, Gap, StreamEffects

__all__ = ["brisk", "service"]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_reader, "CHART_CACHE_SECONDS", 0.0)
    monkeypatch.setattr(postgres_reader, "READERS_CACHE_SECONDS", 0.0)


def publish(pipeline: Pipeline, seconds_ago: float, *effects: StreamEffects, **more: Any) -> None:
    """A batch of that age."""
    pipeline.number += 1
    now = int((time.time() - seconds_ago) * 1000)
    made = batch(pipeline.number, *effects, token=pipeline.lease.token, now=now, **more)
    pipeline.mirror.publish(made, pipeline.store.apply(made))


def blocked(pipeline: Pipeline) -> None:
    """Half an hour ago `w` left ID 4 open, while `v` went on; ten minutes ago it completed."""
    gap = Gap("w", 1, 3, 4, int((time.time() - 1800) * 1000))
    publish(pipeline, 2400, moved("s", 3, v=At(0, 2), w=At(0, 3)))
    publish(pipeline, 1800, replace(moved("s", 3, v=At(2, 6), w=At(3, 3, pending=5, since=gap.since)), gaps=[gap]))
    closed = [ClosedGap("w", 4, "completed")]
    publish(pipeline, 600, replace(moved("s", 6, v=At(6, 6), w=At(3, 5)), closed=closed))


def test_the_past_hour_of_a_stream_is_answered(pipeline: Pipeline, client: SidecarClient) -> None:
    """A new visitor sees that the stream was blocked for twenty minutes, by which writer, and that it moves again."""
    blocked(pipeline)
    answer = client.json("/v1/streams/s/history")
    lag, step = answer["lag_seconds"], answer["step_seconds"]
    assert (len(lag), step) == (120, 30)
    since = datetime.fromisoformat(answer["since"])
    assert abs(datetime.now(UTC) - timedelta(hours=1) - since) < timedelta(minutes=1)
    assert lag[:57] == [0] * 57
    assert lag[62] == pytest.approx(60, abs=90)
    assert max(lag) == pytest.approx(1200, abs=90)
    assert lag[102:] == [0] * 18
    v, w = answer["writers"]
    assert (v["writer"], sum(v["moved"]), v["gaps"]) == ("v", 6, [])
    first, second = (at for at, moved in enumerate(w["moved"]) if moved)
    assert first == pytest.approx(40, abs=2)
    assert second - first == pytest.approx(60, abs=1)
    (gap,) = w["gaps"]
    assert (gap["low"], gap["top"], gap["closed_by"]) == (3, 4, "completed")


def test_a_gap_that_is_older_than_the_hour_still_blocks(pipeline: Pipeline, client: SidecarClient) -> None:
    """Its stream has not moved since, so nothing but the gap tells it."""
    gap = Gap("w", 1, 3, 4, int((time.time() - 7200) * 1000))
    publish(pipeline, 7200, replace(moved("s", 3, w=At(0, 3, pending=5, since=gap.since)), gaps=[gap]))
    answer = client.json("/v1/streams/s/history")
    assert answer["lag_seconds"][0] < answer["lag_seconds"][-1]
    assert answer["lag_seconds"][-1] == pytest.approx(3600, abs=60)
    assert [gap["closed"] for gap in answer["writers"][0]["gaps"]] == [None]


def test_a_stream_without_a_past_hour_has_no_lag(pipeline: Pipeline, client: SidecarClient) -> None:
    """All of it is older. And an unknown stream is answered as everywhere."""
    publish(pipeline, 7200, moved("s", 3, w=At(0, 3)))
    answer = client.json("/v1/streams/s/history")
    assert (answer["lag_seconds"], answer["writers"]) == ([0] * 120, [])
    client.json("/v1/streams/none/history", status=404)
    client.json("/v1/streams/none/readers", status=404)


def test_when_a_position_was_passed(pipeline: Pipeline, dsn: str) -> None:
    """Exactly, if the history shows the move; a search may begin at a time that is known."""
    blocked(pipeline)
    with session_of(dsn, "test") as session:
        history = LagHistory(session)
        passed = history.passed_at("s", 3)
        assert passed is not None
        assert abs((datetime.now(UTC) - passed).total_seconds() - 600) < 30
        assert history.passed_at("s", 3, passed - timedelta(minutes=1)) == passed
        assert history.passed_at("s", 6) is None
        assert history.linear_positions(["s", "none"]) == {"s": 6}


def test_the_readers_of_a_stream_are_answered_and_measured(
    service: ReadingService, pipeline: Pipeline, client: SidecarClient, sql: psycopg.Connection
) -> None:
    """Place, lag and state; the same as metrics; a reader that is gone has no series."""
    blocked(pipeline)
    assert client.json("/v1/streams/s/readers") == {"stream": "s", "readers": []}
    service.write(1)
    service.until(lambda: service.place().linear == 6)
    sql.execute("update tidemark_reader.places set linear = 3, updated_at = now() - interval '9 min'")
    (reader,) = client.json("/v1/streams/s/readers")["readers"]
    assert (reader["reader"], reader["state"], reader["token"]) == ("copier", "not running", "m3")
    assert (reader["lag_ids"], reader["parked"], reader["late"], reader["copies"]) == (3, 0, 0, 0)
    assert reader["lag_seconds"] == pytest.approx(600, abs=60)
    metrics = client.get("/metrics").text
    assert 'tidemark_reader_lag_ids{reader="copier",stream="s"} 3.0' in metrics
    assert 'tidemark_reader_linear_position{reader="copier",stream="s"} 3.0' in metrics
    assert 'tidemark_reader_parked{reader="copier",stream="s"} 0.0' in metrics
    assert 'tidemark_reader_lag_seconds{reader="copier",stream="s"} ' in metrics
    sql.execute("delete from tidemark_reader.places")
    assert 'reader="copier"' not in client.get("/metrics").text
