from collections.abc import Iterator

import pytest

from tests.app.sidecar.given import SidecarClient, sidecar
from tidemark.app.sidecar.service import SidecarServers


@pytest.fixture
def client(servers: SidecarServers) -> Iterator[SidecarClient]:
    """Of a sidecar on both servers, without tokens."""
    with sidecar(servers) as client:
        yield client
