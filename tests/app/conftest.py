import pytest

from tidemark.app.sidecar.service import Servers


@pytest.fixture
def servers(redis_url: str, dsn: str) -> Servers:
    """What a sidecar of this test reads."""
    return Servers(redis_url, dsn)
