"""Log lines on stderr: for people on a terminal, as JSON where a machine reads them. One line is one event, also where
a library speaks or something ends that nobody expected."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tidemark.app.output import printable
from tidemark.app.settings import Settings, called
from tidemark.common.log import configure_later, configure_now, get_logger

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger


def configure(settings: Settings) -> None:
    """Call once per process, before the first line is logged."""
    configure_at_first_line(settings)
    configure_now()


def configure_at_first_line(settings: Settings) -> None:
    """The same for a process that may log nothing: structlog is imported with the first line."""
    # What these libraries complain of reaches us as an exception too, and whatever handles that logs it.
    for library in ("psycopg", "py4j", "opentelemetry"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_py4j)  # of a lost connection py4j tells the root logger itself
    if settings.log_format == "json":
        sys.excepthook = lambda *error: _ended(error)
        threading.excepthook = lambda it: _ended((it.exc_type, it.exc_value or it.exc_type(), it.exc_traceback))
    root = logging.getLogger()
    for handler in [it for it in root.handlers if isinstance(it, _OfLibraries)]:
        root.removeHandler(handler)
    root.addHandler(_OfLibraries())
    logging.captureWarnings(capture=True)
    configure_later(partial(_configure_structlog, settings))


def _configure_structlog(settings: Settings) -> None:
    import structlog  # noqa: PLC0415 - its import takes a tenth of a second

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
        colours = sys.stderr.isatty() and not settings.no_color
        shape = [_that_no_terminal_obeys, structlog.dev.ConsoleRenderer(colors=colours)]
    structlog.configure(
        processors=[*common, *shape],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class _OfLibraries(logging.Handler):
    """What they log, from warnings up, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        log = get_logger(record.name)
        log.log(record.levelno, " ".join(record.getMessage().split()), exc_info=record.exc_info or False)


def _ended(error: tuple[type[BaseException], BaseException, TracebackType | None]) -> None:
    get_logger(__name__).critical("Ended by an error that nobody expected", exc_info=error)


def _that_no_terminal_obeys(_: "WrappedLogger", __: str, entry: "EventDict") -> "EventDict":
    return {name: printable(value) if isinstance(value, str) else value for name, value in entry.items()}


def _by_the_names_that_the_reader_knows(_: "WrappedLogger", __: str, entry: "EventDict") -> "EventDict":
    return {name: called(value) if isinstance(value, str) else value for name, value in entry.items()}


def _not_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


WINDOW = 60.0  # seconds
WRITTEN = 10  # lines of one kind in a window
SHOWN = 100  # characters of a client's text that are kept and logged

Level = Literal["info", "warning"]


def shortened(text: str) -> str:
    """The beginning of a client's text, and how long it was if that is not all."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


@dataclass(slots=True)
class _Kind:
    level: Level
    since: float
    written: int = 0
    counted: int = 0


class RepeatedLog:
    """For one thread. A kind is the text of an event, which must be a constant."""

    def __init__(self, log: Any, now: Callable[[], float] = time.monotonic) -> None:
        """`log` is a logger of structlog; `now` gives seconds of a clock that only goes forward."""
        self._log = log
        self._now = now
        self._kinds: dict[str, _Kind] = {}

    def write(self, level: Level, event: str, **fields: str) -> None:
        """Write the line, or count it if the window has had its lines. Texts among the fields are shortened."""
        self.flush()
        kind = self._kinds.setdefault(event, _Kind(level, self._now()))
        if kind.written >= WRITTEN:
            kind.counted += 1
            return
        kind.written += 1
        self._log.log(_NUMBERS[level], event, **{name: shortened(value) for name, value in fields.items()})

    def flush(self) -> None:
        """Write how many lines were left out in windows that are over. To be called now and then."""
        now = self._now()
        for event, kind in [*self._kinds.items()]:
            if now - kind.since >= WINDOW:
                del self._kinds[event]
                if kind.counted:
                    self._log.log(_NUMBERS[kind.level], event, left_out=kind.counted, seconds=round(now - kind.since))


_NUMBERS: dict[Level, int] = {"info": 20, "warning": 30}
