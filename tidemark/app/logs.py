"""Log lines on stderr, as text for people or as JSON for programs, and the shutdown signals of a process.

In JSON, each log event is one line, also if the event is an unexpected error. `RepeatedLog` limits the number of log
lines that clients can cause. `shutdown_event` sets an event at the first shutdown signal.
"""

import _thread
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tidemark.app.output import CLEAR_LINE, escape_unprintable
from tidemark.app.settings import Settings
from tidemark.common.log import configure_later, configure_now, get_logger

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger


def configure(settings: Settings) -> None:
    """Configure the log at once. Call this function once per process, before the first line is logged."""
    configure_at_first_line(settings)
    configure_now()


def configure_at_first_line(settings: Settings) -> None:
    """Configure the logs of libraries and, for JSON, the handlers of unexpected errors. structlog is configured when
    the first line is logged, so a process that logs nothing does not import structlog.
    """
    # These libraries log errors that they also raise. Tidemark logs or reports the raised errors.
    for library in ("psycopg", "py4j", "opentelemetry"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_from_py4j)  # py4j logs a lost connection to the root logger
    if settings.log_format == "json":
        sys.excepthook = lambda *error: _log_crash(error)
        threading.excepthook = lambda args: _log_crash(
            (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
        )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _LibraryHandler)]:
        root.removeHandler(handler)
    root.addHandler(_LibraryHandler())
    logging.captureWarnings(capture=True)
    configure_later(partial(_configure_structlog, settings))


def _configure_structlog(settings: Settings) -> None:
    import structlog  # noqa: PLC0415 - its import takes a tenth of a second

    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    shape: list[Processor]
    if settings.log_format == "json":
        shape = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        colours = sys.stderr.isatty() and not settings.no_color
        shape = [_escape_control_characters, structlog.dev.ConsoleRenderer(colors=colours)]
        if colours:
            shape.append(_clear_progress_bar)
    structlog.configure(
        processors=[*common, *shape],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class _LibraryHandler(logging.Handler):
    """Writes the log records of libraries in the log format of this process."""

    def emit(self, record: logging.LogRecord) -> None:
        log = get_logger(record.name)
        log.log(record.levelno, " ".join(record.getMessage().split()), exc_info=record.exc_info or False)


def _log_crash(error: tuple[type[BaseException], BaseException, TracebackType | None]) -> None:
    get_logger(__name__).critical("An unexpected error ended this process or one of its threads", exc_info=error)


def _escape_control_characters(_: "WrappedLogger", __: str, entry: "EventDict") -> "EventDict":
    return {name: escape_unprintable(value) if isinstance(value, str) else value for name, value in entry.items()}


def _clear_progress_bar(_: "WrappedLogger", __: str, line: Any) -> str:
    """Prefix a log line with a code that clears a progress bar on the terminal. The bar reappears below the line."""
    return f"{CLEAR_LINE}{line}"


def _is_not_from_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


WINDOW_SECONDS = 60.0
MAX_LINES = 10  # of one event in a window
MAX_TEXT_CHARS = 100  # of a client's text

Level = Literal["info", "warning"]


def shorten(text: str) -> str:
    """Truncate a client's text to its first `MAX_TEXT_CHARS` characters, and append the original length. A text that is
    not longer is returned unchanged."""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}... ({len(text)} characters)"


@dataclass(slots=True)
class _EventWindow:
    """The number of written and suppressed lines of one event since `began_at` (seconds, monotonic)."""

    level: Level
    began_at: float
    written_count: int = 0
    suppressed_count: int = 0


class RepeatedLog:
    """Writes at most `MAX_LINES` lines for each event in a window, and counts the suppressed lines. Not thread-safe.

    A client can cause the same event thousands of times a second. The window of an event begins with its first line,
    and ends after `WINDOW_SECONDS`. Use a constant text as `event`: lines with the same text are counted together.
    """

    def __init__(self, log: Any, now: Callable[[], float] = time.monotonic) -> None:
        """`log`: a structlog logger. `now`: returns seconds of a monotonic clock."""
        self._log = log
        self._now = now
        self._window_by_event: dict[str, _EventWindow] = {}

    def write(self, level: Level, event: str, **fields: str) -> None:
        """Write a line, or only count the line if its event already has `MAX_LINES` lines in the window. Shortens the
        texts in `fields`."""
        self.flush()
        window = self._window_by_event.setdefault(event, _EventWindow(level, self._now()))
        if window.written_count >= MAX_LINES:
            window.suppressed_count += 1
            return
        window.written_count += 1
        self._log.log(_LEVEL_NUMBERS[level], event, **{name: shorten(value) for name, value in fields.items()})

    def flush(self) -> None:
        """Log the number of suppressed lines of each window that has ended. Call this method regularly, because `write`
        calls it only for the next line of a client."""
        now = self._now()
        for event, window in [*self._window_by_event.items()]:
            if now - window.began_at >= WINDOW_SECONDS:
                del self._window_by_event[event]
                if window.suppressed_count:
                    seconds = round(now - window.began_at)
                    self._log.log(
                        _LEVEL_NUMBERS[window.level], event, left_out=window.suppressed_count, seconds=seconds
                    )


_LEVEL_NUMBERS: dict[Level, int] = {"info": 20, "warning": 30}


SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def shutdown_event(
    on_shutdown: Callable[[], object] = lambda: None,
    *,
    signals: Sequence[signal.Signals] = SHUTDOWN_SIGNALS,
    repeat_handler: signal.Handlers = signal.SIG_IGN,
) -> threading.Event:
    """Create an event that is set when the first of the signals arrives. Call this function on the main thread.

    Python runs signal handlers on the main thread, possibly while the main thread has the event's lock inside `wait`.
    If a handler called `set`, it could deadlock. So a helper thread calls `set`; `_thread` starts the thread without a
    lock.

    Args:
        on_shutdown: called on the helper thread after the event is set; again if another of the signals arrives.
        signals: the signals. Replaces their handlers.
        repeat_handler: the handler of a signal from its first arrival on.
    """
    shutdown = threading.Event()

    def finish() -> None:
        shutdown.set()
        on_shutdown()

    def handle(number: int, _: object) -> None:
        signal.signal(number, repeat_handler)
        _thread.start_new_thread(finish, ())

    for number in signals:
        signal.signal(number, handle)
    return shutdown


@contextmanager
def run_in_thread(work: Callable[[], None], halt: threading.Event) -> Iterator[None]:
    """Run `work` in a thread while the block runs.

    The end of the block sets `halt`, and waits until `work` returns. `work` must return soon after `halt` is set. If
    `work` raises an error, `halt` is set at once, and the end of the block raises the error.
    """
    failures = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            halt.set()

    thread = threading.Thread(target=run, name="positions")
    thread.start()
    try:
        yield
    finally:
        halt.set()
        thread.join()
        if failures:
            raise failures[0]
