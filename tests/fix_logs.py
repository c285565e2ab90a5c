"""Each test finds logging as tests begin with it: a command that runs in this process configures it for all."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from tidemark.common.log import configure_now


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    before, handlers = structlog.get_config(), [*logging.getLogger().handlers]
    yield
    configure_now()  # a command that logged no line has left its configuration for the next test's first line
    structlog.configure(**before)
    logging.getLogger().handlers[:] = handlers
    logging.captureWarnings(capture=False)
