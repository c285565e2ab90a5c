"""Log lines on stderr: for people on a terminal, as JSON where a machine reads them. One line is one event, also where
a library speaks or something ends that nobody expected."""

import logging
import sys
import threading
from types import TracebackType

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tidemark.app.printed import printable
from tidemark.app.settings import Settings, called


def configure(settings: Settings) -> None:
    """Call once per process, before the first line is logged."""
    # What these libraries complain of reaches us as an exception too, and whatever handles that logs it.
    for library in ("psycopg", "py4j", "opentelemetry"):
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
        sys.excepthook = lambda *error: _ended(error)
        threading.excepthook = lambda it: _ended((it.exc_type, it.exc_value or it.exc_type(), it.exc_traceback))
    else:
        colours = sys.stderr.isatty() and not settings.no_color
        shape = [_that_no_terminal_obeys, structlog.dev.ConsoleRenderer(colors=colours)]
    root = logging.getLogger()
    for handler in [it for it in root.handlers if isinstance(it, _OfLibraries)]:
        root.removeHandler(handler)
    root.addHandler(_OfLibraries())
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[*common, *shape],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class _OfLibraries(logging.Handler):
    """What they log, from warnings up, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, " ".join(record.getMessage().split()), exc_info=record.exc_info or False)


def _ended(error: tuple[type[BaseException], BaseException, TracebackType | None]) -> None:
    structlog.get_logger(__name__).critical("Ended by an error that nobody expected", exc_info=error)


def _that_no_terminal_obeys(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    return {name: printable(value) if isinstance(value, str) else value for name, value in entry.items()}


def _by_the_names_that_the_reader_knows(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    return {name: called(value) if isinstance(value, str) else value for name, value in entry.items()}


def _not_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"
