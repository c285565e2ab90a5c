"""Log lines on stderr: for people on a terminal, as JSON where a machine reads them."""

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tidemark.app.settings import Settings, called


def configure(settings: Settings) -> None:
    """Call once per process, before the first line is logged."""
    # What these libraries complain of reaches us as an exception too, and whatever handles that logs it.
    for library in ("psycopg", "py4j"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_py4j)  # of a lost connection py4j tells the root logger itself
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _by_the_names_that_the_reader_knows,
    ]
    shape: list[Processor]
    if settings.log_format == "json":
        shape = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        shape = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*common, *shape],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _by_the_names_that_the_reader_knows(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    return {name: called(value) if isinstance(value, str) else value for name, value in entry.items()}


def _not_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"
