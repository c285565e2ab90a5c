import pytest

from tidemark.app.read_side.opened import ReadSideConfig


@pytest.fixture
def servers(redis_url: str, dsn: str) -> ReadSideConfig:
    """What a sidecar of this test reads."""
    return ReadSideConfig(redis_url, dsn)
