import pytest

from tidemark.app.sidecar.service import SidecarServers


@pytest.fixture
def servers(redis_url: str, dsn: str) -> SidecarServers:
    """What a sidecar of this test reads."""
    return SidecarServers(redis_url, dsn)
