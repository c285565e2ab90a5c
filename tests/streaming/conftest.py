"""Tests of compiled code wait until it is loaded."""

import pytest

from tidemark.streaming.ingest import jit_loader


@pytest.fixture(scope="session", autouse=True)
def _compiled_code() -> None:
    jit_loader.MAX_SLOW_SECONDS = 0.0
