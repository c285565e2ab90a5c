"""Loggers that configure structlog with the first line."""

import threading
import time

from tidemark.common.log import configure_later, configure_now


def test_no_thread_logs_before_the_configuration_is_complete() -> None:
    """Two threads log their first line at once: the second waits until the first has configured structlog."""
    configured: list[bool] = []
    seen: list[int] = []

    def configure() -> None:
        time.sleep(0.1)
        configured.append(True)

    def log_first_line() -> None:
        configure_now()
        seen.append(len(configured))

    configure_later(configure)
    threads = [threading.Thread(target=log_first_line) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 4
