"""Each test finds logging as tests begin with it: a command that runs in this process configures it for all."""

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    before, handlers = structlog.get_config(), [*logging.getLogger().handlers]
    yield
    structlog.configure(**before)
    logging.getLogger().handlers[:] = handlers
    logging.captureWarnings(capture=False)
