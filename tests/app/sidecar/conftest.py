from collections.abc import Iterator

import pytest

from tests.app.sidecar.given import SidecarClient, sidecar
from tidemark.app.read_side import ReadSideConfig


@pytest.fixture
def client(servers: ReadSideConfig) -> Iterator[SidecarClient]:
    """Of a sidecar on both servers, without tokens."""
    with sidecar(servers) as client:
        yield client
