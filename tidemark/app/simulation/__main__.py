"""One process of a play: `python -m tidemark.app.simulation`, which is told its part by the first line of its input.

It ends in peace at SIGTERM, and when its standard input ends: then its director is dead. Ctrl-C of a terminal is for
the director alone.
"""

import os
import signal
import sys
import threading

import msgspec

from tidemark.app import logs, relay
from tidemark.app.settings import load
from tidemark.app.signals import told_to_end
from tidemark.app.simulation import room_services, services
from tidemark.app.simulation.processes import Part
from tidemark.common.errors import TidemarkError


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = told_to_end(numbers=[signal.SIGTERM])
    part = msgspec.json.decode(sys.stdin.buffer.readline(), type=Part)
    threading.Thread(target=_await_orphanage, daemon=True).start()
    settings = load()
    logs.configure(settings)
    if part.service:
        services.serve(part.service, part.facts, told)
    elif part.reader:
        servers = services.ReaderServers(part.facts, part.effects, settings.redis, settings.postgres())
        services.read(part.reader, servers, told)
    elif part.room_service:
        room_services.serve_rooms(part.room_service, part.facts, told)
    elif part.room_client:
        servers = services.ReaderServers(part.facts, part.effects, settings.redis, settings.postgres())
        room_services.read_rooms(part.room_client, servers, told)
    else:
        relay.run(settings, relay.RelayPlan(part.facts, writer=None, metrics=None))


def _await_orphanage() -> None:
    os.read(sys.stdin.fileno(), 1)  # a buffered read would hold a lock that the interpreter wants as it ends
    os.kill(os.getpid(), signal.SIGTERM)


try:
    main()
except TidemarkError as error:
    sys.exit(f"Error: {error}")
