"""One process of a play: `python -m tidemark.app.simulation`, which is told its part by the first line of its input.

It ends in peace at SIGTERM (a writer retires at SIGUSR1), and when its standard input ends: then its director is dead.
Ctrl-C of a terminal is for the director alone.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from tidemark.app import logs
from tidemark.app.settings import load
from tidemark.app.simulation import reading
from tidemark.app.simulation.company import Part
from tidemark.sources.simulator import service
from tidemark.streaming.errors import TidemarkError


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ending = service.Ending()
    signal.signal(signal.SIGTERM, _calls(ending.stop))
    signal.signal(signal.SIGUSR1, _calls(ending.retire))
    part = msgspec.json.decode(sys.stdin.buffer.readline(), type=Part)
    threading.Thread(target=_await_orphanage, args=[ending], daemon=True).start()
    settings = load()
    logs.configure(settings)
    if part.writer:
        service.serve(part.writer, part.facts, settings.kafka, settings.kafka_facts_topic, ending)
    if part.reader:
        servers = reading.ReaderServers(part.facts, part.effects, settings.redis, settings.postgres())
        reading.read(part.reader, servers, ending.told)


def _calls(act: Callable[[], None]) -> Callable[[int, object], None]:
    return lambda _number, _frame: act()


def _await_orphanage(ending: service.Ending) -> None:
    os.read(sys.stdin.fileno(), 1)  # a buffered read would hold a lock that the interpreter wants as it ends
    ending.stop()


try:
    main()
except TidemarkError as error:
    sys.exit(f"Error: {error}")
