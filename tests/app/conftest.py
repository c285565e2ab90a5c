from collections.abc import Iterator

import pytest

from tests.app.recording import Recording
from tests.sinks.reader.given import Pipeline
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.stack.processes import KafkaServer


@pytest.fixture
def servers(redis_url: str, dsn: str) -> ReadSideConfig:
    """What a sidecar of this test reads."""
    return ReadSideConfig(redis_url, dsn)


@pytest.fixture
def recording(pipeline: Pipeline, dsn: str, redis_url: str, kafka: KafkaServer, prefix: str) -> Iterator[Recording]:
    """What `Recording.tell` tells, on topics of its own."""
    with Recording(pipeline, dsn, redis_url, kafka.bootstrap_servers, prefix) as told:
        told.tell()
        yield told
