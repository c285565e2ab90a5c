"""How many files the sidecar may open, and how many clients it serves with that.

Each connection is a file. systemd allows a process 1,024 at first, and more if it asks. A process that runs out of
files can neither take a probe's connection nor open one to Redis or Postgres, so some are kept for these.
"""

import resource
from dataclasses import dataclass, replace

import structlog

from tidemark.common.errors import BadSetting

log = structlog.get_logger(__name__)

RESERVE = 192  # files for probes, for whoever is told that there is no place, and for Redis, Postgres, Kafka and Python
FEWEST = 8  # connections of each kind, below which it makes no sense to serve


@dataclass(frozen=True, slots=True)
class ServedClients:
    """`connections` of HTTP, of which `held` requests may be held open; `lines`: connections of the line protocol;
    `handshakes` of TLS that are under way."""

    connections: int
    held: int
    lines: int
    handshakes: int = 0


def within(allowed: int, wanted: ServedClients) -> ServedClients:
    """The most of what is wanted for which `allowed` files are enough, each kind cut by the same factor. Pure.

    Raises:
        BadSetting: not even a few of each kind find room.
    """
    needed, left = wanted.connections + wanted.lines + wanted.handshakes, allowed - RESERVE
    if needed <= left:
        return wanted

    def cut(count: int) -> int:
        return count * left // needed

    found = ServedClients(*map(cut, (wanted.connections, wanted.held, wanted.lines, wanted.handshakes)))
    if min(found.connections, found.lines) < min(FEWEST, wanted.connections, wanted.lines):
        raise BadSetting(
            "TIDEMARK_SIDECAR_MAX_CONNECTIONS",
            f"the process may open {allowed} files, and {RESERVE} of them are for probes and servers; raise the limit"
            " (ulimit -n, or LimitNOFILE of systemd)",
        )
    return replace(found, held=max(1, found.held))


def provided(wanted: ServedClients) -> ServedClients:
    """Raise the process's limit of open files to what is wanted, as far as it may, and say how many clients that
    serves. Raises `BadSetting`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted.connections + wanted.lines + wanted.handshakes + RESERVE
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    allowed = needed if soft == resource.RLIM_INFINITY else soft
    served = within(allowed, wanted)
    if served != wanted:
        log.warning(
            "The process may open few files, so it serves fewer clients than its settings say; raise LimitNOFILE",
            files=allowed,
            needed=needed,
            connections=served.connections,
            held=served.held,
            lines=served.lines,
        )
    else:
        log.info("Open files", allowed=allowed, needed=needed)
    return served
