"""One process of a simulation: `python -m tidemark.app.simulation`.

The first line of standard input is the role of the process, as JSON. The process ends at SIGTERM, or when standard
input closes, which means that the parent process is dead. It ignores SIGINT: Ctrl-C is for the parent process.
"""

import os
import signal
import sys
import threading

import msgspec

from tidemark.app import logs, relay
from tidemark.app.logs import shutdown_event
from tidemark.app.settings import load
from tidemark.app.simulation import room_services, services, sql_readers
from tidemark.app.simulation.workload import ProcessRole
from tidemark.common.errors import TidemarkError


def main() -> None:
    """Run the role that standard input gives, until SIGTERM or the end of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopping = shutdown_event(signals=[signal.SIGTERM])
    role = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessRole)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    settings = load()
    logs.configure(settings)
    if role.service:
        services.run_service(role.service, role.facts_dsn, stopping)
    elif role.reader:
        servers = services.ReaderServers(role.facts_dsn, role.effects_dsn, settings.redis, settings.postgres())
        services.run_reader(role.reader, servers, stopping)
    elif role.sql_reader:
        sql_readers.run_sql_reader(role.sql_reader, role.facts_dsn, stopping)
    elif role.room_service:
        room_services.run_room_service(role.room_service, role.facts_dsn, stopping)
    elif role.room_client:
        servers = services.ReaderServers(role.facts_dsn, role.effects_dsn, settings.redis, settings.postgres())
        room_services.run_room_clients(role.room_client, servers, stopping)
    else:
        relay.run(settings, relay.RelayPlan(role.facts_dsn, writer=None, metrics_address=None))


def _end_with_parent() -> None:
    """Wait until standard input closes, and then send SIGTERM to this process."""
    os.read(sys.stdin.fileno(), 1)  # unbuffered: a buffered read holds a lock that the interpreter needs when it exits
    os.kill(os.getpid(), signal.SIGTERM)


try:
    main()
except TidemarkError as error:
    sys.exit(f"Error: {error}")
