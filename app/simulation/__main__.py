"""One process of a play: `python -m tidemark.app.simulation writer ROLE` or `... reader ROLE`; a role is JSON.

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
from tidemark.sources.simulator import service
from tidemark.sources.simulator.tables import own_database
from tidemark.streaming.errors import TidemarkError


def main(kind: str, role: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ending = service.Ending()
    signal.signal(signal.SIGTERM, _calls(ending.stop))
    signal.signal(signal.SIGUSR1, _calls(ending.retire))
    threading.Thread(target=_await_orphanage, args=[ending], daemon=True).start()
    settings = load()
    logs.configure(settings)
    dsn = own_database(settings.postgres())
    if kind == "writer":
        written = msgspec.json.decode(role, type=service.WriterRole)
        service.serve(written, dsn, settings.kafka, settings.kafka_facts_topic, ending)
    else:
        servers = reading.ReaderServers(dsn, settings.redis, settings.postgres())
        reading.read(msgspec.json.decode(role, type=reading.ReaderRole), servers, ending.told)


def _calls(act: Callable[[], None]) -> Callable[[int, object], None]:
    return lambda _number, _frame: act()


def _await_orphanage(ending: service.Ending) -> None:
    os.read(sys.stdin.fileno(), 1)  # a buffered read would hold a lock that the interpreter wants as it ends
    ending.stop()


try:
    main(*sys.argv[1:])
except TidemarkError as error:
    sys.exit(f"Error: {error}")
